# SPDX-License-Identifier: Apache-2.0
"""LayerNorm without affine, then ``* (1 + scale) + shift``: the kernel of `pan2_ops.norm_modulate`.

Reads x and writes the result, 2 x width x element size a token, and is bound by that traffic: a row stays in registers
from its one read to its one write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastvideo.models.dits.pan2_fusions.launch import RowLaunch, row_launch, strides_in_groups
from fastvideo.models.dits.pan2_fusions.tile import GROUP, layer_norm, load_rows, load_vector, tile_rows


@triton.jit(do_not_specialize=["tokens", "x_batch", "x_row", "shift_batch", "scale_batch"])
def norm_modulate_kernel(
    x,
    shift,
    scale,
    out,
    tokens,
    x_batch,
    x_row,
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
    offset = load_vector(shift, batch, shift_batch, columns, inside)
    factor = 1 + load_vector(scale, batch, scale_batch, columns, inside)
    x += batch * x_batch * GROUP
    out += batch * tokens * WIDTH
    rows = tile_rows(tl.program_id(0), ROWS)
    mask = (rows < tokens) & inside
    normed = layer_norm(load_rows(x, rows, x_row, columns, mask), inside, eps, WIDTH)
    tl.store(out + rows * WIDTH + columns, (normed * factor + offset).to(out.dtype.element_ty), mask)


def norm_modulate(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float, launch: RowLaunch | None = None
) -> torch.Tensor:
    """Launch the kernel on inputs that `eligibility.why_not_streams` accepts.

    Args:
        x: [B, tokens, width].
        shift, scale: [B or 1, 1, width].
        eps: added to the variance.
        launch: how to cover the input; None for the measured choice.

    Returns:
        [B, tokens, width], contiguous, in the type of ``x``.
    """
    batch, tokens, width = x.shape
    launch = launch or row_launch("norm_modulate", width)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        with torch.cuda.device_of(x):
            norm_modulate_kernel[launch.grid(tokens, batch)](
                x,
                shift,
                scale,
                out,
                tokens,
                *strides_in_groups(x),
                strides_in_groups(shift)[0],
                strides_in_groups(scale)[0],
                eps,
                WIDTH=width,
                BLOCK=launch.block,
                ROWS=launch.rows,
                num_warps=launch.warps,
            )
    return out
