# SPDX-License-Identifier: Apache-2.0
"""Puts a decoded video together in host memory, for FastVideo's file writer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


def collect(passes: Iterator[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The passes of a uint8 video as the float32 video from which FastVideo's writer makes the same bytes.

    The writer takes floats in [0, 1], truncates them times 255, and does so wherever they lie: bytes, a quarter of the
    memory, would not do, since FastVideo's decoding stage makes floats of them and its writer multiplies those by 255
    all the same. A thread converts each pass while the next one is computed.

    Args:
        passes: [B, 3, f, H, W] each, uint8, in host memory.
        shape: of the whole video, [B, 3, F, H, W]; F may be 0.

    Returns:
        float32 in host memory.
    """
    video = torch.empty(shape, dtype=torch.float32)
    start = 0
    converting: Future[object] | None = None
    with ThreadPoolExecutor(1) as thread:
        for pixels in passes:
            stop = start + pixels.shape[2]
            if converting is not None:
                converting.result()
            converting = thread.submit(_convert, pixels, video[:, :, start:stop])
            start = stop
    if converting is not None:
        converting.result()
    return video


def _convert(pixels: Tensor, out: Tensor) -> None:
    # Correctly rounded division: for every byte, its quotient times 255 is that byte again in float32.
    torch.div(pixels, 255, out=out)
