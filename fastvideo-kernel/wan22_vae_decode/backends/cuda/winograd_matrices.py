# SPDX-License-Identifier: Apache-2.0
"""The transform matrices of `wan22_vae_decode.winograd` as a CUDA header, so that the numbers are written only once."""

from torch import Tensor

from wan22_vae_decode import winograd

NAME = "winograd_matrices.cuh"


def header() -> str:
    """C++ text with `kInput<i><j>` of B^T and `kOutput<i><j>` of A^T, rounded to float32 once and written exactly."""
    matrices = winograd.transforms()
    return "\n".join(
        [
            "// F(4, 3) with points " + ", ".join(f"{point:g}" for point in winograd.POINTS) + " and infinity.",
            "#pragma once",
            "namespace wan::winograd {",
            *_constants("kInput", matrices.input),
            *_constants("kOutput", matrices.output),
            "}  // namespace wan::winograd",
            "",
        ]
    )


def _constants(name: str, matrix: Tensor) -> list[str]:
    rows = matrix.float().double().tolist()
    return [
        f"constexpr float {name}{i}{j} = {value.hex()}f;" for i, row in enumerate(rows) for j, value in enumerate(row)
    ]
