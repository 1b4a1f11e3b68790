# SPDX-License-Identifier: Apache-2.0
"""``residual + gate * y``: the kernel of `pan2_ops.gate_residual`.

Reads residual and y and writes the sum, 3 x width x element size a token, and is bound by that traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastvideo.models.dits.pan2_fusions.launch import RowLaunch, row_launch, strides_in_groups
from fastvideo.models.dits.pan2_fusions.tile import GROUP, load_rows, load_vector, tile_rows


@triton.jit(do_not_specialize=["tokens", "residual_batch", "residual_row", "y_batch", "y_row", "gate_batch"])
def gate_residual_kernel(
    residual,
    y,
    gate,
    out,
    tokens,
    residual_batch,
    residual_row,
    y_batch,
    y_row,
    gate_batch,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    factor = load_vector(gate, batch, gate_batch, columns, inside)
    residual += batch * residual_batch * GROUP
    y += batch * y_batch * GROUP
    out += batch * tokens * WIDTH
    rows = tile_rows(tl.program_id(0), ROWS)
    mask = (rows < tokens) & inside
    old = load_rows(residual, rows, residual_row, columns, mask)
    new = old + factor * load_rows(y, rows, y_row, columns, mask)
    tl.store(out + rows * WIDTH + columns, new.to(out.dtype.element_ty), mask)


def gate_residual(
    residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, launch: RowLaunch | None = None
) -> torch.Tensor:
    """Launch the kernel on inputs that `eligibility.why_not_streams` accepts.

    Args:
        residual, y: [B, tokens, width].
        gate: [B or 1, 1, width].
        launch: how to cover the input; None for the measured choice.

    Returns:
        [B, tokens, width], contiguous, in the type of ``residual``.
    """
    batch, tokens, width = residual.shape
    launch = launch or row_launch("gate_residual", width)
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    if out.numel():
        with torch.cuda.device_of(residual):
            gate_residual_kernel[launch.grid(tokens, batch)](
                residual,
                y,
                gate,
                out,
                tokens,
                *strides_in_groups(residual),
                *strides_in_groups(y),
                strides_in_groups(gate)[0],
                WIDTH=width,
                BLOCK=launch.block,
                ROWS=launch.rows,
                num_warps=launch.warps,
            )
    return out
