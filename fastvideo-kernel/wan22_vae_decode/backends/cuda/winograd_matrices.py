# SPDX-License-Identifier: Apache-2.0
"""The transform matrices of `wan22_vae_decode.winograd` as a CUDA header, so that the numbers are written only once."""

from torch import Tensor

from wan22_vae_decode import winograd

NAME = "winograd_matrices.cuh"


def header() -> str:
    """C++ text: for F(m, 3), m = 4 and 3, and for the upsampling convs' F(3, 2) a namespace with B^T (`kInput`) and A^T
    (`kOutput`), rounded to float32 once and written exactly.
    """
    lines = ["#pragma once"]
    for outputs, points in winograd.POINTS.items():
        lines += _namespace(f"wan::winograd::f{outputs}", f"F({outputs}, 3)", points, winograd.transforms(points))
    lines += _namespace("wan::upsample", "F(3, 2)", winograd.UPSAMPLE_POINTS, winograd.upsample_transforms())
    return "\n".join([*lines, ""])


def _namespace(name: str, form: str, points: tuple[float, ...], matrices: winograd.Transforms) -> list[str]:
    return [
        f"// {form} with points " + ", ".join(f"{point:g}" for point in points) + " and infinity.",
        f"namespace {name} {{",
        _constant("kInput", matrices.input),
        _constant("kOutput", matrices.output),
        f"}}  // namespace {name}",
    ]


def _constant(name: str, matrix: Tensor) -> str:
    rows = matrix.float().double().tolist()
    values = ", ".join("{" + ", ".join(f"{value.hex()}f" for value in row) + "}" for row in rows)
    return f"constexpr float {name}[{len(rows)}][{len(rows[0])}] = {{{values}}};"
