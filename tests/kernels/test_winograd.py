# SPDX-License-Identifier: Apache-2.0
"""The transforms are exact for any points, and the decoder's points lose the least in half precision."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from wan22_vae_decode import winograd

USUAL = (0.0, 1.0, -1.0, 2.0, -2.0)


def correlation(d, g):
    return torch.stack([(d[i : i + len(g)] * g).sum() for i in range(len(d) - len(g) + 1)])


def tile(matrices, d, g):
    return matrices.output @ ((matrices.weight @ g) * (matrices.input @ d))


@pytest.mark.parametrize(
    "points", [*winograd.POINTS.values(), USUAL, (0.0, 1.0, -1.0), (0.5, -0.5, 2.0, -2.0, 1.0, -1.0, 0.0)]
)
@pytest.mark.parametrize("scaled", [True, False])
def test_tile_is_a_correlation(points, scaled):
    matrices = winograd.transforms(points, scaled=scaled)
    d = torch.randn(len(points) + 1, dtype=torch.float64)
    g = torch.randn(3, dtype=torch.float64)
    assert torch.allclose(tile(matrices, d, g), correlation(d, g), rtol=0, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-12, 12), min_size=4, max_size=6, unique=True), st.integers(2, 4))
def test_any_distinct_points_do(grid, taps):
    points = tuple(0.25 * point for point in grid)
    matrices = winograd.transforms(points, taps)
    d = torch.linspace(-1, 1, len(points) + 1, dtype=torch.float64) ** 2 + 0.3
    g = torch.linspace(0.5, -1, taps, dtype=torch.float64)
    scale = matrices.output.abs() @ ((matrices.weight.abs() @ g.abs()) * (matrices.input.abs() @ d.abs()))
    assert ((tile(matrices, d, g) - correlation(d, g)).abs() <= 1e-12 * scale + 1e-12).all()


def test_equal_points_are_refused():
    with pytest.raises(ValueError, match="distinct"):
        winograd.transforms((0.0, 1.0, 1.0))


@pytest.mark.parametrize("points", winograd.POINTS.values())
def test_scales_are_powers_of_two_near_the_rows_norms(points):
    plain, scaled = winograd.transforms(points, scaled=False), winograd.transforms(points)
    ratios = [
        (plain.input / scaled.input).nanmean(dim=1),
        (plain.weight / scaled.weight).nanmean(dim=1),
        (scaled.output / plain.output).nanmean(dim=0),
    ]
    for ratio in ratios:
        assert torch.equal(torch.exp2(torch.log2(ratio).round()), ratio)
    assert torch.equal(ratios[0] * ratios[1], ratios[2])
    for matrix in (scaled.input, scaled.weight):
        norms = matrix.norm(dim=1)
        assert (norms >= 0.5**0.5).all()
        assert (norms <= 2**0.5).all()


@pytest.mark.parametrize("columns", winograd.POINTS)
def test_transformed_weight_convolves(columns):
    weight = torch.randn(5, 3, 3, 3, 7, dtype=torch.float64)
    down, across = winograd.tile_transforms(columns)
    components = winograd.transform_weight(weight, columns)
    assert len(components) == winograd.components(columns)
    assert winograd.columns(len(components)) == columns
    x = torch.randn(7, 3, 6, columns + 2, dtype=torch.float64)
    transformed = torch.einsum("im,jn,ctmn->ijtc", down.input, across.input, x)
    products = torch.einsum("ijotc,ijtc->ijo", components.unflatten(0, (6, -1)), transformed)
    y = torch.einsum("pi,qj,ijo->opq", down.output, across.output, products)
    expected = F.conv3d(x[None], weight.permute(0, 4, 1, 2, 3))[0, :, 0]
    assert torch.allclose(y, expected, rtol=0, atol=1e-11)


# The error study


def conv_error(dtype, points, points_across=None, channels=256, tiles=24):
    """Relative error of one 3x3x3 conv of SiLU'd normal inputs whose components are stored in ``dtype``.

    Across, the points are those of the rows unless given.

    Products and transforms are exact (float64), inputs and weights too before they are stored: what is left is the
    rounding of the transformed inputs, the transformed weights, the products and the result.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def stored(x):
        return x.to(dtype).double()

    down, across = winograd.transforms(points), winograd.transforms(points_across or points)
    x = stored(F.silu(draw(tiles, 3, len(down.input), len(across.input), channels)))
    weight = draw(32, 3, 3, 3, channels) / (27 * channels) ** 0.5
    exact = F.conv3d(x.permute(0, 4, 1, 2, 3), weight.permute(0, 4, 1, 2, 3))[:, :, 0]
    v = stored(torch.einsum("im,jn,btmnc->ijbtc", down.input, across.input, x))
    u = stored(torch.einsum("iy,jx,otyxc->ijotc", down.weight, across.weight, weight))
    m = stored(torch.einsum("ijbtc,ijotc->ijbo", v, u))
    y = stored(torch.einsum("pi,qj,ijbo->bopq", down.output, across.output, m))
    return ((y - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("points", "points_across", "bfloat16", "float16"),
    [
        (USUAL, None, 2.9e-2, 3.6e-3),
        (winograd.POINTS[4], None, 1.3e-2, 1.6e-3),
        (winograd.POINTS[4], winograd.POINTS[3], 9.6e-3, 1.2e-3),
        (winograd.POINTS[3], None, 7.2e-3, 9.0e-4),
        ((0.0, 1.0, -1.0), None, 4.8e-3, 6.0e-4),
    ],
    ids=["usual", "ours, 4x4", "ours, 4x3", "3x3", "F(2,3)"],
)
def test_errors_are_those_of_the_study(points, points_across, bfloat16, float16):
    assert conv_error(torch.bfloat16, points, points_across) == pytest.approx(bfloat16, rel=0.1)
    assert conv_error(torch.float16, points, points_across) == pytest.approx(float16, rel=0.1)


def test_our_points_are_twice_as_good_as_the_usual_ones():
    for dtype in (torch.float16, torch.bfloat16):
        assert conv_error(dtype, winograd.POINTS[4]) < 0.55 * conv_error(dtype, USUAL)


def test_three_columns_halve_the_error_power():
    four, three = (conv_error(torch.float16, winograd.POINTS[4], winograd.POINTS[m]) ** 2 for m in (4, 3))
    assert three < 0.6 * four
