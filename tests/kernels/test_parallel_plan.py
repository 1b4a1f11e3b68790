# SPDX-License-Identifier: Apache-2.0
"""Who computes which frames, on paper."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan22_vae_decode import InputError, parallel
from wan22_vae_decode.errors import DecodeError


@given(st.integers(0, 40), st.integers(1, 61), st.integers(2, 8))
def test_intervals_cover_a_pass_or_everyone_computes_it(start, frames, world):
    intervals = parallel.frame_intervals(start, start + frames, world)
    if frames < 2 * world:
        assert intervals is None
        return
    assert intervals is not None
    assert len(intervals) == world
    assert intervals[0][0] == start
    assert intervals[-1][1] == start + frames
    assert all(
        a[1] == b[0] and a[1] - a[0] >= 2 for a, b in zip(intervals, [*intervals[1:], (0, 0)], strict=True) if b[1]
    )


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0, 4), (0, 4, 0)),
        ((2, 4), (0, 4, 2)),
        ((6, 8), (0, 8, 6)),
        ((7, 9), (1, 9, 0)),
        ((20, 24), (14, 24, 0)),
    ],
)
def test_window_has_six_frames_of_context_where_there_are_six(interval, expected):
    assert parallel.window(*interval) == expected


def test_no_group_is_no_communicator():
    assert parallel.communicator(None) is None


def test_group_needs_torch_distributed():
    assert not torch.distributed.is_initialized()
    with pytest.raises(InputError, match="init_process_group"):
        parallel.communicator(object())


@pytest.mark.parametrize("value", ["0", "-3", "soon"])
def test_timeout_variable_is_checked(value, monkeypatch):
    monkeypatch.setenv(parallel.TIMEOUT_VARIABLE, value)
    with pytest.raises(DecodeError, match="positive number of seconds"):
        parallel._timeout()


def test_stats_read_well():
    stats = parallel.Stats()
    assert str(stats) == "none"
    stats.add("halo", 10)
    stats.add("halo", 5)
    stats.add("pixels", 7)
    assert str(stats) == "halo 2 (15 bytes), pixels 1 (7 bytes)"
