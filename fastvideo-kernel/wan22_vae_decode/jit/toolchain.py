# SPDX-License-Identifier: Apache-2.0
"""Finds nvcc, ninja and the CUTLASS headers, and checks that they fit the architecture and the driver."""

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wan22_vae_decode.jit.arch import MINIMUM_NVCC
from wan22_vae_decode.jit.errors import BuildError

Version = tuple[int, int]

SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class Nvcc:
    """A compiler: its path, its toolkit version and the full text that names its build."""

    path: Path
    version: Version
    build: str


@dataclass(frozen=True)
class Toolchain:
    """Everything that a build runs or includes from outside this package."""

    nvcc: Nvcc
    ninja: Path
    includes: tuple[Path, ...]
    cutlass: str


def find_toolchain(arch: str, driver: Version | None = None) -> Toolchain:
    """The tools for `arch`. `driver` is the CUDA version that the driver supports, None where there is no driver.

    Raises BuildError with what is missing and where it was looked for.
    """
    includes, cutlass = find_cutlass()
    return Toolchain(find_nvcc(arch, driver), find_ninja(), includes, cutlass)


def find_nvcc(arch: str, driver: Version | None = None) -> Nvcc:
    """The first nvcc that can compile for `arch` and whose runtime the driver can run.

    Searched in this order: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, the PyPI package nvidia-cuda-nvcc.
    """
    refused = []
    for path in dict.fromkeys(_nvcc_candidates()):
        nvcc = _probe(path)
        reason = "does not answer --version" if nvcc is None else misfit(nvcc.version, arch, driver)
        if nvcc is not None and reason is None:
            return nvcc
        refused.append(f"{path} {reason}")
    found = "; ".join(refused) if refused else "none in CUDA_HOME, PATH, /usr/local/cuda or nvidia-cuda-nvcc"
    at_most = f" and at most {driver[0]}.x for this driver" if driver is not None else ""
    raise BuildError(
        f"{arch} needs nvcc {_text(MINIMUM_NVCC[arch])} or newer{at_most}; found: {found}. "
        "Install the CUDA toolkit or `pip install nvidia-cuda-nvcc`, or set CUDA_HOME."
    )


def misfit(version: Version, arch: str, driver: Version | None) -> str | None:
    """Why what an nvcc of this version compiles for `arch` does not do with this driver, or None."""
    if version < MINIMUM_NVCC[arch]:
        return f"is {_text(version)}"
    if driver is not None and driver[0] < version[0]:
        return f"is {_text(version)} and the driver only runs CUDA {_text(driver)}"
    return None


def find_ninja() -> Path:
    """The ninja of the PyPI package, wherever it was installed, else the one on PATH."""
    for packaged in _packaged_ninja():
        if os.access(packaged, os.X_OK):
            return packaged
    on_path = shutil.which("ninja")
    if on_path is None:
        raise BuildError("ninja was not found; `pip install ninja`.")
    return Path(on_path)


def _packaged_ninja() -> Iterator[Path]:
    """Environments that are not activated have their scripts outside PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("ninja") or ()
        yield from (Path(file.locate()) for file in files if file.name in ("ninja", "ninja.exe"))


def find_cutlass() -> tuple[tuple[Path, ...], str]:
    """Include folders and version of the CUTLASS headers in the PyPI package nvidia-cutlass."""
    spec = importlib.util.find_spec("cutlass_library")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        source = Path(root) / "source"
        includes = (source / "include", source / "tools" / "util" / "include")
        if (includes[0] / "cutlass" / "cutlass.h").exists():
            return includes, importlib.metadata.version("nvidia-cutlass")
    raise BuildError("The CUTLASS headers were not found; `pip install --no-deps nvidia-cutlass==4.2.0.0`.")


def driver_version() -> Version | None:
    """CUDA version that the installed driver supports, None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value == 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _nvcc_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    if SYSTEM_NVCC.exists():
        yield SYSTEM_NVCC
    yield from _packaged_nvcc()


def _packaged_nvcc() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        yield from sorted(Path(root).glob("*/bin/nvcc"))


def _probe(path: Path) -> Nvcc | None:
    try:
        status = path.stat()
        answer = _version_text(path, status.st_ino, status.st_size, status.st_mtime_ns)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", answer)
    if match is None:
        return None
    return Nvcc(path, (int(match[1]), int(match[2])), answer.strip().splitlines()[-1])


@functools.cache
def _version_text(path: Path, *state: int) -> str:
    """What an nvcc says of itself, asked once for each `state` of its file: every decode wants to know."""
    return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
