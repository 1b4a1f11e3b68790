# SPDX-License-Identifier: Apache-2.0
"""RMS norm of every head of q and k, then the rotation by position, both tensors in one launch: the kernel of
`pan2_ops.qk_norm_rope`.

Reads and writes q and k, 4 x heads x head_dim x element size a token, and is bound by that traffic. A program takes all
heads of a token (or a block of them) in both tensors, so a token's cosines and sines, 4 x head_dim bytes, are read
once. Pairs (2i, 2i+1) lie in one thread: a head is read in 16-byte accesses and split in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastvideo.models.dits.pan2_fusions.launch import HeadLaunch, head_launch, strides_in_groups
from fastvideo.models.dits.pan2_fusions.tile import GROUP
from fastvideo.models.dits.pan2_ops import RotaryTable


@triton.jit
def norm_rope(x, weight, cos, sin, eps, BLOCK: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr):
    """RMS norm and rotation in fp32 of heads [BLOCK, DIM] by angles [1, DIM / 2]."""
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps) * weight
    if ROTATE:
        even, odd = tl.split(tl.reshape(normed, [BLOCK, DIM // 2, 2]))
        rotated = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        normed = tl.reshape(rotated, [BLOCK, DIM])
    return normed


@triton.jit(
    do_not_specialize=["tokens", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "cos_row", "sin_row"]
)
def qk_norm_rope_kernel(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    tokens,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    cos_row,
    sin_row,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    mask = heads < HEADS
    channels = tl.arange(0, DIM)[None, :]
    pairs = tl.arange(0, DIM // 2)[None, :]

    # All loads before the arithmetic, so that they are in flight together.
    q += (batch * q_batch + token * q_token) * GROUP
    k += (batch * k_batch + token * k_token) * GROUP
    q_tile = tl.load(q + heads * q_head * GROUP + channels, mask, other=0.0, eviction_policy="evict_first")
    k_tile = tl.load(k + heads * k_head * GROUP + channels, mask, other=0.0, eviction_policy="evict_first")
    q_gain = tl.load(q_weight + channels, eviction_policy="evict_last").to(tl.float32)
    k_gain = tl.load(k_weight + channels, eviction_policy="evict_last").to(tl.float32)
    cosines, sines = 1.0, 0.0
    if ROTATE:
        cosines = tl.load(cos + token * cos_row * GROUP + pairs).to(tl.float32)
        sines = tl.load(sin + token * sin_row * GROUP + pairs).to(tl.float32)

    out = ((batch * tokens + token) * HEADS + heads) * DIM + channels
    q_new = norm_rope(q_tile, q_gain, cosines, sines, eps, BLOCK, DIM, ROTATE)
    tl.store(q_out + out, q_new.to(q_out.dtype.element_ty), mask)
    k_new = norm_rope(k_tile, k_gain, cosines, sines, eps, BLOCK, DIM, ROTATE)
    tl.store(k_out + out, k_new.to(k_out.dtype.element_ty), mask)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rope: RotaryTable | None,
    launch: HeadLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on inputs that `eligibility.why_not_heads` accepts.

    Args:
        q, k: [B, tokens, heads, head_dim], separate tensors or views of a packed projection.
        q_weight, k_weight: [head_dim].
        eps: added to the mean square.
        rope: the rotation of these very tokens, or None for none.
        launch: how to cover the input; None for the measured choice.

    Returns:
        ``q`` and ``k`` in their own shape and type, contiguous, as attention reads them.
    """
    batch, tokens, heads, head_dim = q.shape
    launch = launch or head_launch(heads, head_dim)
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    # Without a rotation the kernel is compiled without the tables and takes any pointer.
    cos, sin = (q_weight, k_weight) if rope is None else rope
    if q_out.numel():
        with torch.cuda.device_of(q):
            qk_norm_rope_kernel[launch.grid(tokens, heads, batch)](
                q,
                k,
                q_weight,
                k_weight,
                cos,
                sin,
                q_out,
                k_out,
                tokens,
                *strides_in_groups(q),
                *strides_in_groups(k),
                0 if rope is None else strides_in_groups(cos)[0],
                0 if rope is None else strides_in_groups(sin)[0],
                eps,
                HEADS=heads,
                DIM=head_dim,
                BLOCK=launch.block,
                ROTATE=rope is not None,
                num_warps=launch.warps,
            )
    return q_out, k_out
