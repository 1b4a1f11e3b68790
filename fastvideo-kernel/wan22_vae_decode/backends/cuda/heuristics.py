# SPDX-License-Identifier: Apache-2.0
"""Choices of method, tile, slab and band. Tiles, slabs and bands change speed and memory, never results."""

import torch

from wan22_vae_decode import winograd
from wan22_vae_decode.backends.cuda.targets import Target

WINOGRAD_COLUMNS = {1: 3, 2: 4, 3: 4}
"""Levels whose 3x3x3 convs run in Winograd form -> columns of a tile: what keeps a decode above 70 dB, and within
2 dB of torch's direct float16 convs; of our own, which round less, tiles of three columns at every level would.
The errors of a level go through all levels above it, while the time that it saves grows with its pixels.
"""

WINOGRAD_CHANNELS = 1024
"""Most input channels of the input transform."""

WINOGRAD_BYTES = 640 << 20
"""Most bytes of components and their products at a time: enough that a band's GEMM takes twenty waves or more."""

UPSAMPLE_PRODUCTS_CHANNELS = 2048
"""From how many channels the nine-product upsample form pays: what it saves in arithmetic grows with their square, its
additional differences and products in memory only with their number. At the decoder's 1024 it would save 20 ms of 121
frames and cost 0.2 dB, per millisecond more than Winograd at level 1 does."""

SCRATCH_BYTES = 512 << 20
"""Most bytes that an op's temporaries between two kernels take, where an op can work through frames."""

ATTENTION_FRAMES = 8
"""Frames whose score matrices exist at a time."""


def tile_n(target: Target, m: int, n: int, batch: int, multiprocessors: int) -> int:
    """Columns of the GEMM tile that finishes an m x n x batch problem first: whole waves times a tile's cost."""

    def cost(columns: int) -> float:
        # The tiles of a pair of SMs share a wave, so rows count in pairs.
        pairs = -(-m // (2 * target.tile_m)) * -(-n // columns) * batch
        return -(-pairs // max(1, multiprocessors // 2)) * target.tile_cost[columns]

    return min(target.tile_cost, key=cost)


def winograd_columns(level: int, c_in: int, split_rows: bool) -> int:
    """Columns of the tiles where Winograd pays, 0 where convs stay direct."""
    aligned = not (level == 0 and split_rows)
    return WINOGRAD_COLUMNS.get(level, 0) if aligned and c_in <= WINOGRAD_CHANNELS else 0


def upsample_method(dtype: torch.dtype, channels: int) -> str:
    """ "products" where they pay; bfloat16 would lose accuracy in the differences."""
    return "products" if dtype == torch.float16 and channels >= UPSAMPLE_PRODUCTS_CHANNELS else "phases"


def tile_row_bytes(columns: int, cols: int, frames: int, c_in: int, c_out: int, size: int) -> int:
    """Bytes of the components and products of one row of Winograd tiles in all frames.

    Args:
        columns: of a tile.
        cols: of the image.
        size: bytes of an element.
    """
    _, across = winograd.tiles(1, cols, columns)
    return across * winograd.components(columns) * ((frames + 2) * c_in + frames * c_out) * size


def tile_rows_per_band(tile_rows: int, bytes_per_tile_row: int) -> int:
    """Rows of tiles to transform at a time so that they stay within WINOGRAD_BYTES; bands as even as possible."""
    return _even(tile_rows, WINOGRAD_BYTES // max(1, bytes_per_tile_row))


def frames_per_slab(frames: int, bytes_per_frame: int) -> int:
    """Frames to work on at a time so that a slab's scratch stays within SCRATCH_BYTES; slabs as even as possible."""
    return _even(frames, SCRATCH_BYTES // max(1, bytes_per_frame))


def rows_per_band(rows: int, bytes_per_row: int) -> int:
    """Rows of one frame to work on at a time, likewise: all of them if they fit."""
    return _even(rows, SCRATCH_BYTES // max(1, bytes_per_row))


def _even(count: int, most: int) -> int:
    """The size of the fewest parts of at most `most` (at least 1) that `count` can be cut into evenly."""
    parts = -(-count // max(1, most))
    return -(-count // parts)
