# SPDX-License-Identifier: Apache-2.0
"""The transform matrices of `wan22_vae_decode.winograd` as a CUDA header, so that the numbers are written only once."""

from torch import Tensor

from wan22_vae_decode import winograd

NAME = "winograd_matrices.cuh"


def header() -> str:
    """C++ text: for m = 4 and 3 a namespace with B^T (`kInput`) and A^T (`kOutput`) of F(m, 3), rounded to float32 once
    and written exactly.
    """
    lines = ["#pragma once"]
    for outputs, points in winograd.POINTS.items():
        matrices = winograd.transforms(points)
        lines += [
            f"// F({outputs}, 3) with points " + ", ".join(f"{point:g}" for point in points) + " and infinity.",
            f"namespace wan::winograd::f{outputs} {{",
            _constant("kInput", matrices.input),
            _constant("kOutput", matrices.output),
            f"}}  // namespace wan::winograd::f{outputs}",
        ]
    return "\n".join([*lines, ""])


def _constant(name: str, matrix: Tensor) -> str:
    rows = matrix.float().double().tolist()
    values = ", ".join("{" + ", ".join(f"{value.hex()}f" for value in row) + "}" for row in rows)
    return f"constexpr float {name}[{len(rows)}][{len(rows[0])}] = {{{values}}};"
