# SPDX-License-Identifier: Apache-2.0
"""Choices of method, tile, slab and band. Tiles, slabs and bands change speed and memory, never results."""

import torch

from wan22_vae_decode.backends.cuda.targets import Target

WINOGRAD_LEVELS = {torch.float16: (2, 3), torch.bfloat16: (2, 3)}
"""Levels whose 3x3x3 convs run as F(4x4, 3x3): those that keep a decode within 2 dB of direct convs. What a level loses
goes through all levels above it, while the time that it saves grows with its pixels. PSNR in float16 at a quarter of
the width, weights with strong branches (calibrated weights) in parentheses, and milliseconds that a level saves of
121 frames:

    direct                   71.4 (73.2) dB
    level 3                  70.4 (73.1)     480 ms
    levels 2, 3              69.3 (72.7)     600 ms
    levels 1, 2, 3           67.9 (71.8)     260 ms
    all, products below      65.7 (68.3)      50 ms
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


def conv3d_method(dtype: torch.dtype, level: int, c_in: int, split_rows: bool) -> str:
    """ "winograd" where it pays: the products shrink to a quarter, and what memory then costs is below that."""
    aligned = not (level == 0 and split_rows)
    return "winograd" if aligned and level in WINOGRAD_LEVELS[dtype] and c_in <= WINOGRAD_CHANNELS else "direct"


def upsample_method(dtype: torch.dtype, channels: int) -> str:
    """ "products" where they pay; bfloat16 would lose accuracy in the differences."""
    return "products" if dtype == torch.float16 and channels >= UPSAMPLE_PRODUCTS_CHANNELS else "phases"


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
