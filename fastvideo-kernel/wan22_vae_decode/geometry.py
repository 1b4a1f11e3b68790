# SPDX-License-Identifier: Apache-2.0
"""Sizes of the Wan2.2 decoder: channels and resolutions of its levels, frames of a pass, row bands of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

SPATIAL = 16
"""Pixels per latent along rows and columns: three doublings, then a 2x2 un-patchify."""

PATCH = 2
"""Pixels per feature of the last level along rows and columns."""

FRAMES_PER_LATENT = 4
"""Video frames of every latent frame but the first, which gives one."""

OUT_CHANNELS = 3 * PATCH * PATCH

CONTEXT_FRAMES = 6
"""Latent frames before an interval that the prefix's three causal convs look at, two each."""


@dataclass(frozen=True)
class Architecture:
    """The decoder's widths. Everything else of the Wan2.2 VAE is fixed: widths (4, 4, 2, 1) * ``base``, three resnets
    an up block, time doubled in up blocks 0 and 1, space doubled in 0, 1 and 2.

    Attributes:
        base: decoder_base_dim, 256 as released.
        latent: z_dim, 48 as released.
    """

    base: int = 256
    latent: int = 48

    @property
    def inner(self) -> int:
        """Channels of conv_in's output and of the mid block."""
        return 4 * self.base

    @property
    def up_blocks(self) -> tuple[UpBlockShape, ...]:
        c = self.base
        return (
            UpBlockShape(0, 4 * c, 4 * c, doubles_time=True, doubles_space=True),
            UpBlockShape(1, 4 * c, 4 * c, doubles_time=True, doubles_space=True),
            UpBlockShape(2, 4 * c, 2 * c, doubles_time=False, doubles_space=True),
            UpBlockShape(3, 2 * c, c, doubles_time=False, doubles_space=False),
        )


@dataclass(frozen=True)
class UpBlockShape:
    """One up block: its level (resolution 2**level times the latents') and its input and output channels."""

    level: int
    c_in: int
    c_out: int
    doubles_time: bool
    doubles_space: bool


RESNETS = 3
"""Resnets of an up block; the first changes the channel count."""


def video_shape(batch: int, frames: int, rows: int, cols: int) -> tuple[int, int, int, int, int]:
    """[B, 3, 4T - 3, 16H, 16W] for latents of T frames, H rows and W columns."""
    return batch, 3, video_frames(0, frames)[1], SPATIAL * rows, SPATIAL * cols


def video_frames(start: int, stop: int) -> tuple[int, int]:
    """The interval of video frames that latent frames ``start`` to ``stop`` (exclusive) of a clip decode to."""
    return max(0, FRAMES_PER_LATENT * start - 3), FRAMES_PER_LATENT * stop - 3


def row_bands(rows: int, world: int) -> list[tuple[int, int]]:
    """Latent rows of each rank: as even as possible, inner edges on even rows when there are two rows a rank.

    Even edges become multiples of four rows from level 1 on, so that Winograd tiles fall as on one device.
    """
    unit = 2 if rows >= 2 * world else 1
    return [(start * unit, min(stop * unit, rows)) for start, stop in even_split(-(-rows // unit), world)]


def even_split(count: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` contiguous intervals of ``count`` items whose lengths differ by at most one, longer ones first."""
    size, extra = divmod(count, parts)
    edges = [part * size + min(part, extra) for part in range(parts + 1)]
    return list(pairwise(edges))
