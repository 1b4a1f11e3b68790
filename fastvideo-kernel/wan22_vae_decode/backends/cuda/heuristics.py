# SPDX-License-Identifier: Apache-2.0
"""Choices of method, tile, slab and band. Tiles, slabs and bands change speed and memory, never results."""

import torch

from wan22_vae_decode import winograd
from wan22_vae_decode.backends.cuda.targets import Target
from wan22_vae_decode.geometry import FRAMES_PER_LATENT
from wan22_vae_decode.layers import WinogradForm
from wan22_vae_decode.memory import DEFAULT_SLAB

WINOGRAD_FORMS = {1: WinogradForm(3), 2: WinogradForm(4), 3: WinogradForm(4)}
"""Levels whose 3x3x3 convs run in Winograd form -> that form: what keeps a decode above 70 dB, and within
2 dB of torch's direct float16 convs; of our own, which round less, tiles of three columns at every level would.
The errors of a level go through all levels above it, while the time that it saves grows with its pixels.
"""

WINOGRAD_CHANNELS = 1024
"""Most input channels of the input transform."""

WINOGRAD_BYTES = 1792 << 20
"""Most bytes of components and their products at a time, of a conv over WINOGRAD_FRAMES frames or more, and in
proportion of fewer: a pass that is cut smaller for want of memory shrinks in this too. Rows at the edges of bands are
normalised twice: on an H200 121 frames take 25 ms less than with 640 MiB."""

WINOGRAD_FRAMES = DEFAULT_SLAB * FRAMES_PER_LATENT
"""Frames of a slab of the default size once time is doubled twice."""

UPSAMPLE_WINOGRAD_LEVELS = (1, 2)
"""Levels whose upsampling convs run in Winograd form in float16: on an H200 it saves 40 ms of 121 frames at level 1
and 30 ms at level 2, for 0.3 dB. At level 0 there is little to save, and a row band may have fewer rows than its
neighbours need."""

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


def winograd_form(level: int, c_in: int, split_rows: bool) -> WinogradForm | None:
    """The form where Winograd pays, None where convs stay direct."""
    aligned = not (level == 0 and split_rows)
    return WINOGRAD_FORMS.get(level) if aligned and c_in <= WINOGRAD_CHANNELS else None


def upsample_method(dtype: torch.dtype, level: int) -> str:
    """ "winograd" where it pays; in bfloat16 its rounding would cost more than it saves."""
    return "winograd" if dtype == torch.float16 and level in UPSAMPLE_WINOGRAD_LEVELS else "phases"


def product_type(form: WinogradForm, dtype: torch.dtype) -> torch.dtype:
    """Of the products of a Winograd conv in a compute type."""
    return torch.float32 if form.float_products else dtype


def tile_row_bytes(form: WinogradForm, cols: int, frames: int, c_in: int, c_out: int, dtype: torch.dtype) -> int:
    """Bytes of the components and products of one row of Winograd tiles in all frames.

    Args:
        form: of the conv.
        cols: of the image.
        dtype: of the components.
    """
    _, across = winograd.tiles(1, cols, form.columns)
    products = frames * c_out * product_type(form, dtype).itemsize
    return across * winograd.components(form.columns) * ((frames + 2) * c_in * dtype.itemsize + products)


def tile_rows_per_band(tile_rows: int, frames: int, bytes_per_tile_row: int) -> int:
    """Rows of tiles to transform at a time so that they stay within WINOGRAD_BYTES, or with few frames within their
    part of it; bands as even as possible.
    """
    most = WINOGRAD_BYTES * min(frames, WINOGRAD_FRAMES) // WINOGRAD_FRAMES
    return _even(tile_rows, most // max(1, bytes_per_tile_row))


def frames_per_slab(frames: int, bytes_per_frame: int) -> int:
    """Frames to work on at a time so that a slab's scratch stays within SCRATCH_BYTES; slabs as even as possible."""
    return _even(frames, SCRATCH_BYTES // max(1, bytes_per_frame))


def upsample_slab(
    frames: int, rows: int, cols: int, band: bool, c_in: int, c_out: int, size: int
) -> tuple[int, int, int]:
    """Frames and rows of tiles of an upsampling conv in Winograd form to work on at a time, and the bytes of their
    components and products: all rows of some frames, or some rows of one.

    Args:
        rows, cols: of the image, or of a band of it.
        band: it is one; for how many rows of tiles it has depends on where it begins.
        size: bytes of an element.
    """
    down = winograd.upsample_tile_rows(rows, band)
    tile_row = len(winograd.upsample_tiles(cols)) * winograd.UPSAMPLE_COMPONENTS * (c_in + 4 * c_out) * size
    slab = frames_per_slab(frames, down * tile_row)
    tile_rows = _even(down, SCRATCH_BYTES // max(1, tile_row))
    return slab, tile_rows, slab * tile_rows * tile_row


def _even(count: int, most: int) -> int:
    """The size of the fewest parts of at most `most` (at least 1) that `count` can be cut into evenly."""
    parts = -(-count // max(1, most))
    return -(-count // parts)
