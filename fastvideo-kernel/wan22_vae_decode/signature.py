# SPDX-License-Identifier: Apache-2.0
"""Tells whether a module's weights are still those that a decoder was prepared from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wan22_vae_decode.weights import decoder_tensors, fingerprint


@torch.no_grad()
def signature(state_dict: Mapping[str, Tensor]) -> tuple:
    """A value that changes whenever a decoder tensor is replaced, moved, retyped or written to, by whatever means.

    Identity and version counters miss writes through ``.data``; so each tensor's contents enter too, as a weighted sum
    that depends on the positions of its elements. It reads every weight once (about a millisecond on a GPU) and waits
    for the device.
    """
    tensors = decoder_tensors(state_dict)
    return fingerprint(tensors), tuple(_contents(tensors))


def _contents(tensors: Mapping[str, Tensor]) -> list[int]:
    sums = []
    for tensor in tensors.values():
        matrix = tensor.detach().reshape(tensor.shape[0], -1)
        if matrix.dtype != torch.float64:
            matrix = matrix.float()
        with torch.autocast(matrix.device.type, enabled=False):
            sums.append(_weights(matrix.shape[0], matrix) @ (matrix @ _weights(matrix.shape[1], matrix)))
    # As bits: NaN equals itself there.
    return torch.stack([value.double() for value in sums]).view(torch.int64).tolist() if sums else []


def _weights(count: int, like: Tensor) -> Tensor:
    """Distinct numbers from 0.5 to 1.5 in no simple order: multiples of the golden ratio, modulo 1."""
    positions = torch.arange(1, count + 1, dtype=torch.float64, device=like.device)
    return ((positions * 0.6180339887498949) % 1.0 + 0.5).to(like.dtype)
