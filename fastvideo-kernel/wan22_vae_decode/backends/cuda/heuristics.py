# SPDX-License-Identifier: Apache-2.0
"""Choices of tile and slab. They change speed and memory, never results."""

TILE_M = 128

# Columns of a tile -> its time per K step, relative: the narrow tile reads A twice as often for its products.
TILE_COST = {256: 1.0, 128: 0.56}

SCRATCH_BYTES = 512 << 20
"""Most bytes that an op's temporaries between two kernels take, where an op can work through frames."""

ATTENTION_FRAMES = 8
"""Frames whose score matrices exist at a time."""


def tile_n(m: int, n: int, batch: int, multiprocessors: int) -> int:
    """Columns of the GEMM tile that finishes an m x n x batch problem first: whole waves times a tile's cost."""

    def cost(columns: int) -> float:
        # Tiles of a cluster of two share a wave, so rows count in pairs.
        pairs = -(-m // (2 * TILE_M)) * -(-n // columns) * batch
        return -(-pairs // max(1, multiprocessors // 2)) * TILE_COST[columns]

    return min(TILE_COST, key=cost)


def frames_per_slab(frames: int, bytes_per_frame: int) -> int:
    """Frames to work on at a time so that a slab's scratch stays within SCRATCH_BYTES; slabs as even as possible."""
    most = max(1, SCRATCH_BYTES // max(1, bytes_per_frame))
    return -(-frames // -(-frames // most))
