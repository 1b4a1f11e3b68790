# SPDX-License-Identifier: Apache-2.0
"""The architectures that have kernels: what their library is built from and what its tiles cost. One row each."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One architecture.

    Args:
        tensor_core: sources of its tensor-core kernels, without suffix; each is compiled once for every element type.
        tile_m: rows of a GEMM tile on one SM. SMs work in pairs, on tiles below each other that share B.
        tile_cost: columns of a tile -> its time per K step, relative to the widest.
    """

    tensor_core: tuple[str, ...]
    tile_m: int
    tile_cost: Mapping[int, float]


# The narrow tile reads A twice as often for its products.
HOPPER = Target(("sm90_conv3d", "sm90_tap_gemm"), tile_m=128, tile_cost={256: 1.0, 128: 0.56})

# On paper, not measured: the narrow tile loads three quarters of the wide one's bytes for half of its products, and an
# SM that loads 32 KiB in the 512 cycles of a wide K step is at the 64 bytes a cycle that L2 gives it.
BLACKWELL = Target(("sm100_conv3d", "sm100_tap_gemm"), tile_m=128, tile_cost={256: 1.0, 128: 0.75})

TARGETS: dict[str, Target] = {"sm_90a": HOPPER, "sm_100a": BLACKWELL, "sm_103a": BLACKWELL}
"""What nvcc calls an architecture -> its row. The same names as in `jit.arch`."""
