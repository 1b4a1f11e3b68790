# SPDX-License-Identifier: Apache-2.0
"""How far a video is from a reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Distance(NamedTuple):
    """PSNR in dB of the range 2 of [-1, 1]: over a whole video, and of its worst frame, with that frame's number."""

    psnr_db: float
    worst_frame_db: float
    worst_frame: int


def distance(video: Tensor, reference: Tensor) -> Distance:
    """Of two videos [B, 3, F, H, W] in [-1, 1]. Mean squared errors count from 1e-30 (306 dB, where they are equal) to
    1e30 (NaN and infinity), so that JSON can hold the result.
    """
    errors = [_error(video[:, :, f], reference[:, :, f]) for f in range(reference.shape[2])]
    frames = torch.stack(errors).nan_to_num(nan=1e30).clamp(1e-30, 1e30)
    db = 10 * torch.log10(4 / frames)
    whole = 10 * torch.log10(4 / frames.mean())
    worst = int(db.argmin())
    return Distance(whole.item(), db[worst].item(), worst)


def _error(frame: Tensor, reference: Tensor) -> Tensor:
    return (frame.double() - reference.double()).square().mean()


@contextmanager
def strict_float32() -> Iterator[None]:
    """float32 on CUDA without TF32."""
    # From torch 2.9; its older switches raise once these have been used.
    if hasattr(torch.backends.cudnn, "conv"):
        switches = {torch.backends.cudnn.conv: "fp32_precision", torch.backends.cuda.matmul: "fp32_precision"}
    else:
        switches = {torch.backends.cudnn: "allow_tf32", torch.backends.cuda.matmul: "allow_tf32"}
    before = {switch: getattr(switch, name) for switch, name in switches.items()}
    try:
        for switch, name in switches.items():
            setattr(switch, name, "ieee" if name == "fp32_precision" else False)
        yield
    finally:
        for switch, name in switches.items():
            setattr(switch, name, before[switch])
