# SPDX-License-Identifier: Apache-2.0
"""The fused kernels as `PAN2Ops`: custom operators, opaque to torch.compile, behind a check of every call.

The operators have no backward. Calls that record gradients, like all others that a kernel does not take, go to the
torch op of the same name.
"""

from __future__ import annotations

from functools import cache

import torch
from fastvideo.logger import init_logger
from fastvideo.models.dits import pan2_ops
from fastvideo.models.dits.pan2_fusions.eligibility import why_not_heads, why_not_streams
from fastvideo.models.dits.pan2_ops import PAN2Ops, RotaryTable

logger = init_logger(__name__)


@torch.library.custom_op("fastvideo_pan2::norm_modulate", mutates_args=())
def _norm_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    from fastvideo.models.dits.pan2_fusions import norm_modulate

    return norm_modulate.norm_modulate(x, shift, scale, eps)


@_norm_modulate.register_fake
def _(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return _like(x)


@torch.library.custom_op("fastvideo_pan2::qk_norm_rope", mutates_args=())
def _qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from fastvideo.models.dits.pan2_fusions import qk_norm_rope

    rope = None if cos is None or sin is None else RotaryTable(cos, sin)
    return qk_norm_rope.qk_norm_rope(q, k, q_weight, k_weight, eps, rope)


@_qk_norm_rope.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q), _like(k)


@torch.library.custom_op("fastvideo_pan2::gate_residual", mutates_args=())
def _gate_residual(residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    from fastvideo.models.dits.pan2_fusions import gate_residual

    return gate_residual.gate_residual(residual, y, gate)


@_gate_residual.register_fake
def _(residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return _like(residual)


@torch.library.custom_op("fastvideo_pan2::gate_residual_norm_modulate", mutates_args=())
def _gate_residual_norm_modulate(
    residual: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from fastvideo.models.dits.pan2_fusions import gate_residual_norm_modulate

    return gate_residual_norm_modulate.gate_residual_norm_modulate(residual, y, gate, shift, scale, eps)


@_gate_residual_norm_modulate.register_fake
def _(
    residual: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(residual), _like(residual)


def norm_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """`pan2_ops.norm_modulate`, by its kernel where that can."""
    if _kernel_takes("norm_modulate", why_not_streams((x,), (shift, scale))):
        return _norm_modulate(x, shift, scale, eps)
    return pan2_ops.norm_modulate(x, shift, scale, eps)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rope: RotaryTable | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pan2_ops.qk_norm_rope`, by its kernel where that can."""
    if _kernel_takes("qk_norm_rope", why_not_heads(q, k, q_weight, k_weight, rope)):
        cos, sin = (None, None) if rope is None else rope
        return _qk_norm_rope(q, k, q_weight, k_weight, eps, cos, sin)
    return pan2_ops.qk_norm_rope(q, k, q_weight, k_weight, eps, rope)


def gate_residual(residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`pan2_ops.gate_residual`, by its kernel where that can."""
    if _kernel_takes("gate_residual", why_not_streams((residual, y), (gate,))):
        return _gate_residual(residual, y, gate)
    return pan2_ops.gate_residual(residual, y, gate)


def gate_residual_norm_modulate(
    residual: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pan2_ops.gate_residual_norm_modulate`, by its kernel where that can."""
    if _kernel_takes("gate_residual_norm_modulate", why_not_streams((residual, y), (gate, shift, scale))):
        return _gate_residual_norm_modulate(residual, y, gate, shift, scale, eps)
    return pan2_ops.gate_residual_norm_modulate(residual, y, gate, shift, scale, eps)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _kernel_takes(name: str, reason: str | None) -> bool:
    if reason is not None and not torch.compiler.is_compiling():
        _say_once(name, reason)
    return reason is None


@cache
def _say_once(name: str, reason: str) -> None:
    logger.info("PAN2's %s runs as a torch op where %s.", name, reason)


FUSED_OPS = PAN2Ops(norm_modulate, qk_norm_rope, gate_residual, gate_residual_norm_modulate)
