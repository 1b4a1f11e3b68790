# SPDX-License-Identifier: Apache-2.0
"""Brings a stream's passes to host memory beside the computation of the next pass."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from wan22_vae_decode.errors import OutOfMemoryError


class _Copy(NamedTuple):
    """A copy on its way: its target and the event after which that holds the pixels."""

    target: Tensor
    finished: torch.cuda.Event


def target(pixels: Tensor) -> Tensor | None:
    """Pinned memory for a copy of a pass's pixels, or None for pixels on a CPU, which need none.

    Raises:
        OutOfMemoryError: the host has none left.
    """
    if pixels.device.type != "cuda":
        return None
    try:
        # Strides are not kept: the target is contiguous, as the pixels of a pass are.
        return torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    except RuntimeError as error:
        reason, *_ = str(error).splitlines() or [""]
        raise OutOfMemoryError(
            f"{pixels.shape[2]} frames of pixels do not fit into pinned host memory ({reason}); free memory of the host"
        ) from error


def on_host(passes: Iterator[tuple[Tensor, Tensor | None]], device: torch.device) -> Iterator[Tensor]:
    """The pixels of ``passes``, which lie on ``device``, one by one in host memory, each in memory of its own.

    From a CUDA device an item is copied to its ``target`` on a stream of its own while the next pass runs, and yielded
    after that pass, when the copy is done: two passes' pixels exist on the device at a time. torch keeps pinned
    memory that is let go and uses it again, so a caller that drops each item makes do with two or three of them.
    Items on a CPU are yielded as they are.
    """
    return _from_cuda(passes, device) if device.type == "cuda" else map(operator.itemgetter(0), passes)


def _from_cuda(passes: Iterator[tuple[Tensor, Tensor | None]], device: torch.device) -> Iterator[Tensor]:
    side = torch.cuda.Stream(device)
    last: _Copy | None = None
    for pixels, pinned in passes:
        assert pinned is not None
        current = _started(pixels, pinned, side)
        if last is not None:
            last.finished.synchronize()
            yield last.target
        last = current
    if last is not None:
        last.finished.synchronize()
        yield last.target


def _started(pixels: Tensor, pinned: Tensor, side: torch.cuda.Stream) -> _Copy:
    """Begins to copy what the current stream computes."""
    side.wait_stream(torch.cuda.current_stream(pixels.device))
    with torch.cuda.stream(side):
        pinned.copy_(pixels, non_blocking=True)
        finished = torch.cuda.Event()
        finished.record(side)
    # Whoever drops the pixels next, their memory is used again only after the copy.
    pixels.record_stream(side)
    return _Copy(pinned, finished)
