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

Transformed weights are rounded jointly (``round_weight``): the components of a 3x3 filter have nine degrees of freedom
and enter 16 or 12 outputs, so that the rounding error of one can be cancelled by others.

Nearest x2 upsampling and a 3x3 conv are, at the low resolution, a 2x2 conv for each of four output phases. They all run
as F(3x3, 2x2) on the same components of the input (``upsample_transforms``): 64 products for 36 outputs, where the
convs need 144.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 4
"""Rows of outputs of a tile."""

POINTS = {4: (0.0, 0.65, -0.65, 1.55, -1.55), 3: (0.38, -0.38, 1.28, -1.28)}
"""Outputs m of a tile along an axis -> finite interpolation points of F(m, 3)."""

UPSAMPLE_POINTS = (0.0, 1.0, -1.0)
"""Finite interpolation points of F(3, 2)."""

UPSAMPLE_TILE = 3
"""Rows and columns of outputs of a tile of F(3x3, 2x2)."""

UPSAMPLE_COMPONENTS = (UPSAMPLE_TILE + 1) ** 2

CORRELATION = 0.5
"""Of neighbouring pixels, for which weights are rounded. Rounded for white inputs, they would be worse than
independently rounded ones where inputs are smooth; rounded for this, they are better for white and constant inputs.
"""


_PART_CHANNELS = 128
"""Output channels of a conv whose weights are transformed at a time."""


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


def upsample_transforms() -> Transforms:
    """F(3, 2), whose transforms of inputs and outputs are additions.

    Rows of B^T have an absolute sum of one, so that no component exceeds its inputs: these are not normalised. G makes
    up for it.
    """
    plain = transforms(UPSAMPLE_POINTS, taps=2, scaled=False)
    return Transforms(plain.input / 2, plain.weight * 2, plain.output)


def upsample_tiles(size: int, first: int = 0) -> range:
    """The tiles along an axis that make the outputs of the source pixels ``first`` to ``first + size``.

    Tile k reads the source pixels 3k - 1 to 3k + 2 and gives even outputs of the pixels 3k to 3k + 2 and odd outputs of
    the pixels 3k - 1 to 3k + 1, that is the outputs 6k - 1 to 6k + 4 of the doubled axis.
    """
    return range(first // UPSAMPLE_TILE, (first + size) // UPSAMPLE_TILE + 1)


def upsample_tile_rows(rows: int, band: bool) -> int:
    """How many rows of tiles make the outputs of ``rows`` source rows: of an image, or at most of a band of one."""
    return (rows + UPSAMPLE_TILE - 1 if band else rows) // UPSAMPLE_TILE + 1


def transform_weight(weight: Tensor, columns: int) -> Tensor:
    """[C_out, 3, 3, 3, C_in] -> [components, C_out, 3, C_in] in float64; temporal taps stay as they are.

    Args:
        weight: of a 3x3x3 conv, channels last.
        columns: of a tile, 3 or 4.
    """
    down, across = (matrices.weight.to(weight.device) for matrices in tile_transforms(columns))
    return torch.einsum("iy,jx,otyxc->ijotc", down, across, weight.double()).flatten(0, 1)


def prepare_weight(weight: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """``transform_weight``, then ``round_weight``: [C_out, 3, 3, 3, C_in] -> [components, C_out, 3, C_in] in ``dtype``.

    In parts, because the float64 components are sixteen times the weights of a half-precision decoder.
    """
    parts = weight.split(_PART_CHANNELS)
    return torch.cat([round_weight(transform_weight(part, columns), dtype) for part in parts], dim=1)


def round_weight(components: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds the transformed weights of a conv so that the errors of a filter's components cancel in its outputs.

    Components are rounded one by one, and each takes up the errors of those before it as far as it can: Babai's nearest
    plane, or optimal brain quantisation in a fixed order (Frantar and Alistarh 2022, arXiv 2208.11580; GPTQ, arXiv
    2210.17323). There the errors' quadratic form is measured; here it follows from the transforms and from inputs whose
    pixels are correlated by ``CORRELATION`` to the power of their distance along each axis. Of the error power of
    independent rounding 0.45 remains for white inputs and 0.65 for constant ones (three columns: 0.53 and 0.74).

    Args:
        components: [components, C_out, 3, C_in] in float64, from ``transform_weight``.
        dtype: of the result. Types of more than 16 bits are rounded independently.

    Returns:
        [components, C_out, 3, C_in], contiguous. A filter that would get a component which is not finite is rounded
        independently instead: a value beyond the type's range becomes infinite and does not spread.
    """
    components = components.contiguous()
    if dtype.itemsize > 2:
        return components.to(dtype)
    order, rows = _rounding(columns(len(components)), CORRELATION)
    shares = components.new_tensor(rows)[..., None, None, None]
    targets = components[list(order)]
    result = torch.empty_like(components, dtype=dtype)
    for place, index in enumerate(order):
        result[index] = targets[place]
        error = result[index] - components[index]
        # Elementwise, so that every device sums in the same order.
        targets[place + 1 :].addcmul_(shares[place, place + 1 :], error, value=-1)
    finite = torch.isfinite(result).all(dim=0)
    return result if finite.all() else torch.where(finite, result, components.to(dtype))


@functools.cache
def _rounding(columns: int, correlation: float) -> tuple[tuple[int, ...], list[list[float]]]:
    """The order in which components are rounded, and [from, to], by places in it, what share of a component's error a
    later one takes up.

    Found from the last to the first: each time the errors' quadratic form is minimised over one component, which leaves
    a form of the others and the power that this component's own rounding adds. It is the component that adds least,
    with errors in proportion to the norm of its row of G.
    """
    down, across = tile_transforms(columns)
    form = torch.kron(_error_power(down, correlation), _error_power(across, correlation))
    scale = torch.kron(*(torch.linalg.vector_norm(axis.weight, dim=1) for axis in (down, across)))
    shares = torch.zeros_like(form)
    order: list[int] = []
    for _ in range(len(form)):
        powers = form.diagonal() * scale**2
        powers[order] = math.inf
        # Symmetric points have equal powers: then the first, whatever the last bits.
        last = int((powers <= powers.min() * (1 + 1e-9)).nonzero()[0])
        shares[:, last] = form[last] / form[last, last]
        form -= torch.outer(form[last], shares[:, last])
        form[last], form[:, last] = 0.0, 0.0
        order.append(last)
    order.reverse()
    return tuple(order), shares[order][:, order].tolist()


def _error_power(axis: Transforms, correlation: float) -> Tensor:
    """[n, n]: the quadratic form that gives the mean power in the outputs of errors of the weights' components along an
    axis, for inputs of unit power.
    """
    pixels = torch.arange(len(axis.input), dtype=torch.float64, device="cpu")
    covariance = correlation ** (pixels[:, None] - pixels).abs()
    return (axis.output.T @ axis.output) * (axis.input @ covariance @ axis.input.T)


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
