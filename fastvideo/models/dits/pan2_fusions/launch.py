# SPDX-License-Identifier: Apache-2.0
"""How the kernels cover their inputs: tile shapes and warps by size, as measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fastvideo.models.dits.pan2_fusions.eligibility import GROUP

MAXIMUM_WARPS = 32
MAXIMUM_ROWS = 16

# Kernel -> elements of one tensor in a program's tile, and how many of them a thread holds: the fastest of a dozen
# launches at 67,782 tokens x 4096 in bf16 (``benchmarks/pan2_fusions.py --tune``).
ROW_TILES = {
    "norm_modulate": (4096, 32),
    "gate_residual_norm_modulate": (8192, 16),
    "gate_residual": (16384, 16),
}
HEAD_TILE = (4096, 8)


@dataclass(frozen=True)
class RowLaunch:
    """A program takes ``rows`` whole rows.

    Attributes:
        block: columns of a tile, a power of two that holds the width.
    """

    block: int
    rows: int
    warps: int

    def grid(self, tokens: int, batch: int) -> tuple[int, int]:
        return _ceil_div(tokens, self.rows), batch


@dataclass(frozen=True)
class HeadLaunch:
    """A program takes ``block`` heads (a power of two) of one token."""

    block: int
    warps: int

    def grid(self, tokens: int, heads: int, batch: int) -> tuple[int, int, int]:
        return tokens, _ceil_div(heads, self.block), batch


def row_launch(kernel: str, width: int) -> RowLaunch:
    tile, per_thread = ROW_TILES[kernel]
    block = _power_of_two(width)
    rows = min(max(tile // block, 1), MAXIMUM_ROWS)
    return RowLaunch(block, rows, _warps(block * rows, per_thread))


def head_launch(heads: int, head_dim: int) -> HeadLaunch:
    tile, per_thread = HEAD_TILE
    block = min(_power_of_two(heads), tile // head_dim)
    return HeadLaunch(block, _warps(block * head_dim, per_thread))


def strides_in_groups(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last, in groups of elements; 0 where a dimension is repeated or has size 1.

    A kernel multiplies them by the group again and so knows that each row is as aligned as its tensor.
    """
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tuple(0 if size == 1 else stride // GROUP for size, stride in outer)


def _warps(elements: int, per_thread: int) -> int:
    return min(max(elements // (32 * per_thread), 1), MAXIMUM_WARPS)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)
