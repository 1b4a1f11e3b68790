# SPDX-License-Identifier: Apache-2.0
"""The ops as our own CUDA kernels, built on first use (`wan22_vae_decode.jit`) and checked before they are trusted.

What a pass of four latent frames costs at 704x1248 (C channels, F frames, fp16; convs per layer), and what bounds it:

    op                  level 0        level 1        level 2         level 3         bound
    pixels (F)          13.7 k (4)     110 k (8)      879 k (16)      3.51 M (16)
    channels            1024           1024           512             256
    conv3d, direct      0.78 TFLOP     6.2 TFLOP      12.4            12.4            tensor cores, 800 TFLOP/s
    conv3d, Winograd    -              1.7 TFLOP      3.1             3.1             the same, and memory:
      input transform   -              1.0 GB         3.6 GB          7.3 GB          (two slabs, history in each)
      output transform  -              1.0 GB         3.8 GB          7.7 GB          (with residual)
    time conv           0.17 TFLOP     1.4 TFLOP      -               -               tensor cores
    upsample, phases    0.9 TFLOP      7.4 TFLOP      7.4 TFLOP       -               tensor cores
      combine           0.5 GB         3.8 GB         9.0 GB          -               memory, 4.2 TB/s
    upsample, Winograd  -              3.4 TFLOP      3.3 TFLOP       -               tensor cores, and memory:
      input transform   -              1.3 GB         2.5 GB          -
      output transform  -              5.4 GB         11.9 GB         -               (with shortcut)
    head GEMM, stencil  -              -              -               2.6, 1.0 GB     memory

121 frames: direct convs with phases 1.84 PFLOP, 2.3 s at 800 TFLOP/s. Winograd, F(4x4,3x3) or at level 1 F(4x3,3x3),
takes a quarter of a level's products and adds the transforms' memory; which levels use it is decided by accuracy
(`heuristics.WINOGRAD_FORMS`).
"""

import functools
import os

import torch

from wan22_vae_decode import jit
from wan22_vae_decode.backends.base import Backend
from wan22_vae_decode.backends.cuda import library, selftest
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.backends.cuda.targets import TARGETS
from wan22_vae_decode.errors import BackendUnavailableError

__all__ = ["CudaBackend", "create", "why_not"]


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why these kernels cannot run on `device` in `dtype`, or None. Builds nothing."""
    if device.type != "cuda":
        return f"the CUDA kernels need a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if dtype not in library.ELEMENTS:
        return f"the CUDA kernels compute in float16 or bfloat16, not {dtype}"
    try:
        jit.check(library.recipe(jit.running_arch(torch.cuda.get_device_capability(device))))
    except jit.BuildError as error:
        return str(error)
    return None


def create(device: torch.device, dtype: torch.dtype) -> Backend:
    """The CUDA backend for a device and a compute type, after a build (first use) and a self-test (first use).

    Raises BackendUnavailableError if the kernels cannot be built or do not compute what the torch ops compute.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    outcome = _create(index, dtype, os.environ.get("WAN22_VAE_DECODE_ARCH"))
    if isinstance(outcome, str):
        raise BackendUnavailableError(outcome)
    return outcome


@functools.cache
def _create(index: int, dtype: torch.dtype, arch_override: str | None) -> CudaBackend | str:
    # A failure is remembered too: trying again would build again.
    device = torch.device("cuda", index)
    try:
        arch = jit.running_arch(torch.cuda.get_device_capability(device))
        built = library.load(arch)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        backend = CudaBackend(device, dtype, Kernels(built.launch, TARGETS[arch], multiprocessors))
        selftest.require(backend, built.folder)
    except BackendUnavailableError as error:
        return str(error)
    return backend
