# SPDX-License-Identifier: Apache-2.0
"""Who computes which frames, on paper."""

import contextlib
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan22_vae_decode import InputError, memory, parallel
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


@pytest.mark.parametrize("world", [2, 3, 8])
def test_memory_counts_the_prefix_frames_of_the_busiest_rank(world):
    for frames in range(1, 40):
        busiest = 0
        # Away from the clip's beginning, where every rank needs its context; a clip's last pass may be shorter.
        for length in range(1, frames + 1):
            passes = parallel.frame_intervals(100, 100 + length, world) or [(100, 100 + length)]
            windows = [parallel.window(*interval) for interval in passes]
            busiest = max(busiest, *(stop - first for first, stop, _ in windows))
        assert memory.prefix_frames(memory.Plan(frames, 1), world) == busiest


def stand_in(gather):
    """A communicator of two ranks, the other of which says what this one does."""
    comm = object.__new__(parallel.Communicator)
    comm.gather = gather
    comm.abort = lambda reason: None
    return comm


@pytest.mark.parametrize("agreement", ["together", "finish_pass"])
def test_failures_do_not_keep_memory(agreement):
    class Held:
        pass

    comm = stand_in(lambda value, *place: [value, value])
    seen = []

    def fail():
        held = Held()
        seen.append(weakref.ref(held))
        raise ValueError("no")

    def run():
        if agreement == "together":
            comm.together(fail, "fail")
        try:
            fail()
        except ValueError as error:
            failure = error
        try:
            comm.finish_pass(failure)
        finally:
            del failure

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            run()
        assert seen[0]() is None
    finally:
        gc.enable()


def test_no_group_is_no_communicator():
    assert parallel.communicator(None) is None


def test_group_needs_torch_distributed():
    assert not torch.distributed.is_initialized()
    with pytest.raises(InputError, match="init_process_group"):
        parallel.communicator(object())


@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan", "inf", "1e30"])
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
