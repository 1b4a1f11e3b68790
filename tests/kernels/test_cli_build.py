# SPDX-License-Identifier: Apache-2.0
"""`build` with a compiler that only says what it was asked for."""

import json
import re
import stat
import sys

import pytest
import torch

from wan22_vae_decode.backends.cuda.targets import TARGETS

FAKE_NVCC = """#!{python}
import pathlib, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.1")
    print("Build fake")
    sys.exit(0)
if {broken}:
    print("one.cu(3): error: expected a ';'")
    sys.exit(2)
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("built")
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a compiler in CUDA_HOME, one that works or a broken one."""
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WAN22_VAE_DECODE_ARCH", raising=False)
    monkeypatch.setattr("wan22_vae_decode.jit.builder.driver_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def install(broken=False):
        nvcc = tmp_path / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(FAKE_NVCC.format(python=sys.executable, broken=broken))
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    return install


def test_without_a_gpu_every_architecture_with_kernels_is_built(compiler, cli, tmp_path):
    compiler()
    ended = cli("build")
    assert ended.status == 0
    lines = ended.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(TARGETS)
    assert all(str(tmp_path / "cache") in line for line in lines)
    assert ended.err.count("which takes minutes") == len(TARGETS)
    again = cli("build", "--json")
    assert not again.err
    report = json.loads(again.out)
    assert report["cache"] == str(tmp_path / "cache")
    assert [f"{arch}: {path}" for arch, path in report["libraries"].items()] == lines


def test_architectures_by_name(compiler, cli):
    compiler()
    assert cli("build", "--arch", "sm_90a").out.startswith("sm_90a: ")


def test_architecture_of_the_gpu_or_of_the_environment(compiler, cli, monkeypatch):
    compiler()
    monkeypatch.setenv("WAN22_VAE_DECODE_ARCH", "sm_90a")
    assert cli("build").out.startswith("sm_90a: ")
    monkeypatch.setenv("WAN22_VAE_DECODE_ARCH", "sm_75")
    ended = cli("build")
    assert ended.status == 2
    assert "WAN22_VAE_DECODE_ARCH=sm_75 is not an architecture with kernels" in ended.err
    monkeypatch.delenv("WAN22_VAE_DECODE_ARCH")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    ended = cli("build")
    assert ended.status == 2
    assert "No kernels for compute capability 8.0" in ended.err


def test_compiler_that_fails_is_status_2_with_its_first_error(compiler, cli):
    compiler(broken=True)
    ended = cli("build")
    assert ended.status == 2
    progress, error = ended.err.splitlines()
    arch = next(iter(TARGETS))
    assert re.fullmatch(rf"building \d+ CUDA units for {arch} with nvcc .*, which takes minutes", progress)
    assert error.startswith("error: The CUDA kernels could not be built: one.cu(3): error: expected a ';' (log: ")


def test_no_compiler_is_status_2_with_what_to_install(compiler, cli, monkeypatch):
    monkeypatch.setattr("wan22_vae_decode.jit.toolchain._nvcc_candidates", lambda: iter(()))
    ended = cli("build", "--arch", "sm_90a")
    assert ended.status == 2
    assert "Install the CUDA toolkit" in ended.err


def test_cache_that_cannot_be_written_is_status_2(compiler, cli, tmp_path, monkeypatch):
    compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", str(tmp_path / "file"))
    ended = cli("build", "--arch", "sm_90a")
    assert ended.status == 2
    assert f"The kernel cache {tmp_path / 'file'} cannot be used ([Errno 17] File exists" in ended.err
    monkeypatch.setenv("WAN22_VAE_DECODE_CACHE", "~nobody-of-this-name/x")
    ended = cli("build", "--arch", "sm_90a")
    assert ended.status == 2
    assert "is in a home that does not exist; set WAN22_VAE_DECODE_CACHE to another." in ended.err
