# SPDX-License-Identifier: Apache-2.0
"""What the kernels over [tokens, width] streams share: a tile is ROWS whole rows, padded to BLOCK columns."""

from __future__ import annotations

import triton
import triton.language as tl
from fastvideo.models.dits.pan2_fusions import eligibility

# Strides come in groups of elements: a product with a constant tells the compiler that a row is aligned. The 64-bit
# index stands first in a product, so that no part of it overflows.
GROUP = tl.constexpr(eligibility.GROUP)


@triton.jit
def tile_rows(tile, ROWS: tl.constexpr):
    """Row numbers of a tile, [ROWS, 1], int64."""
    return tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]


@triton.jit
def load_rows(stream, rows, row_stride, columns, mask):
    """A tile in fp32 with zeros outside the mask."""
    pointers = stream + rows * row_stride * GROUP + columns
    return tl.load(pointers, mask, other=0.0).to(tl.float32)


@triton.jit
def load_vector(vector, batch, batch_stride, columns, inside):
    """One sample's modulation vector in fp32, [1, BLOCK]; every program reads it, so it should stay cached."""
    pointers = vector + batch * batch_stride * GROUP + columns
    return tl.load(pointers, inside, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def layer_norm(x, inside, eps, WIDTH: tl.constexpr):
    """LayerNorm without affine of a tile in fp32; the variance is taken around the mean."""
    mean = tl.sum(x, axis=1, keep_dims=True) / WIDTH
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / WIDTH
    return centred * tl.rsqrt(variance + eps)
