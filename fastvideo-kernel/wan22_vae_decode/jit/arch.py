# SPDX-License-Identifier: Apache-2.0
"""Architectures that have kernels, and what they ask of the compiler."""

import os

from wan22_vae_decode.jit.errors import BuildError

# Compute capability of the device -> architecture-specific target that its tensor-core instructions need.
ARCHS: dict[tuple[int, int], str] = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

# First CUDA toolkit whose nvcc compiles the target (and, for sm_90a, the CUTLASS im2col kernels).
MINIMUM_NVCC: dict[str, tuple[int, int]] = {"sm_90a": (12, 3), "sm_100a": (12, 8), "sm_103a": (12, 9)}


def chosen_arch() -> str | None:
    """What `WAN22_VAE_DECODE_ARCH` names, if it is set. Raises BuildError where it is no architecture with kernels."""
    override = os.environ.get("WAN22_VAE_DECODE_ARCH")
    if override and override not in MINIMUM_NVCC:
        raise BuildError(
            f"WAN22_VAE_DECODE_ARCH={override} is not an architecture with kernels; use one of "
            f"{', '.join(MINIMUM_NVCC)} or unset it."
        )
    return override or None


def arch_of(capability: tuple[int, int]) -> str:
    """Target for a device of this compute capability; `WAN22_VAE_DECODE_ARCH` overrides it.

    Raises BuildError where no kernels exist for it.
    """
    chosen = chosen_arch()
    if chosen is not None:
        return chosen
    try:
        return ARCHS[capability]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        raise BuildError(
            f"No kernels for compute capability {capability[0]}.{capability[1]}; there are kernels for {known}."
        ) from None


def running_arch(capability: tuple[int, int]) -> str:
    """As `arch_of`, for kernels that are to run on this very device: an override that names another is refused."""
    arch = arch_of(capability)
    if ARCHS.get(capability) != arch:
        major, minor = capability
        raise BuildError(
            f"WAN22_VAE_DECODE_ARCH={arch} is for builds, but this card has compute capability {major}.{minor}, which "
            f"cannot run them; unset it to decode here."
        )
    return arch


def gencode(arch: str) -> str:
    """nvcc's option for machine code of exactly this target (the -arch shorthand also tries the plain one)."""
    return f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}"
