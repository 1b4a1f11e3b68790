# SPDX-License-Identifier: Apache-2.0
"""Which calls the fused kernels take. Every other call goes to the torch op, which takes them all.

The checks look at sizes, strides, types, devices and the grad mode only, so torch.compile traces and guards them.
"""

from __future__ import annotations

import os

import torch
from fastvideo.models.dits.pan2_ops import RotaryTable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128)
# Rows are read in groups of this many elements, 16 bytes or more.
GROUP = 8
# A tile holds a whole row in registers.
MAXIMUM_WIDTH = 16384
# The batch is a minor axis of the launch grid.
MAXIMUM_BATCH = 65535
# Triton reads this variable where a kernel is defined; its interpreter runs kernels on CPU tensors.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not_streams(streams: tuple[torch.Tensor, ...], vectors: tuple[torch.Tensor, ...]) -> str | None:
    """Why a kernel cannot take ``streams`` [B, tokens, width] with ``vectors`` [B or 1, 1, width]; None if it can."""
    shape = streams[0].shape
    if len(shape) != 3 or any(stream.shape != shape for stream in streams):
        return "the streams are not [B, tokens, width] of one size"
    batch, _, width = shape
    if batch > MAXIMUM_BATCH:
        return f"the batch is larger than {MAXIMUM_BATCH}"
    if width % GROUP or not 0 < width <= MAXIMUM_WIDTH:
        return f"the width is not a multiple of {GROUP} up to {MAXIMUM_WIDTH}"
    if any(tuple(vector.shape) not in ((batch, 1, width), (1, 1, width)) for vector in vectors):
        return "a modulation vector is not [B or 1, 1, width]"
    return _why_not_tensors((*streams, *vectors))


def why_not_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: RotaryTable | None,
) -> str | None:
    """Why a kernel cannot take ``q`` and ``k`` [B, tokens, heads, head_dim] with their gains and rotation."""
    if q.dim() != 4 or q.shape != k.shape:
        return "q and k are not [B, tokens, heads, head_dim] of one size"
    batch, tokens, _, head_dim = q.shape
    if batch > MAXIMUM_BATCH:
        return f"the batch is larger than {MAXIMUM_BATCH}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is not one of {HEAD_DIMS}"
    if q_weight.shape != (head_dim,) or k_weight.shape != (head_dim,):
        return "a gain is not [head_dim]"
    if rope is None:
        return _why_not_tensors((q, k, q_weight, k_weight))
    if rope.cos.shape != (tokens, head_dim // 2) or rope.sin.shape != rope.cos.shape:
        return "the rotation is not [tokens, head_dim / 2]"
    return _why_not_tensors((q, k, q_weight, k_weight, rope.cos, rope.sin))


def _why_not_tensors(tensors: tuple[torch.Tensor, ...]) -> str | None:
    device = tensors[0].device
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return "the tensors are not on a CUDA device"
    for tensor in tensors:
        if tensor.device != device:
            return "the tensors are on different devices"
        if tensor.dtype not in DTYPES:
            return "a tensor is not bf16, fp16 or fp32"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "gradients are recorded"
        if not _rows_are_aligned(tensor):
            return f"a tensor's rows are not contiguous, or not {GROUP} elements apart or a multiple of that"
    return None


def _rows_are_aligned(tensor: torch.Tensor) -> bool:
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tensor.stride(-1) == 1 and all(size == 1 or stride % GROUP == 0 for size, stride in outer)
