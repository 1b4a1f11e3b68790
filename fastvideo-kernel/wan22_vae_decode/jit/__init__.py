# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA sources on first use and keeps the shared library in a cache.

`build(recipe)` returns the folder of a finished cache entry. A machine with a compiler takes the entry of that
compiler; one without takes any entry of the same sources, flags and architecture, so that kernels can be built ahead
for it (`prebuilt`). `check(recipe)` says, without building, whether `build` can begin. The rooms: `arch` (which
compiler an architecture needs), `toolchain` (where nvcc, ninja and the CUTLASS headers are), `recipe` (what is compiled
and the key that names it), `cache` (lock, manifest, atomic publication) and `builder` (ninja, the log and what it must
not contain).

Environment:

    WAN22_VAE_DECODE_CACHE  folder of the cache (default: $XDG_CACHE_HOME/wan22_vae_decode or ~/.cache/wan22_vae_decode)
    WAN22_VAE_DECODE_ARCH   architecture to build for instead of the device's, for example sm_90a
    CUDA_HOME               searched first for bin/nvcc
    MAX_JOBS                most compilers at a time (default: one a core, at most one per 5 GiB of free memory)
"""

from wan22_vae_decode.jit.arch import arch_of, chosen_arch, running_arch
from wan22_vae_decode.jit.builder import build, check, prebuilt
from wan22_vae_decode.jit.errors import BuildError
from wan22_vae_decode.jit.recipe import Recipe, Unit

__all__ = ["BuildError", "Recipe", "Unit", "arch_of", "build", "check", "chosen_arch", "prebuilt", "running_arch"]
