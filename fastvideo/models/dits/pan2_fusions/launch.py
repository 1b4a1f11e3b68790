# SPDX-License-Identifier: Apache-2.0
"""How the kernels cover their inputs: tile shapes and warps by size, as measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fastvideo.models.dits.pan2_fusions.eligibility import GROUP

# Elements of one tensor that a thread holds: two 16-byte accesses in bf16, four in fp32.
ELEMENTS_PER_THREAD = 16
ELEMENTS_PER_WARP = 32 * ELEMENTS_PER_THREAD
MAXIMUM_WARPS = 32
# Smaller tiles would leave a program with too few bytes in flight.
TILE_ELEMENTS = 4096
MAXIMUM_ROWS = 16


@dataclass(frozen=True)
class RowLaunch:
    """A program takes ``tiles`` tiles of ``rows`` whole rows in turn, and keeps the modulation vectors in between.

    Attributes:
        block: columns of a tile, a power of two that holds the width.
    """

    block: int
    rows: int
    tiles: int
    warps: int

    def grid(self, tokens: int, batch: int) -> tuple[int, int]:
        return _ceil_div(tokens, self.rows * self.tiles), batch


@dataclass(frozen=True)
class HeadLaunch:
    """A program takes ``block`` heads (a power of two) of one token."""

    block: int
    warps: int

    def grid(self, tokens: int, heads: int, batch: int) -> tuple[int, int, int]:
        return tokens, _ceil_div(heads, self.block), batch


def row_launch(width: int) -> RowLaunch:
    block = _power_of_two(width)
    rows = min(max(TILE_ELEMENTS // block, 1), MAXIMUM_ROWS)
    return RowLaunch(block, rows, 1, _warps(block * rows))


def head_launch(heads: int, head_dim: int) -> HeadLaunch:
    block = min(_power_of_two(heads), TILE_ELEMENTS // head_dim)
    return HeadLaunch(block, _warps(block * head_dim))


def strides_in_groups(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last, in groups of elements; 0 where a dimension is repeated or has size 1.

    A kernel multiplies them by the group again and so knows that each row is as aligned as its tensor.
    """
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tuple(0 if size == 1 else stride // GROUP for size, stride in outer)


def _warps(elements: int) -> int:
    return min(max(elements // ELEMENTS_PER_WARP, 1), MAXIMUM_WARPS)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)
