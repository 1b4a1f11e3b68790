# SPDX-License-Identifier: Apache-2.0
"""Tells whether a module's weights are still those that a decoder was prepared from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wan22_vae_decode.weights import decoder_tensors, detached, fingerprint

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Odd 64-bit constants of Steele, Lea and Flood's SplitMix64 (2014), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


@torch.no_grad()
def signature(state_dict: Mapping[str, Tensor]) -> tuple:
    """A value that changes whenever a decoder tensor is replaced, moved, retyped or written to, by whatever means.

    Identity and version counters miss writes through ``.data``, so each tensor's contents enter too: its bytes, as
    integers, in a sum modulo 2^64 with an odd factor for each position. A change of one element always changes that
    sum, however small; any other change, a permutation too, goes unseen with a probability near 2^-64. Integers make
    NaN equal to itself and nothing round. It reads every weight once and waits for the device.

    Args:
        state_dict: as for ``Decoder.from_state_dict``; on any devices, meta excepted.
    """
    tensors = decoder_tensors(state_dict)
    return fingerprint(tensors), contents(tensors)


@torch.no_grad()
def contents(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The checksum of every tensor that has elements: equal on all ranks with equal weights, wherever they lie."""
    matrices = [_matrix(tensor) for tensor in tensors.values() if tensor.numel()]
    longest = max((max(matrix.shape) for matrix in matrices), default=0)
    factors = {device: _factors(longest, device) for device in {matrix.device for matrix in matrices}}
    sums = [_checksum(matrix, factors[matrix.device]) for matrix in matrices]
    # In one tensor, so that the device is waited for once.
    return tuple(torch.stack([value.to(sums[0].device) for value in sums]).tolist()) if sums else ()


def _matrix(tensor: Tensor) -> Tensor:
    """A tensor's bytes as a matrix of the widest integers that their number allows."""
    flat = detached(tensor).contiguous().view(-1)
    item = flat.element_size()
    if flat.storage_offset() * item % 8:
        flat = flat.clone()
    words = flat.view(_WORDS[math.gcd(8, flat.numel() * item)])
    rows = tensor.shape[0] if tensor.dim() and words.numel() % tensor.shape[0] == 0 else 1
    return words.view(rows, -1)


def _checksum(matrix: Tensor, factors: Tensor) -> Tensor:
    rows, cols = matrix.shape
    return ((matrix * factors[:cols]).sum(1) * factors[:rows]).sum()


def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers in no simple order, so that moved or exchanged contents do not cancel out."""
    x = torch.arange(1, count + 1, device=device) * _STEP
    x = (x ^ (x >> 30)) * _MIX
    return (x ^ (x >> 27)) | 1
