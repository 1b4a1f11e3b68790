# SPDX-License-Identifier: Apache-2.0
"""Brings a stream's passes to host memory beside the computation of the next pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    """A copy on its way: its target and the event after which that holds the pixels."""

    target: Tensor
    finished: torch.cuda.Event


def on_host(passes: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The items of ``passes``, which lie on ``device``, one by one in host memory, each in memory of its own.

    From a CUDA device an item is copied to pinned memory on a stream of its own while the next pass runs, and yielded
    after that pass, when the copy is done: two passes' pixels exist on the device at a time. torch keeps pinned
    memory that is let go and uses it again, so a caller that drops each item makes do with two or three of them.
    Items on a CPU are yielded as they are.
    """
    return _from_cuda(passes, device) if device.type == "cuda" else passes


def _from_cuda(passes: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    side = torch.cuda.Stream(device)
    last: _Copy | None = None
    for pixels in passes:
        current = _started(pixels, side)
        if last is not None:
            last.finished.synchronize()
            yield last.target
        last = current
    if last is not None:
        last.finished.synchronize()
        yield last.target


def _started(pixels: Tensor, side: torch.cuda.Stream) -> _Copy:
    """Begins to copy what the current stream computes."""
    # Strides are not kept: the target is contiguous, as the pixels of a pass are.
    target = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream(pixels.device))
    with torch.cuda.stream(side):
        target.copy_(pixels, non_blocking=True)
        finished = torch.cuda.Event()
        finished.record(side)
    # Whoever drops the pixels next, their memory is used again only after the copy.
    pixels.record_stream(side)
    return _Copy(target, finished)
