# SPDX-License-Identifier: Apache-2.0
"""The build on first use, with a fake compiler: cache, lock, failures, concurrency, versions."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from wan22_vae_decode import jit
from wan22_vae_decode.jit import arch as arch_module
from wan22_vae_decode.jit import builder, cache, toolchain
from wan22_vae_decode.jit.toolchain import Nvcc, Toolchain

# Appends a line to calls.txt, then does what the folder's plan says: fail, spill, serialise, wait.
FAKE_NVCC = """#!{python}
import os, pathlib, sys, time
here = pathlib.Path(__file__).resolve().parent.parent
plan = (here / "plan").read_text().split() if (here / "plan").exists() else []
if "--version" in sys.argv:
    print("Cuda compilation tools, release {version}, V{version}.1")
    print("Build fake_{version}")
    sys.exit(0)
with (here / "pids.txt").open("a") as pids:
    pids.write(f"{{os.getpid()}}\\n")
with (here / "calls.txt").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
for word in plan:
    if word.startswith("wait="):
        time.sleep(float(word[5:]))
source = sys.argv[-1]
if "fail" in plan and source.endswith(".cu"):
    print(source + "(3): error: expected a ';'")
    print(source + "(4): error: another")
    sys.exit(2)
spilled = 8 if "spill" in plan else 0
print(f"    0 bytes stack frame, {{spilled}} bytes spill stores, {{spilled}} bytes spill loads")
if "serialise" in plan:
    print("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized")
output = sys.argv[sys.argv.index("-o") + 1]
included = [pathlib.Path(word[8:]).read_text() for word in plan if word.startswith("include=")]
assert not included or "-I." in sys.argv or "-c" not in sys.argv
pathlib.Path(output).write_text("built from " + " ".join([*sys.argv[1:], *included]))
"""


def fake_nvcc(root, version="12.9"):
    path = root / "bin" / "nvcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE_NVCC.format(python=sys.executable, version=version))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class World:
    """A fake compiler, two sources and a cache."""

    def __init__(self, root):
        self.root = root
        self.nvcc = Nvcc(fake_nvcc(root / "cuda"), (12, 9), "Build fake_12.9")
        self.sources = root / "csrc"
        self.sources.mkdir()
        for name in ("one.cu", "two.cu", "shared.cuh"):
            (self.sources / name).write_text(f"// {name}")
        self.cache = root / "cache"

    def plan(self, *words):
        (self.root / "cuda" / "plan").write_text(" ".join(words))

    @property
    def calls(self):
        path = self.root / "cuda" / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def running(self):
        """Compilers that have not ended; a dead one that nobody has collected counts as ended."""
        pids = (self.root / "cuda" / "pids.txt").read_text().split()
        states = [Path("/proc", pid, "stat") for pid in pids]
        return [path for path in states if path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"]

    def toolchain(self, **changes):
        values = {"nvcc": self.nvcc, "ninja": toolchain.find_ninja(), "includes": (self.root,), "cutlass": "4.2"}
        return Toolchain(**{**values, **changes})

    def recipe(self, arch="sm_90a"):
        units = (jit.Unit("one.cu", ("FAST",)), jit.Unit("one.cu"), jit.Unit("two.cu"))
        return jit.Recipe("kernels", self.sources, units, arch)

    def build(self, **changes):
        return jit.build(self.recipe(), self.toolchain(**changes))


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", str(made.cache))
    return made


def left_overs(world):
    return [path.name for path in world.cache.iterdir() if path.name.startswith(".")]


def test_builds_once_and_keeps_it(world):
    folder = world.build()
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", "libkernels.so", "manifest.json"]
    assert len(world.calls) == 4
    assert "-DFAST" in "".join(world.calls)
    assert all("-DNDEBUG" in call for call in world.calls if "-c" in call.split())
    assert world.build() == folder
    assert len(world.calls) == 4
    assert not left_overs(world)


@pytest.mark.parametrize("change", ["source", "header", "new file", "flags", "nvcc", "cutlass", "arch"])
def test_every_input_makes_another_entry(world, monkeypatch, change):
    before = world.recipe().key(world.toolchain())
    tools, recipe = world.toolchain(), world.recipe()
    if change == "source":
        (world.sources / "two.cu").write_text("// changed")
    elif change == "header":
        (world.sources / "shared.cuh").write_text("// changed")
    elif change == "new file":
        (world.sources / "new.cuh").write_text("")
    elif change == "flags":
        monkeypatch.setattr("wan22_vae_decode.jit.recipe.FLAGS", ("-O2",))
    elif change == "nvcc":
        tools = world.toolchain(nvcc=Nvcc(world.nvcc.path, (12, 9), "Build other"))
    elif change == "cutlass":
        tools = world.toolchain(cutlass="4.3")
    else:
        recipe = world.recipe("sm_100a")
    assert recipe.key(tools) != before


def test_generated_headers_are_written_beside_the_units_and_belong_to_the_key(world):
    plain = world.recipe()
    recipes = [replace(plain, generated=(("numbers.cuh", f"constexpr int kNumber = {n};\n"),)) for n in (1, 2)]
    keys = {recipe.key(world.toolchain()) for recipe in (plain, *recipes)}
    assert len(keys) == 3
    # The fake compiler copies the header that it finds in its folder into what it builds.
    world.plan("include=numbers.cuh")
    folder = jit.build(recipes[1], world.toolchain())
    assert "kNumber = 2" in (folder / recipes[1].library).read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", "libkernels.so", "manifest.json"]


def test_where_the_package_lies_does_not_matter(world, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in world.sources.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    recipe = jit.Recipe("kernels", moved, world.recipe().units, "sm_90a")
    assert recipe.key(world.toolchain(includes=(moved,))) == world.recipe().key(world.toolchain())


def test_a_failed_build_names_log_and_first_error_and_leaves_no_entry(world):
    world.plan("fail")
    with pytest.raises(jit.BuildError, match="error: expected a ';'") as failure:
        world.build()
    log = next(world.cache.glob("*.log"))
    assert str(log) in str(failure.value)
    assert "another" in log.read_text()
    assert not [path for path in world.cache.iterdir() if path.is_dir()]
    world.plan()
    assert (world.build() / "libkernels.so").exists()
    assert not list(world.cache.glob("*.failed.json"))
    assert not list(world.cache.glob("*.log"))


@pytest.mark.parametrize(("word", "message"), [("spill", "8 bytes spill stores"), ("serialise", "C7510")])
def test_slow_code_fails_the_build(world, word, message):
    world.plan(word)
    with pytest.raises(jit.BuildError, match=message):
        world.build()
    assert not [path for path in world.cache.iterdir() if path.is_dir()]


def refused_twice(sha256):
    """Before the lock, and under it."""
    refusals = iter([True, True])

    def hashed(path):
        if next(refusals, False):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return sha256(path)

    return hashed


@pytest.mark.parametrize(
    "damage",
    ["library", "unreadable library", "missing library", "manifest", "no manifest", "no files", "key", "owner"],
)
def test_a_damaged_or_foreign_entry_is_built_again(world, caplog, monkeypatch, damage):
    folder = world.build()
    good = (folder / "libkernels.so").read_bytes()
    manifest = folder / "manifest.json"
    if damage == "unreadable library":
        monkeypatch.setattr(cache, "sha256", refused_twice(cache.sha256))
    elif damage == "library":
        (folder / "libkernels.so").write_bytes(good[:-1])
    elif damage == "missing library":
        (folder / "libkernels.so").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "no files":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": {}}))
        (folder / "libkernels.so").unlink()
    elif damage == "key":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "key": "other"}))
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(manifest, 12345, -1)
    with caplog.at_level(logging.WARNING):
        assert world.build() == folder
    assert (folder / "libkernels.so").read_bytes() == good
    assert len(world.calls) == 8
    assert "rebuilding" in caplog.text
    assert not left_overs(world)


def test_a_cache_that_cannot_be_written_says_so(world):
    world.cache.write_text("a file, not a folder")
    with pytest.raises(jit.BuildError, match="WAN22_VAE_DECODE_CACHE"):
        world.build()


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (Path, "mkdir"),
        (os, "open"),
        (fcntl, "flock"),
        (tempfile, "mkdtemp"),
        (Path, "write_text"),
        (Path, "chmod"),
    ],
)
def test_a_disk_that_is_full_is_an_error_of_the_build(world, monkeypatch, module, call):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, call, full)
    with pytest.raises(jit.BuildError, match=r"cannot be used .*No space left.*WAN22_VAE_DECODE_CACHE") as refusal:
        world.build()
    monkeypatch.undo()
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", str(world.cache))
    assert refusal.value.__cause__.errno == errno.ENOSPC
    assert world.build().is_dir()
    assert not left_overs(world)


def test_a_cache_that_may_not_be_searched_holds_nothing(world, monkeypatch):
    def closed(call):
        def refused(path, *arguments, **options):
            if path.is_relative_to(world.cache):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return call(path, *arguments, **options)

        return refused

    world.build()
    for call in ("is_dir", "glob", "mkdir"):
        monkeypatch.setattr(Path, call, closed(getattr(Path, call)))
    assert not cache.entries(world.cache, "kernels-")
    assert builder.prebuilt(world.recipe(), None) is None
    with pytest.raises(jit.BuildError, match=r"cannot be used .*Permission denied"):
        world.build()


def test_a_finished_entry_needs_no_lock(world, monkeypatch):
    folder = world.build()
    monkeypatch.setattr(cache.Entry, "locked", lambda self: pytest.fail("took the lock"))
    assert world.build() == folder


def _build_in_process(root, barrier, results):
    world = World.__new__(World)
    world.root, world.sources, world.cache = root, root / "csrc", root / "cache"
    world.nvcc = Nvcc(root / "cuda" / "bin" / "nvcc", (12, 9), "Build fake_12.9")
    barrier.wait()
    try:
        results.put(str(world.build()))
    except jit.BuildError as error:
        results.put(f"failed: {error}")


def _race(world, processes=8):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=_build_in_process, args=(world.root, barrier, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    return answers


def test_eight_processes_build_once(world):
    world.plan("wait=0.3")
    answers = _race(world)
    assert len(set(answers)) == 1
    assert len(world.calls) == 4


def test_eight_processes_fail_once(world):
    world.plan("wait=0.3", "fail")
    answers = _race(world)
    assert len(set(answers)) == 1
    assert answers[0].startswith("failed: ")
    # One unit's compiler, or as many as ran before the first failed; not eight times as many.
    assert len(world.calls) <= 3


def test_waiting_is_announced_and_a_dead_holder_frees_the_lock(world, monkeypatch, caplog):
    monkeypatch.setattr(cache, "FIRST_NOTICE_S", 0.2)
    monkeypatch.setattr(cache, "POLL_S", 0.05)
    entry = cache.Entry(world.cache, world.recipe().key(world.toolchain()))
    world.cache.mkdir()
    lock = world.cache / f"{entry.key}.lock"
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE)
    holder.stdout.readline()
    with caplog.at_level(logging.INFO):
        begin = time.monotonic()
        timer = subprocess.Popen(["sh", "-c", f"sleep 0.6; kill -9 {holder.pid}"])
        world.build()
    holder.wait()
    timer.wait()
    assert time.monotonic() - begin > 0.3
    assert "waiting for another process" in caplog.text


def eventually(condition, seconds=10):
    """Orphans that were killed stay until the system has collected them."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_an_interrupt_stops_the_compilers_and_leaves_nothing(world, monkeypatch):
    world.plan("wait=30")
    plain, interrupted = subprocess.Popen, []

    class Interrupted(plain):
        def wait(self, timeout=None):
            if not interrupted and eventually(lambda: world.calls):
                interrupted.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(builder.subprocess, "Popen", Interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        world.build()
    assert time.monotonic() - begin < 20
    assert not left_overs(world)
    assert eventually(lambda: not world.running)
    monkeypatch.undo()
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", str(world.cache))
    world.plan()
    world.build()


BUILDS = """
import sys, threading, time
from pathlib import Path
sys.path[:0] = [{tests!r}]
import test_jit
world = test_jit.World.__new__(test_jit.World)
world.root = Path({root!r})
world.sources, world.cache = world.root / "csrc", world.root / "cache"
world.nvcc = test_jit.Nvcc(world.root / "cuda" / "bin" / "nvcc", (12, 9), "Build fake_12.9")
"""

EXITS = """
threading.Thread(target=world.build, daemon=True).start()
while not world.calls:
    time.sleep(0.02)
"""


def program(world, rest):
    """A command that runs `rest` in a process of its own, with `world` in it."""
    return [sys.executable, "-c", BUILDS.format(tests=os.path.dirname(__file__), root=str(world.root)) + rest]


def test_an_interpreter_that_exits_stops_the_compilers(world):
    world.plan("wait=30")
    begin = time.monotonic()
    ended = subprocess.run(program(world, EXITS), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - begin < 25
    assert eventually(lambda: not world.running)
    assert not list(world.cache.glob("*failed*"))
    world.plan()
    world.build()
    assert not left_overs(world)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_build_whose_process_is_killed_is_swept_up_by_the_next(world, how):
    world.plan("wait=3")
    killed = subprocess.Popen(program(world, "world.build()"))
    assert eventually(lambda: world.calls, seconds=60)
    killed.send_signal(how)
    assert killed.wait(10) == -how
    assert len(left_overs(world)) == 1, "nothing to sweep up"
    world.plan()
    folder = world.build()
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", "libkernels.so", "manifest.json"]
    # Compilers of the killed build that were still at work have nowhere to write.
    assert eventually(lambda: not world.running)
    assert not left_overs(world)
    assert not list(world.cache.glob("*failed*"))


def test_the_default_cache_follows_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("WAN22_VAE_DECODE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "wan22_vae_decode"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "wan22_vae_decode"


# Finding the compiler


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No nvcc but those that a test puts there."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    which = shutil.which
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None if name == "nvcc" else which(name))
    monkeypatch.setattr(toolchain, "SYSTEM_NVCC", tmp_path / "usr" / "bin" / "nvcc")
    monkeypatch.setattr(toolchain, "_packaged_nvcc", lambda: iter(()))
    return tmp_path


def test_nvcc_is_looked_for_in_order(nowhere, monkeypatch):
    packaged = fake_nvcc(nowhere / "wheel")
    monkeypatch.setattr(toolchain, "_packaged_nvcc", lambda: iter([packaged]))
    assert toolchain.find_nvcc("sm_90a").path == packaged
    system = fake_nvcc(nowhere / "usr")
    assert toolchain.find_nvcc("sm_90a").path == system
    on_path = fake_nvcc(nowhere / "path")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: str(on_path))
    assert toolchain.find_nvcc("sm_90a").path == on_path
    home = fake_nvcc(nowhere / "home")
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    assert toolchain.find_nvcc("sm_90a").path == home


def test_no_nvcc_says_what_to_do(nowhere):
    with pytest.raises(jit.BuildError, match=r"nvcc 12\.3 or newer; found: none .* set CUDA_HOME"):
        toolchain.find_nvcc("sm_90a")


@pytest.mark.parametrize(
    ("arch", "version", "needed"),
    [("sm_90a", "12.2", "12.3"), ("sm_100a", "12.7", "12.8"), ("sm_103a", "12.8", "12.9")],
)
def test_a_too_old_nvcc_says_which_version_the_architecture_needs(nowhere, arch, version, needed):
    fake_nvcc(nowhere / "usr", version)
    with pytest.raises(jit.BuildError, match=rf"{arch} needs nvcc {needed} or newer; found: .* is {version}"):
        toolchain.find_nvcc(arch)


def test_a_newer_nvcc_further_down_is_taken(nowhere, monkeypatch):
    fake_nvcc(nowhere / "home", "12.0")
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    system = fake_nvcc(nowhere / "usr", "13.0")
    assert toolchain.find_nvcc("sm_90a").path == system


def test_an_nvcc_that_the_driver_cannot_follow_is_refused(nowhere):
    fake_nvcc(nowhere / "usr", "13.0")
    with pytest.raises(jit.BuildError, match=r"at most 12\.x for this driver.* the driver only runs CUDA 12\.8"):
        toolchain.find_nvcc("sm_90a", driver=(12, 8))
    assert toolchain.find_nvcc("sm_90a", driver=(13, 0)).version == (13, 0)


def test_a_broken_nvcc_is_passed_over(nowhere, monkeypatch):
    broken = nowhere / "home" / "bin" / "nvcc"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    with pytest.raises(jit.BuildError, match="does not answer"):
        toolchain.find_nvcc("sm_90a")


def test_nvcc_is_asked_once_and_again_when_it_is_another(nowhere, monkeypatch):
    asked, run = [], subprocess.run
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *a, **o: asked.append(a) or run(*a, **o))
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    home, other = fake_nvcc(nowhere / "home", "12.9"), fake_nvcc(nowhere / "other", "12.8")
    for _ in range(3):
        assert toolchain.find_nvcc("sm_90a").version == (12, 9)
    assert len(asked) == 1
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "other"))
    assert toolchain.find_nvcc("sm_90a").path == other
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    home.unlink()
    fake_nvcc(nowhere / "home", "13.0")
    assert toolchain.find_nvcc("sm_90a").version == (13, 0)
    assert len(asked) == 3


def test_an_nvcc_that_failed_once_is_asked_again(nowhere, monkeypatch):
    def fails(*arguments, **options):
        raise subprocess.TimeoutExpired("nvcc", 60)

    fake_nvcc(nowhere / "usr")
    with monkeypatch.context() as patch:
        patch.setattr(toolchain.subprocess, "run", fails)
        with pytest.raises(jit.BuildError, match="does not answer"):
            toolchain.find_nvcc("sm_90a")
    assert toolchain.find_nvcc("sm_90a").version == (12, 9)


def test_missing_headers_and_ninja_say_what_to_install(monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.importlib.metadata, "files", lambda name: None)
    with pytest.raises(jit.BuildError, match="pip install --no-deps nvidia-cutlass"):
        toolchain.find_cutlass()
    with pytest.raises(jit.BuildError, match="pip install ninja"):
        toolchain.find_ninja()


def test_ninja_of_an_environment_that_is_not_activated_is_found(monkeypatch):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    ninja = toolchain.find_ninja()
    assert subprocess.run([ninja, "--version"], capture_output=True, text=True, check=True).stdout.strip()


# Machines without a compiler


@pytest.fixture
def elsewhere(world, nowhere, monkeypatch):
    """Builds as a machine with an nvcc of some version does; this one has none. `driver` is what its driver runs."""
    drivers = [None]
    monkeypatch.setattr(builder, "driver_version", lambda: drivers[0])

    def build(*version):
        text = ".".join(map(str, version))
        return world.build(nvcc=Nvcc(world.nvcc.path, version, f"Build fake_{text}"), cutlass=f"4.{version[1]}")

    build.driver = lambda *version: drivers.__setitem__(0, version)
    return build


def test_kernels_that_were_built_ahead_need_no_compiler(world, elsewhere, caplog):
    with pytest.raises(jit.BuildError, match="needs nvcc"):
        jit.check(world.recipe())
    folder = elsewhere(12, 9)
    compiled = len(world.calls)
    with caplog.at_level(logging.INFO):
        jit.check(world.recipe())
        assert jit.build(world.recipe()) == folder
    assert len(world.calls) == compiled
    assert f"using the kernels of {folder}, since none can be built here: sm_90a needs nvcc" in caplog.text


@pytest.mark.parametrize("tool", ["ninja", "cutlass"])
def test_kernels_that_were_built_ahead_need_no_other_tools(world, elsewhere, monkeypatch, tool):
    def absent():
        raise jit.BuildError(f"no {tool}")

    folder = elsewhere(12, 9)
    fake_nvcc(world.root / "usr", "13.0")
    assert toolchain.find_toolchain("sm_90a").nvcc.version == (13, 0)
    monkeypatch.setattr(toolchain, f"find_{tool}", absent)
    assert jit.build(world.recipe()) == folder


def test_of_kernels_that_were_built_ahead_the_newest_that_the_driver_follows_are_taken(world, elsewhere):
    folders = {version: elsewhere(*version) for version in ((12, 9), (13, 1), (12, 10), (13, 0))}
    assert jit.build(world.recipe()) == folders[13, 1]
    elsewhere.driver(13, 0)
    assert jit.build(world.recipe()) == folders[13, 1]
    elsewhere.driver(12, 4)
    assert jit.build(world.recipe()) == folders[12, 10]
    elsewhere.driver(11, 8)
    with pytest.raises(jit.BuildError, match=r"needs nvcc .* at most 11\.x for this driver"):
        jit.build(world.recipe())
    with pytest.raises(jit.BuildError, match=r"needs nvcc .* at most 11\.x for this driver"):
        jit.check(world.recipe())


def test_a_compiler_is_used_in_spite_of_kernels_that_were_built_ahead(world, elsewhere):
    ahead = elsewhere(13, 0)
    fake_nvcc(world.root / "usr", "12.9")
    assert jit.build(world.recipe()) != ahead


@pytest.mark.parametrize("change", ["source", "flags", "units", "arch", "too old", "no version", "no manifest"])
def test_only_kernels_of_the_same_inputs_are_taken(world, elsewhere, monkeypatch, change):
    manifest = elsewhere(12, 9) / "manifest.json"
    recipe, written = world.recipe(), json.loads(manifest.read_text())
    if change == "source":
        (world.sources / "shared.cuh").write_text("// changed")
    elif change == "flags":
        monkeypatch.setattr("wan22_vae_decode.jit.recipe.FLAGS", ("-O2",))
    elif change == "units":
        recipe = replace(recipe, units=recipe.units[:2])
    elif change == "arch":
        recipe = world.recipe("sm_100a")
    elif change == "too old":
        manifest.write_text(json.dumps({**written, "nvcc": [12, 2]}))
    elif change == "no version":
        del written["nvcc"]
        manifest.write_text(json.dumps(written))
    else:
        manifest.write_text("[]")
    for function in (jit.build, jit.check):
        with pytest.raises(jit.BuildError, match="needs nvcc"):
            function(recipe)


def test_damaged_kernels_that_were_built_ahead_are_passed_over(world, elsewhere):
    older, newer = elsewhere(12, 9), elsewhere(13, 0)
    (newer / "libkernels.so").write_text("damaged")
    assert jit.build(world.recipe()) == older
    (older / "libkernels.so").write_text("damaged")
    with pytest.raises(jit.BuildError, match="needs nvcc"):
        jit.build(world.recipe())


# Architectures


def test_the_architecture_follows_the_device_and_the_override(monkeypatch):
    monkeypatch.delenv("WAN22_VAE_DECODE_ARCH", raising=False)
    assert jit.arch_of((9, 0)) == "sm_90a"
    assert jit.arch_of((10, 3)) == "sm_103a"
    with pytest.raises(jit.BuildError, match=r"capability 8\.0"):
        jit.arch_of((8, 0))
    monkeypatch.setenv("WAN22_VAE_DECODE_ARCH", "sm_100a")
    assert jit.arch_of((9, 0)) == "sm_100a"
    with pytest.raises(jit.BuildError, match=r"WAN22_VAE_DECODE_ARCH=sm_100a is for builds.*capability 9\.0"):
        jit.running_arch((9, 0))
    assert jit.running_arch((10, 0)) == "sm_100a"
    monkeypatch.setenv("WAN22_VAE_DECODE_ARCH", "sm_80")
    with pytest.raises(jit.BuildError, match="sm_80 is not"):
        jit.arch_of((9, 0))


def test_machine_code_of_exactly_the_target():
    assert arch_module.gencode("sm_90a") == "-gencode=arch=compute_90a,code=sm_90a"


@pytest.mark.parametrize(("jobs", "expected"), [("3", 3), ("0", 1)])
def test_max_jobs_bounds_the_compilers(monkeypatch, jobs, expected):
    monkeypatch.setenv("MAX_JOBS", jobs)
    assert builder._jobs() == expected


def test_max_jobs_that_is_no_number_says_so(world, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(jit.BuildError, match="MAX_JOBS=many is not a whole number"):
        world.build()
    assert not left_overs(world)
