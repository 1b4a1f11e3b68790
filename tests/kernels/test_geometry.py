# SPDX-License-Identifier: Apache-2.0
"""Frames of passes and rows of bands."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan22_vae_decode import geometry


@pytest.mark.parametrize(
    ("frames", "rows", "cols", "expected"),
    [(1, 1, 1, (2, 3, 1, 16, 16)), (31, 44, 78, (2, 3, 121, 704, 1248)), (79, 44, 78, (2, 3, 313, 704, 1248))],
)
def test_video_shape(frames, rows, cols, expected):
    assert geometry.video_shape(2, frames, rows, cols) == expected


@given(st.integers(1, 100), st.integers(1, 61))
def test_passes_cover_the_video(frames, per_pass):
    intervals = [(start, min(start + per_pass, frames)) for start in range(0, frames, per_pass)]
    pixels = [geometry.video_frames(*interval) for interval in intervals]
    assert pixels[0][0] == 0
    assert pixels[-1][1] == 4 * frames - 3
    assert all(a[1] == b[0] for a, b in pairwise(pixels))


@given(st.integers(1, 8), st.integers(0, 120))
def test_bands_cover_the_rows_evenly(world, extra):
    rows = world + extra
    bands = geometry.row_bands(rows, world)
    assert len(bands) == world
    assert bands[0][0] == 0
    assert bands[-1][1] == rows
    assert all(a[1] == b[0] for a, b in pairwise(bands))
    sizes = [stop - start for start, stop in bands]
    assert min(sizes) >= 1
    even = rows >= 2 * world
    assert max(sizes) - min(sizes) <= (3 if even else 1)
    if even:
        assert all(start % 2 == 0 for start, _ in bands)


def test_bands_of_the_usual_height():
    assert geometry.row_bands(44, 4) == [(0, 12), (12, 24), (24, 34), (34, 44)]
    assert geometry.row_bands(44, 1) == [(0, 44)]
    assert geometry.row_bands(5, 4) == [(0, 2), (2, 3), (3, 4), (4, 5)]
