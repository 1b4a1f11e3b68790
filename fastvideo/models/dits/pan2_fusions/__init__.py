# SPDX-License-Identifier: Apache-2.0
"""PAN2's elementwise groups as Triton kernels, one launch and one pass over memory each.

`set_fused_kernels` puts them into a model in place of the torch ops of `pan2_ops`, which stay their oracle and serve
every call that a kernel does not take. Importing this package does not import Triton.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from fastvideo.logger import init_logger
from fastvideo.models.dits.pan2_fusions.eligibility import INTERPRETED
from fastvideo.models.dits.pan2_fusions.ops import FUSED_OPS
from fastvideo.models.dits.pan2_ops import TORCH_OPS

if TYPE_CHECKING:
    from fastvideo.models.dits.pan2 import PAN2Transformer3DModel

logger = init_logger(__name__)

# The first architecture with bf16 arithmetic.
MINIMUM_CAPABILITY = (8, 0)

__all__ = ["FUSED_OPS", "set_fused_kernels", "why_unavailable"]


def why_unavailable() -> str | None:
    """Why this machine cannot run the kernels, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < MINIMUM_CAPABILITY:
        return f"the GPU is older than compute capability {'.'.join(map(str, MINIMUM_CAPABILITY))}"
    return None


def set_fused_kernels(model: PAN2Transformer3DModel, enabled: bool) -> bool:
    """Switch ``model``, and no other, to the fused kernels or back to the torch ops.

    Where the machine cannot run the kernels the torch ops stay, and one log line says why. May be called at any time;
    a compiled model compiles anew.

    Returns:
        whether the model now uses the kernels.
    """
    reason = why_unavailable() if enabled else "switched off"
    if enabled and reason is not None:
        logger.info("PAN2's fused kernels stay off: %s. The torch ops compute the same.", reason)
    model.set_ops(FUSED_OPS if reason is None else TORCH_OPS)
    return reason is None
