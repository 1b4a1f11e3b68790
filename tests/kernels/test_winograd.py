# SPDX-License-Identifier: Apache-2.0
"""The transforms are exact for any points, and the decoder's points and rounding lose the least in half precision."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from wan22_vae_decode import weights, winograd
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.layers import UpsampleConv

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


# Joint rounding


def random_components(columns, channels=48):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(channels, 3, 3, 3, channels, generator=generator, dtype=torch.float64)
    return winograd.transform_weight(weight / (27 * channels) ** 0.5, columns)


def correlated(shape, rows, cols, correlation):
    """[*shape, rows, cols]: normal numbers, correlated along both axes by the power of their distance."""

    def root(size):
        places = torch.arange(size)
        values, vectors = torch.linalg.eigh(correlation ** (places[:, None] - places).abs().double())
        return vectors * values.clamp_min(0).sqrt()

    generator = torch.Generator().manual_seed(3)
    white = torch.randn(*shape, rows, cols, generator=generator, dtype=torch.float64)
    return torch.einsum("ij,kl,...jl->...ik", root(rows), root(cols), white)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("columns", "correlation", "share"),
    [
        (4, 0.0, 0.45),
        (4, 0.5, 0.37),
        (4, 0.9, 0.46),
        (4, 1.0, 0.65),
        (3, 0.0, 0.53),
        (3, 0.5, 0.44),
        (3, 0.9, 0.56),
        (3, 1.0, 0.74),
    ],
)
def test_jointly_rounded_weights_leave_this_share_of_the_error_power(columns, correlation, share, dtype):
    """Of a conv with nothing else rounded."""
    down, across = winograd.tile_transforms(columns)
    components = random_components(columns)
    x = correlated((96, 3, components.shape[-1]), 6, columns + 2, correlation)
    transformed = torch.einsum("im,jn,btcmn->ijbtc", down.input, across.input, x).flatten(0, 1)

    def error_power(rounded):
        products = torch.einsum("kotc,kbtc->kbo", rounded.double() - components, transformed).unflatten(0, (6, -1))
        return torch.einsum("pi,qj,ijbo->bopq", down.output, across.output, products).square().mean()

    joint, independent = winograd.round_weight(components, dtype), components.to(dtype)
    assert joint.dtype == dtype
    assert (error_power(joint) / error_power(independent)).item() == pytest.approx(share, rel=0.08)


@pytest.mark.parametrize("columns", winograd.POINTS)
def test_weights_rounded_for_white_inputs_would_be_worse_for_smooth_ones(columns, monkeypatch):
    """Why ``CORRELATION`` is not zero."""
    components = random_components(columns)
    form = torch.kron(*(winograd._error_power(axis, 0.99) for axis in winograd.tile_transforms(columns)))

    def error_power(rounded):
        error = (rounded.double() - components).flatten(1)
        return (form * (error @ error.T)).sum()

    ours, independent = (error_power(r) for r in (winograd.round_weight(components, torch.float16), components.half()))
    monkeypatch.setattr(winograd, "CORRELATION", 0.0)
    assert ours < 0.75 * independent < independent < error_power(winograd.round_weight(components, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", winograd.POINTS)
def test_jointly_rounded_weights_stay_near_the_exact_ones(columns, dtype):
    components = random_components(columns)
    errors = (winograd.round_weight(components, dtype).double() - components).flatten(1).norm(dim=1)
    assert (errors < 4 * torch.finfo(dtype).eps * components.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("columns", winograd.POINTS)
def test_wide_types_are_rounded_independently(columns):
    components = random_components(columns, channels=8)
    assert torch.equal(winograd.round_weight(components, torch.float64), components)
    assert torch.equal(winograd.round_weight(components, torch.float32), components.float())


@pytest.mark.parametrize("columns", winograd.POINTS)
def test_values_beyond_the_range_do_not_spread(columns):
    components = random_components(columns, channels=8)
    expected = winograd.round_weight(components, torch.float16)
    large = torch.finfo(torch.float16).max
    components[:, 1, 0, 2] *= 1e8
    components[5, 2, 1, 3] = float("nan")
    components[7, 3, 2, 4] = -float("inf")
    # In range, but not after it has taken up what others lost.
    components[:, 4, 1, 5] = large
    independent = components.half()
    rounded = winograd.round_weight(components, torch.float16)
    filters = [(1, 0, 2), (2, 1, 3), (3, 2, 4), (4, 1, 5)]
    for out, tap, channel in filters:
        assert torch.equal(
            rounded[:, out, tap, channel].nan_to_num(9.0), independent[:, out, tap, channel].nan_to_num(9.0)
        )
        rounded[:, out, tap, channel] = expected[:, out, tap, channel]
    assert torch.equal(rounded, expected)


# The error study


def conv_error(dtype, points, points_across=None, joint=False, channels=256, tiles=24):
    """Relative error of one 3x3x3 conv of SiLU'd normal inputs whose components are stored in ``dtype``.

    Across, the points are those of the rows unless given. Weights are rounded independently or as the decoder does.

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
    u = torch.einsum("iy,jx,otyxc->ijotc", down.weight, across.weight, weight)
    u = winograd.round_weight(u.flatten(0, 1), dtype).double().view_as(u) if joint else stored(u)
    m = stored(torch.einsum("ijbtc,ijotc->ijbo", v, u))
    y = stored(torch.einsum("pi,qj,ijbo->bopq", down.output, across.output, m))
    return ((y - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("points", "points_across", "joint", "bfloat16", "float16"),
    [
        (USUAL, None, False, 2.9e-2, 3.6e-3),
        (winograd.POINTS[4], None, False, 1.3e-2, 1.6e-3),
        (winograd.POINTS[4], None, True, 1.2e-2, 1.4e-3),
        (winograd.POINTS[4], winograd.POINTS[3], False, 9.6e-3, 1.2e-3),
        (winograd.POINTS[4], winograd.POINTS[3], True, 9.0e-3, 1.1e-3),
        (winograd.POINTS[3], None, False, 7.2e-3, 9.0e-4),
        ((0.0, 1.0, -1.0), None, False, 4.8e-3, 6.0e-4),
    ],
    ids=["usual", "ours, 4x4", "ours, 4x4, joint", "ours, 4x3", "ours, 4x3, joint", "3x3", "F(2,3)"],
)
def test_errors_are_those_of_the_study(points, points_across, joint, bfloat16, float16):
    assert conv_error(torch.bfloat16, points, points_across, joint) == pytest.approx(bfloat16, rel=0.1)
    assert conv_error(torch.float16, points, points_across, joint) == pytest.approx(float16, rel=0.1)


def test_our_points_are_twice_as_good_as_the_usual_ones():
    for dtype in (torch.float16, torch.bfloat16):
        assert conv_error(dtype, winograd.POINTS[4]) < 0.55 * conv_error(dtype, USUAL)


def test_three_columns_halve_the_error_power():
    four, three = (conv_error(torch.float16, winograd.POINTS[4], winograd.POINTS[m]) ** 2 for m in (4, 3))
    assert three < 0.6 * four


@pytest.mark.parametrize("columns", winograd.POINTS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.85), (torch.bfloat16, 0.9)])
def test_joint_rounding_lowers_the_error_power_of_a_whole_conv(columns, dtype, most):
    points = winograd.POINTS[4], winograd.POINTS[columns]
    assert conv_error(dtype, *points, joint=True) ** 2 < most * conv_error(dtype, *points) ** 2


@pytest.mark.parametrize(
    ("dtype", "phases", "tiles"), [(torch.float16, 2.9e-4, 6.3e-4), (torch.bfloat16, 2.4e-3, 5.1e-3)], ids=str
)
def test_errors_of_an_upsampling_conv(dtype, phases, tiles):
    generator = torch.Generator().manual_seed(0)
    channels = 128
    x = torch.randn(1, 1, 24, 24, channels, generator=generator).to(dtype)
    weight = torch.randn(channels, channels, 3, 3, generator=generator, dtype=torch.float64) / (9 * channels) ** 0.5
    direct, tiled = weights.upsample_phases(weight), weights.upsample_components(weight)

    def convolved(dtype, up):
        nothing = torch.zeros(1, 1, 24, 24, channels, dtype=dtype)
        return TorchBackend(torch.device("cpu"), dtype).upsample_conv2x(x.to(dtype), up, nothing, 0, None).double()

    bias = torch.zeros(channels)
    exact = convolved(torch.float64, UpsampleConv(direct, None, bias.double()))
    for up, error in (
        (UpsampleConv(direct.to(dtype), None, bias), phases),
        (UpsampleConv(None, tiled.to(dtype).contiguous(), bias), tiles),
    ):
        assert (convolved(dtype, up) - exact).norm() / exact.norm() == pytest.approx(error, rel=0.1)


def test_upsampling_components_do_not_exceed_their_inputs():
    assert (winograd.upsample_transforms().input.abs().sum(dim=1) == 1).all()


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("size", range(1, 8))
def test_upsampling_tiles_make_every_output(first, size):
    """And none of them is idle; a band has at most as many as the memory formula counts."""
    tiles = winograd.upsample_tiles(size, first)
    made = [{output for output in range(6 * k - 1, 6 * k + 5) if 0 <= output - 2 * first < 2 * size} for k in tiles]
    assert all(made)
    assert sum(map(len, made)) == len(set().union(*made)) == 2 * size
    assert len(tiles) <= winograd.upsample_tile_rows(size, band=True)
    assert max(len(winograd.upsample_tiles(size, row)) for row in range(3)) == winograd.upsample_tile_rows(size, True)
    assert len(winograd.upsample_tiles(size)) == winograd.upsample_tile_rows(size, band=False)
