# SPDX-License-Identifier: Apache-2.0
"""``residual + gate * y``, and the modulated LayerNorm of that sum: the kernel of
`pan2_ops.gate_residual_norm_modulate`.

Reads residual and y and writes both results, 4 x width x element size a token, and is bound by that traffic. The norm
is taken of the sum as it was rounded, which is what the next block reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastvideo.models.dits.pan2_fusions.launch import RowLaunch, row_launch, strides_in_groups
from fastvideo.models.dits.pan2_fusions.tile import GROUP, layer_norm, load_rows, load_vector, tile_rows


@triton.jit(
    do_not_specialize=[
        "tokens",
        "residual_batch",
        "residual_row",
        "y_batch",
        "y_row",
        "gate_batch",
        "shift_batch",
        "scale_batch",
    ]
)
def gate_residual_norm_modulate_kernel(
    residual,
    y,
    gate,
    shift,
    scale,
    stream_out,
    normed_out,
    tokens,
    residual_batch,
    residual_row,
    y_batch,
    y_row,
    gate_batch,
    shift_batch,
    scale_batch,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    gate_factor = load_vector(gate, batch, gate_batch, columns, inside)
    offset = load_vector(shift, batch, shift_batch, columns, inside)
    factor = 1 + load_vector(scale, batch, scale_batch, columns, inside)
    residual += batch * residual_batch * GROUP
    y += batch * y_batch * GROUP
    stream_out += batch * tokens * WIDTH
    normed_out += batch * tokens * WIDTH
    rows = tile_rows(tl.program_id(0), ROWS)
    mask = (rows < tokens) & inside
    old = load_rows(residual, rows, residual_row, columns, mask)
    new = old + gate_factor * load_rows(y, rows, y_row, columns, mask)
    stream = new.to(stream_out.dtype.element_ty)
    normed = layer_norm(stream.to(tl.float32), inside, eps, WIDTH)
    tl.store(stream_out + rows * WIDTH + columns, stream, mask)
    tl.store(normed_out + rows * WIDTH + columns, (normed * factor + offset).to(normed_out.dtype.element_ty), mask)


def gate_residual_norm_modulate(
    residual: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    launch: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on inputs that `eligibility.why_not_streams` accepts.

    Args:
        residual, y: [B, tokens, width].
        gate, shift, scale: [B or 1, 1, width].
        eps: added to the variance.
        launch: how to cover the input; None for the measured choice.

    Returns:
        the new residual stream and its modulated norm, both [B, tokens, width], contiguous, in the type of
        ``residual``.
    """
    batch, tokens, width = residual.shape
    launch = launch or row_launch("gate_residual_norm_modulate", width)
    stream, normed = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    if stream.numel():
        with torch.cuda.device_of(residual):
            gate_residual_norm_modulate_kernel[launch.grid(tokens, batch)](
                residual,
                y,
                gate,
                shift,
                scale,
                stream,
                normed,
                tokens,
                *strides_in_groups(residual),
                *strides_in_groups(y),
                strides_in_groups(gate)[0],
                strides_in_groups(shift)[0],
                strides_in_groups(scale)[0],
                eps,
                WIDTH=width,
                BLOCK=launch.block,
                ROWS=launch.rows,
                num_warps=launch.warps,
            )
    return stream, normed
