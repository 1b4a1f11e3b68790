# SPDX-License-Identifier: Apache-2.0
"""Transform matrices of Winograd's F(m, r) from their interpolation points, in float64, in one place.

An output tile of m values of a correlation with r taps is ``A^T ((G g) * (B^T d))`` with d the m + r - 1 inputs of
the tile (Lavin & Gray 2015, arXiv 1509.09308, after Toom and Cook). The m + r - 2 finite points and infinity fix
the matrices up to a scale of each component. The points decide how much rounding the components suffer: 0, +-1, +-2
need the smallest integers, but 0, +-0.65, +-1.55 lose less than half as much in half precision (the idea of
optimised points: arXiv 2512.18453). For white inputs and weights, the rounding of every component adds the same share
of error power, sum |B_i|^2 |G_i|^2 |A_i|^2; the points here minimise it.

Tiles have four rows, which fit the row bands of several GPUs, and four columns or three: with three, 30 components make
12 outputs (3.6 times fewer products than direct instead of 4), and rounding errors have 0.55 of the power.

Rows of B^T and G are scaled by powers of two to a norm near one, so that fp16 components have the range of the data
that they are made of, and columns of A^T by the inverse; powers of two change no rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 4
"""Rows of outputs of a tile."""

POINTS = {4: (0.0, 0.65, -0.65, 1.55, -1.55), 3: (0.38, -0.38, 1.28, -1.28)}
"""Outputs m of a tile along an axis -> finite interpolation points of F(m, 3)."""


@dataclass(frozen=True)
class Transforms:
    """F(m, r) in float64: ``input`` B^T [n, n], ``weight`` G [n, r], ``output`` A^T [m, n], with n = m + r - 1."""

    input: Tensor
    weight: Tensor
    output: Tensor


def transforms(points: tuple[float, ...], taps: int = 3, scaled: bool = True) -> Transforms:
    """Builds F(m, r) with m = len(points) + 2 - taps outputs per tile.

    Args:
        points: distinct finite points; infinity is always added.
        taps: r, the taps of the filter.
        scaled: scale components by powers of two (see the module's text).
    """
    if len(set(points)) != len(points):
        raise ValueError(f"interpolation points must be distinct, got {points}")
    outputs = len(points) + 2 - taps
    size = len(points) + 1
    b = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    g = torch.zeros(size, taps, dtype=torch.float64, device="cpu")
    a = torch.zeros(outputs, size, dtype=torch.float64, device="cpu")
    for j, point in enumerate(points):
        others = [p for p in points if p != point]
        b[j, : len(points)] = _vector(_monic(others))
        scale = math.prod(point - p for p in others)
        g[j] = _vector([point**k / scale for k in range(taps)])
        a[:, j] = _vector([point**k for k in range(outputs)])
    b[-1] = _vector(_monic(points))
    g[-1, -1] = 1.0
    a[-1, -1] = 1.0
    if scaled:
        input_scale, weight_scale = _power_of_two(b), _power_of_two(g)
        b, g, a = b / input_scale[:, None], g / weight_scale[:, None], a * (input_scale * weight_scale)
    return Transforms(b, g, a)


def tile_transforms(columns: int) -> tuple[Transforms, Transforms]:
    """Transforms along the rows' axis (four outputs) and the columns' axis of a tile."""
    return transforms(POINTS[TILE_ROWS]), transforms(POINTS[columns])


def components(columns: int) -> int:
    """How many components a tile of four rows and so many columns has."""
    return (TILE_ROWS + 2) * (columns + 2)


def columns(count: int) -> int:
    """The columns of a tile that has so many components."""
    return count // (TILE_ROWS + 2) - 2


def tiles(rows: int, cols: int, columns: int) -> tuple[int, int]:
    """How many tiles of four rows and so many columns cover an image: down and across."""
    return -(-rows // TILE_ROWS), -(-cols // columns)


def transform_weight(weight: Tensor, columns: int) -> Tensor:
    """[C_out, 3, 3, 3, C_in] -> [components, C_out, 3, C_in] in float64; temporal taps stay as they are.

    Args:
        weight: of a 3x3x3 conv, channels last.
        columns: of a tile, 3 or 4.
    """
    down, across = (matrices.weight.to(weight.device) for matrices in tile_transforms(columns))
    return torch.einsum("iy,jx,otyxc->ijotc", down, across, weight.double()).flatten(0, 1)


def _vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _monic(roots: tuple[float, ...] | list[float]) -> list[float]:
    """Coefficients of prod(x - root), lowest degree first."""
    coefficients = [1.0]
    for root in roots:
        shifted = [0.0, *coefficients]
        coefficients = [high - root * low for high, low in zip(shifted, [*coefficients, 0.0], strict=True)]
    return coefficients


def _power_of_two(matrix: Tensor) -> Tensor:
    """The power of two nearest (in the exponent) to each row's Euclidean norm."""
    return torch.exp2(torch.round(torch.log2(torch.linalg.vector_norm(matrix, dim=1))))
