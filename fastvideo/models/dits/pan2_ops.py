# SPDX-License-Identifier: Apache-2.0
"""The four groups of elementwise work in PAN2's blocks, in plain torch.

Each group reads its inputs, computes in fp32 and rounds once to the inputs' type, so it is at the same time the
portable path and the oracle of a fused kernel. A model holds one `PAN2Ops` table and calls the groups through it;
another table replaces them for that model only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F


class RotaryTable(NamedTuple):
    """Rotation of each video token: ``cos`` and ``sin`` [tokens, head_dim / 2], fp32, angle i for pair (2i, 2i+1)."""

    cos: torch.Tensor
    sin: torch.Tensor


def norm_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm without affine, then ``* (1 + scale) + shift``.

    Args:
        x: [B, tokens, width].
        shift, scale: [B or 1, 1, width].
        eps: added to the variance.

    Returns:
        [B, tokens, width] in the type of ``x``.
    """
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return torch.addcmul(shift.float(), normed, 1 + scale.float()).to(x.dtype)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rope: RotaryTable | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of every head of ``q`` and ``k``, then the rotation by position.

    Args:
        q, k: [B, tokens, heads, head_dim].
        q_weight, k_weight: [head_dim], the norms' gains.
        eps: added to the mean square.
        rope: the tokens' rotation, or None for text, which has no position.

    Returns:
        ``q`` and ``k`` in their own shape and type.
    """
    return _norm_rope(q, q_weight, eps, rope), _norm_rope(k, k_weight, eps, rope)


def _norm_rope(x: torch.Tensor, weight: torch.Tensor, eps: float, rope: RotaryTable | None) -> torch.Tensor:
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    if rope is None:
        return normed.to(x.dtype)
    # [tokens, 1, head_dim / 2]: one angle for all heads.
    cos, sin = rope.cos.unsqueeze(-2), rope.sin.unsqueeze(-2)
    even, odd = normed.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def gate_residual(residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``residual + gate * y`` for ``residual`` and ``y`` [B, tokens, width] and ``gate`` [B or 1, 1, width]."""
    return torch.addcmul(residual.float(), y.float(), gate.float()).to(residual.dtype)


def gate_residual_norm_modulate(
    residual: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_residual`, then `norm_modulate` of the sum as it was rounded.

    Returns:
        the new residual stream and its modulated norm, both [B, tokens, width].
    """
    stream = gate_residual(residual, y, gate)
    return stream, norm_modulate(stream, shift, scale, eps)


@dataclass(frozen=True)
class PAN2Ops:
    """Which implementation of each group a model calls; the defaults are this module's."""

    norm_modulate: Callable[..., torch.Tensor] = norm_modulate
    qk_norm_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]] = qk_norm_rope
    gate_residual: Callable[..., torch.Tensor] = gate_residual
    gate_residual_norm_modulate: Callable[..., tuple[torch.Tensor, torch.Tensor]] = gate_residual_norm_modulate


TORCH_OPS = PAN2Ops()
