# SPDX-License-Identifier: Apache-2.0
"""``doctor``: what would run on this machine, and if not, why and what to do."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import wan22_vae_decode
from wan22_vae_decode import backends, jit
from wan22_vae_decode.backends.cuda import library
from wan22_vae_decode.backends.cuda.targets import TARGETS
from wan22_vae_decode.cli import extras, options, writable
from wan22_vae_decode.jit import toolchain
from wan22_vae_decode.jit.cache import Entry, cache_folder
from wan22_vae_decode.memory import readable


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and, where that is a problem, the problem with its fix."""

    name: str
    value: str
    problem: str | None = None


UNBUILDABLE = Finding("kernels", "not built", "they cannot be before what is missing above is there")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "doctor",
        help="what would run on this machine, and if not, why and what to do",
        description="Looks at everything that the CUDA kernels need and builds nothing. Status 0 if they would run, "
        "1 if decoding falls back to torch.",
    )
    options.add_device(parser)
    options.add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints one line a finding; 1 if the kernels would not run."""
    device = options.device(arguments.device)
    findings = list(_findings(device))
    # What cannot be built is found out only then.
    cache = next(finding for finding in findings if finding.name == "cache")
    unbuildable = f"the kernel cache {cache.value} {cache.problem}" if cache.problem else None
    reason = backends.why_not("cuda", device, torch.float16) or unbuildable
    verdict = "the CUDA kernels" if reason is None else "the torch ops"
    if arguments.json:
        lines = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": reason is None, "runs": verdict, "reason": reason, "findings": lines}))
        return 0 if reason is None else 1
    for finding in findings:
        print(f"{'ok' if finding.problem is None else '--'}  {finding.name:<11} {finding.value}")
        if finding.problem is not None:
            print(f"                {finding.problem}")
    print(f"\nOn {device}, {verdict} would decode" + (".\n" if reason is None else f": {reason}\n"), end="")
    return 0 if reason is None else 1


def _findings(device: torch.device) -> Iterator[Finding]:
    versions = f"{wan22_vae_decode.__version__}, Python {platform.python_version()}"
    yield Finding("package", versions)
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}", _torch_problem())
    driver = toolchain.driver_version()
    yield Finding(
        "driver",
        "none" if driver is None else f"runs CUDA {driver[0]}.{driver[1]}",
        "no NVIDIA driver (libcuda.so.1): install it, or start the container with --gpus all" if not driver else None,
    )
    yield _gpu(device)
    arch, architecture = _arch(device)
    yield architecture
    prebuilt = _prebuilt(arch, driver)
    yield _tool("nvcc", lambda: _nvcc(arch, driver), prebuilt)
    yield _tool("ninja", lambda: str(toolchain.find_ninja()), prebuilt)
    yield _tool("CUTLASS", lambda: toolchain.find_cutlass()[1], prebuilt)
    cache = _cache(prebuilt)
    yield cache
    yield UNBUILDABLE if architecture.problem else _library(arch, driver, prebuilt, buildable=cache.problem is None)
    yield _extras()


def _torch_problem() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA: install a build with it, see https://pytorch.org/get-started"
    return None


def _gpu(device: torch.device) -> Finding:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return Finding("GPU", f"{name}, {readable(free)} of {readable(total)} free")
    if torch.cuda.is_available():
        return Finding("GPU", f"not used, decoding on {device}")
    return Finding("GPU", "none", "torch sees no GPU: compare `nvidia-smi -L` and CUDA_VISIBLE_DEVICES")


def _arch(device: torch.device) -> tuple[str, Finding]:
    """What to build for, also where there is no GPU: a container may be made on such a machine."""
    fallback, value = next(iter(TARGETS)), "none"
    try:
        if device.type != "cuda":
            chosen = jit.chosen_arch()
            return chosen or fallback, Finding("arch", f"{chosen or ', '.join(TARGETS)}, if built here")
        capability = torch.cuda.get_device_capability(device)
        value = f"compute capability {capability[0]}.{capability[1]}"
        arch = jit.running_arch(capability)
        library.recipe(arch)
    except jit.BuildError as error:
        return fallback, Finding("arch", value, str(error))
    return arch, Finding("arch", arch)


def _prebuilt(arch: str, driver: toolchain.Version | None) -> bool:
    """Whether there are kernels that a machine without the tools of a build would take."""
    try:
        return jit.prebuilt(library.recipe(arch), driver) is not None
    except jit.BuildError:
        return False


def _tool(name: str, find: Callable[[], str], prebuilt: bool) -> Finding:
    try:
        return Finding(name, find())
    except jit.BuildError as error:
        return Finding(name, "not found, nor needed") if prebuilt else Finding(name, "not found", str(error))


def _nvcc(arch: str, driver: toolchain.Version | None) -> str:
    nvcc = toolchain.find_nvcc(arch, driver)
    return f"{nvcc.version[0]}.{nvcc.version[1]}, {nvcc.path}"


def _cache(prebuilt: bool) -> Finding:
    """Where the kernels are kept; that nothing can be written there is no problem where they are."""
    try:
        folder = cache_folder()
    except jit.BuildError as error:
        return Finding("cache", "none", str(error))
    try:
        writable.try_folder(folder)
    except OSError:
        if prebuilt:
            return Finding("cache", f"{folder}, to read only")
        return Finding("cache", str(folder), "cannot be written: set WAN22_VAE_DECODE_CACHE to a folder that can")
    return Finding("cache", str(folder))


def _library(arch: str, driver: toolchain.Version | None, prebuilt: bool, buildable: bool) -> Finding:
    """Whether the kernels are built already; that they are not is a problem only where they cannot be."""
    try:
        tools = toolchain.find_toolchain(arch, driver)
        entry = Entry(cache_folder(), library.recipe(arch).key(tools))
    except jit.BuildError:
        return Finding("kernels", f"built for {arch}") if prebuilt else UNBUILDABLE
    defect = entry.defect()
    if defect is None:
        return Finding("kernels", f"built for {arch}")
    if not buildable:
        return UNBUILDABLE
    when = "built at first use, or by `wan22-vae-decode build`"
    return Finding("kernels", when if defect == "absent" else f"built anew at first use ({defect})")


def _extras() -> Finding:
    """What only the commands decode and bench use."""
    missing = [name for name in extras.MODULES if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"the commands decode and bench use them: {extras.install(*missing)}"
        return Finding("extras", f"without {', '.join(missing)}", problem)
    try:
        extras.ffmpeg()
    except extras.MissingExtraError as error:
        return Finding("extras", "without ffmpeg", str(error))
    return Finding("extras", ", ".join(extras.MODULES))
