# SPDX-License-Identifier: Apache-2.0
"""Builds a recipe with ninja into the cache, once for all processes, and refuses code that ptxas complains about."""

import atexit
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

from wan22_vae_decode.jit.cache import Entry, cache_folder, entries, usable
from wan22_vae_decode.jit.errors import BuildError
from wan22_vae_decode.jit.recipe import Recipe
from wan22_vae_decode.jit.toolchain import Toolchain, Version, driver_version, find_toolchain, misfit
from wan22_vae_decode.log import logger

LOG = "build.log"
BYTES_PER_JOB = 5 << 30  # a CUTLASS unit takes up to 4.6 GiB

# wgmma serialised (C7510), register reallocation ignored (C7508): correct code at a fraction of the speed.
_PTXAS_WARNING = re.compile(r"^.*\b(?:C7508|C7510)\b.*$", re.MULTILINE)
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_ERROR = re.compile(r"^.*(?:\berror\b|\bfatal\b|No such file|Killed|not found).*$", re.MULTILINE | re.IGNORECASE)


def build(recipe: Recipe, toolchain: Toolchain | None = None) -> Path:
    """Folder of the cache entry that holds `recipe.library` and its build log; compiles it if need be.

    Safe for any number of processes at a time: one builds, the others wait for it, and if it fails they fail with the
    same message. A machine that lacks what a build needs takes an entry that was built elsewhere, if it has one. Raises
    BuildError with the path of the log and the first error.
    """
    started = time.time()
    if toolchain is None:
        driver = driver_version()
        try:
            toolchain = find_toolchain(recipe.arch, driver)
        except BuildError as error:
            entry = prebuilt(recipe, driver)
            if entry is None:
                raise
            logger.info("using the kernels of %s, since none can be built here: %s", entry.folder, error)
            return entry.folder
    entry = Entry(cache_folder(), recipe.key(toolchain))
    # A whole entry needs no lock, so a cache that cannot be written serves too.
    if entry.defect() is None:
        return entry.folder
    with entry.locked():
        defect = entry.defect()
        if defect is None:
            return entry.folder
        failure = entry.failure_since(started)
        if failure is not None:
            raise BuildError(failure)
        if defect != "absent":
            logger.warning("rebuilding the kernel cache entry %s: %s", entry.folder, defect)
        try:
            with usable(entry.root):
                _build_entry(recipe, toolchain, entry)
        except BuildError as error:
            entry.record_failure(str(error))
            raise
    return entry.folder


def check(recipe: Recipe) -> None:
    """Raises BuildError where `build` would before it compiles anything, except for a damaged entry."""
    driver = driver_version()
    try:
        find_toolchain(recipe.arch, driver)
    except BuildError:
        if not _candidates(recipe, driver):
            raise


def prebuilt(recipe: Recipe, driver: Version | None) -> Entry | None:
    """The whole entry of the same sources, flags and architecture whose nvcc was the newest that `driver` can follow,
    whichever that and its CUTLASS were; for machines where these, which are part of the key, are not known.
    """
    return next((entry for entry in _candidates(recipe, driver) if entry.defect() is None), None)


def _candidates(recipe: Recipe, driver: Version | None) -> list[Entry]:
    """What `prebuilt` chooses from, the newest nvcc first, not yet compared with the manifests."""
    own = recipe.own_inputs()
    found: dict[Entry, Version] = {}
    for entry in entries(cache_folder(), f"{recipe.name}-{recipe.arch}-"):
        manifest = entry.manifest()
        try:
            inputs = dict(manifest["inputs"])
            same = inputs == {**own, "nvcc": inputs["nvcc"], "cutlass": inputs["cutlass"]}
            major, minor = map(int, manifest["nvcc"])
        except (KeyError, TypeError, ValueError):
            continue
        if same and misfit((major, minor), recipe.arch, driver) is None:
            found[entry] = (major, minor)
    return sorted(found, key=lambda entry: found[entry], reverse=True)


def ptxas_complaint(log: str) -> str | None:
    """The first line of a build log that tells of slow code (serialised wgmma, spilled registers), or None."""
    warning = _PTXAS_WARNING.search(log)
    if warning is not None:
        return warning[0].strip()
    for spill in _SPILL.finditer(log):
        if spill[1] != "0" or spill[2] != "0":
            return spill[0]
    return None


def _build_entry(recipe: Recipe, toolchain: Toolchain, entry: Entry) -> None:
    started = time.monotonic()
    version = ".".join(map(str, toolchain.nvcc.version))
    units = len(recipe.units)
    logger.info("building %d CUDA units for %s with nvcc %s, which takes minutes", units, recipe.arch, version)
    with entry.filling() as folder:
        for header, text in recipe.generated:
            (folder / header).write_text(text)
        (folder / "build.ninja").write_text(_ninja_file(recipe, toolchain))
        status = _run([str(toolchain.ninja), "-v", "-j", str(_jobs())], folder)
        log = (folder / LOG).read_text(errors="replace")
        if status != 0:
            first = _ERROR.search(log)
            reason = first[0].strip() if first is not None else f"ninja returned {status}"
            raise _failure(entry, folder, reason)
        complaint = ptxas_complaint(log)
        if complaint is not None:
            raise _failure(entry, folder, f"ptxas: {complaint}")
        for path in folder.iterdir():
            if path.name not in (recipe.library, LOG):
                path.unlink()
        inputs = recipe.inputs(toolchain)
        entry.publish(folder, [recipe.library, LOG], inputs=inputs, nvcc=toolchain.nvcc.version)
    entry.log.unlink(missing_ok=True)
    logger.info("built %s in %.0f s", entry.folder, time.monotonic() - started)


def _failure(entry: Entry, folder: Path, reason: str) -> BuildError:
    shutil.copyfile(folder / LOG, entry.log)
    return BuildError(f"The CUDA kernels could not be built: {reason[:500]} (log: {entry.log}).")


def _ninja_file(recipe: Recipe, toolchain: Toolchain) -> str:
    lines = ["rule run", "  command = $run", "  description = $out"]
    for unit in recipe.units:
        lines += [f"build {unit.object}: run", f"  run = {_quoted(recipe.compile_command(unit, toolchain))}"]
    objects = " ".join(unit.object for unit in recipe.units)
    lines += [f"build {recipe.library}: run {objects}", f"  run = {_quoted(recipe.link_command(toolchain))}"]
    return "\n".join([*lines, f"default {recipe.library}", ""])


def _quoted(command: list[str]) -> str:
    return shlex.join(command).replace("$", "$$")


def _run(command: list[str], folder: Path) -> int:
    with (folder / LOG).open("wb") as log:
        # A session of its own, so that a terminal's interrupt comes here first.
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        exiting = threading.Event()

        def stop() -> None:
            exiting.set()
            _end(process)

        # An interpreter that exits does not wait for a daemon thread that builds.
        atexit.register(stop)
        try:
            status = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            atexit.unregister(stop)
    if exiting.is_set():
        raise SystemExit  # ends this thread; what failed is the interpreter, not the build
    return status


def _end(process: subprocess.Popen) -> None:
    """Asks ninja to end, so that it ends its compilers, each of which has a process group of its own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.send_signal(how)
            process.wait(10)
            return


def _jobs() -> int:
    cores = len(os.sched_getaffinity(0))
    chosen = os.environ.get("MAX_JOBS")
    if chosen:
        try:
            return max(1, int(chosen))
        except ValueError:
            raise BuildError(
                f"MAX_JOBS={chosen} is not a whole number; set the compilers at a time, or unset it."
            ) from None
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, free // BYTES_PER_JOB))
