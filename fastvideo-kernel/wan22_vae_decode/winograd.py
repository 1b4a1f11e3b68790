# SPDX-License-Identifier: Apache-2.0
"""Transform matrices of Winograd's F(m, r) from their interpolation points, in float64, in one place.

An output tile of m values of a correlation with r taps is ``A^T ((G g) * (B^T d))`` with d the m + r - 1 inputs of
the tile (Lavin & Gray 2015, arXiv 1509.09308, after Toom and Cook). The m + r - 2 finite points and infinity fix
the matrices up to a scale of each component. The points decide how much rounding the components suffer: 0, +-1, +-2
need the smallest integers, but 0, +-0.65, +-1.55 lose less than half as much in half precision (the idea of
optimised points: arXiv 2512.18453).

Rows of B^T and G are scaled by powers of two to a norm near one, so that fp16 components have the range of the data
that they are made of, and columns of A^T by the inverse; powers of two change no rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 4
"""Outputs of a tile along each axis."""

POINTS = (0.0, 0.65, -0.65, 1.55, -1.55)
"""The finite interpolation points of F(4, 3) that the decoder uses."""


@dataclass(frozen=True)
class Transforms:
    """F(m, r) in float64: ``input`` B^T [n, n], ``weight`` G [n, r], ``output`` A^T [m, n], with n = m + r - 1."""

    input: Tensor
    weight: Tensor
    output: Tensor


def transforms(points: tuple[float, ...] = POINTS, taps: int = 3, scaled: bool = True) -> Transforms:
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


def transform_weight(weight: Tensor, points: tuple[float, ...] = POINTS) -> Tensor:
    """[C_out, 3, 3, 3, C_in] -> [36, C_out, 3, C_in] in float64: G over rows and columns, temporal taps untouched."""
    g = transforms(points).weight.to(weight.device)
    components = torch.einsum("iy,jx,otyxc->ijotc", g, g, weight.double())
    return components.reshape(-1, *components.shape[2:])


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
