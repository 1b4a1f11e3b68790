# SPDX-License-Identifier: Apache-2.0
"""`doctor` on machines of several kinds: what it finds, the verdict, and the fix of each problem."""

import importlib.util
import json

import pytest
import torch

from wan22_vae_decode.backends.cuda import library
from wan22_vae_decode.cli import doctor, writable
from wan22_vae_decode.cli.doctor import Finding
from wan22_vae_decode.jit import toolchain
from wan22_vae_decode.jit.cache import Entry, cache_folder
from wan22_vae_decode.jit.errors import BuildError

GIB = 2**30

UNBUILDABLE = Finding("kernels", "not built", "they cannot be before what is missing above is there")


@pytest.fixture
def findings(cli):
    """Runs `doctor --json`; its report, and its findings by name."""

    def run(*arguments):
        ended = cli("doctor", "--json", *arguments)
        report = json.loads(ended.out)
        assert ended.status == (0 if report["ok"] else 1)
        return report, {line["name"]: Finding(**line) for line in report["findings"]}

    return run


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine with an H200, a driver and a compiler that fit, and an empty cache."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(cuda, "mem_get_info", lambda device=None: (100 * GIB, 139 * GIB))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "driver_version", lambda: (13, 0))
    monkeypatch.setattr("wan22_vae_decode.jit.builder.driver_version", lambda: (13, 0))
    nvcc = toolchain.Nvcc(tmp_path / "nvcc", (13, 0), "Build cuda_13.0")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda arch, driver=None: nvcc)
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WAN22_VAE_DECODE_ARCH", raising=False)
    return tmp_path


def test_machine_that_is_well(hopper, findings, cli):
    report, found = findings()
    assert report["ok"]
    assert report["runs"] == "the CUDA kernels"
    assert not [finding for finding in found.values() if finding.problem]
    assert found["GPU"].value == "NVIDIA H200, 100.00 GiB of 139.00 GiB free"
    assert found["driver"].value == "runs CUDA 13.0"
    assert found["arch"].value == "sm_90a"
    assert found["nvcc"].value.startswith("13.0, ")
    assert found["cache"].value == str(hopper / "cache")
    assert not list(hopper.iterdir()), "it makes nothing that stays"
    assert found["kernels"].value == "built at first use, or by `wan22-vae-decode build`"
    ended = cli("doctor")
    assert ended.status == 0
    assert ended.out.endswith("On cuda, the CUDA kernels would decode.\n")
    assert "--  " not in ended.out


def test_machine_without_a_gpu(findings, cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    report, found = findings()
    assert not report["ok"]
    assert report["reason"] == "the CUDA kernels need a CUDA device, not cpu"
    assert "built without CUDA" in found["torch"].problem
    assert "--gpus all" in found["driver"].problem
    assert "CUDA_VISIBLE_DEVICES" in found["GPU"].problem
    assert found["arch"] == Finding("arch", "sm_90a, sm_100a, sm_103a, if built here")
    ended = cli("doctor")
    assert ended.status == 1
    assert "On cpu, the torch ops would decode: the CUDA kernels need a CUDA device, not cpu" in ended.out
    assert "\n--  GPU         none\n                torch sees no GPU: " in ended.out


def test_cpu_by_choice_is_no_problem_of_the_gpu(hopper, findings):
    report, found = findings("--device", "cpu")
    assert not report["ok"]
    assert found["GPU"] == Finding("GPU", "not used, decoding on cpu")


def test_gpu_without_kernels(hopper, findings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    report, found = findings()
    assert found["arch"].value == "compute capability 8.9"
    assert found["arch"].problem.startswith("No kernels for compute capability 8.9; there are kernels for 9.0")
    assert report["reason"] == found["arch"].problem


def test_overridden_architecture(findings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WAN22_VAE_DECODE_ARCH", "sm_75")
    found = findings()[1]
    assert found["arch"].problem.startswith("WAN22_VAE_DECODE_ARCH=sm_75 is not an architecture with kernels; ")
    assert found["kernels"] == UNBUILDABLE
    monkeypatch.setenv("WAN22_VAE_DECODE_ARCH", "sm_100a")
    assert findings()[1]["arch"] == Finding("arch", "sm_100a, if built here")


def test_no_compiler(hopper, findings, monkeypatch):
    def absent(arch, driver=None):
        raise BuildError("sm_90a needs nvcc 12.3 or newer; found: none.")

    monkeypatch.setattr(toolchain, "find_nvcc", absent)
    report, found = findings()
    assert not report["ok"]
    assert found["nvcc"] == Finding("nvcc", "not found", "sm_90a needs nvcc 12.3 or newer; found: none.")
    assert found["kernels"] == UNBUILDABLE
    assert report["reason"] == found["nvcc"].problem


def published():
    """Puts an entry into the cache; what it is made from."""
    recipe = library.recipe("sm_90a")
    tools = toolchain.find_toolchain("sm_90a")
    entry = Entry(cache_folder(), recipe.key(tools))
    with entry.locked(), entry.filling() as folder:
        (folder / recipe.library).write_text("built")
        entry.publish(folder, [recipe.library], inputs=recipe.inputs(tools), nvcc=(13, 0))


def test_cache_that_can_only_be_read_will_do_if_the_kernels_are_in_it(hopper, findings, monkeypatch):
    def refuse(folder):
        raise PermissionError

    published()
    monkeypatch.setattr(writable, "try_folder", refuse)
    report, found = findings()
    assert report["ok"]
    assert found["cache"] == Finding("cache", f"{cache_folder()}, to read only")
    assert found["kernels"] == Finding("kernels", "built for sm_90a")


def test_no_compiler_but_kernels_that_were_built_ahead(hopper, findings, monkeypatch):
    published()

    def absent(*_):
        raise BuildError("not there; install it.")

    for find in ("find_nvcc", "find_ninja", "find_cutlass"):
        monkeypatch.setattr(toolchain, find, absent)
    report, found = findings()
    assert report["ok"]
    for tool in ("nvcc", "ninja", "CUTLASS"):
        assert found[tool] == Finding(tool, "not found, nor needed")
    assert found["kernels"] == Finding("kernels", "built for sm_90a")
    monkeypatch.setattr(toolchain, "driver_version", lambda: (12, 9))
    monkeypatch.setattr("wan22_vae_decode.jit.builder.driver_version", lambda: (12, 9))
    report, found = findings()
    assert report["reason"] == found["nvcc"].problem == "not there; install it."
    assert found["kernels"] == UNBUILDABLE


@pytest.mark.parametrize("tool", ["ninja", "CUTLASS"])
def test_other_missing_tools(tool, hopper, findings, monkeypatch):
    def absent():
        raise BuildError("not there; pip install it.")

    monkeypatch.setattr(toolchain, f"find_{tool.lower()}", absent)
    report, found = findings()
    assert not report["ok"]
    assert found[tool] == Finding(tool, "not found", "not there; pip install it.")


@pytest.mark.parametrize("folder", ["{}/file/cache", "{}/dangling", "{}/dangling/cache", "/proc/cache"])
def test_cache_that_cannot_be_written(folder, hopper, findings, monkeypatch):
    (hopper / "file").write_text("")
    (hopper / "dangling").symlink_to("nowhere")
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", folder.format(hopper))
    report, found = findings()
    assert found["cache"].problem == "cannot be written: set WAN22_VAE_DECODE_CACHE to a folder that can"
    assert found["kernels"] == UNBUILDABLE
    assert report["reason"] == f"the kernel cache {found['cache'].value} {found['cache'].problem}"


def test_cache_in_a_home_that_does_not_exist(hopper, findings, monkeypatch):
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", "~nobody-of-this-name/x")
    _, found = findings()
    assert found["cache"].problem.startswith("The folder of the kernel cache, ~nobody-of-this-name/x, is in a home ")
    assert found["kernels"] == UNBUILDABLE


@pytest.mark.parametrize(
    ("defect", "value"),
    [
        (None, "built for sm_90a"),
        ("absent", "built at first use, or by `wan22-vae-decode build`"),
        ("no readable manifest", "built anew at first use (no readable manifest)"),
    ],
)
def test_state_of_the_build(defect, value, hopper, findings, monkeypatch):
    monkeypatch.setattr(doctor.Entry, "defect", lambda self: defect)
    assert findings()[1]["kernels"] == Finding("kernels", value)


def test_missing_extras_are_named_with_the_command(hopper, findings, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    report, found = findings()
    assert report["ok"], "the kernels do not need it"
    assert found["extras"].value == "without rich"
    assert found["extras"].problem.endswith("them: pip install rich")
