# SPDX-License-Identifier: Apache-2.0
"""The elementwise groups of PAN2's blocks against float64 formulas: types, odd sizes, strided inputs, batches."""

import pytest
import torch
from fastvideo.models.dits.pan2_ops import (
    RotaryTable,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
    qk_norm_rope,
)

EPS = 1e-6
# One rounding to nearest.
ROUNDING = {torch.float32: 4e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# What fp32 leaves where large terms cancel, or moves across a rounding boundary.
CANCELLATION = 4e-6


@pytest.fixture(params=list(ROUNDING), ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=[(1, 1, 8), (2, 7, 24), (3, 33, 40)], ids=str)
def shape(request) -> tuple[int, int, int]:
    return request.param


def streams(shape: tuple[int, int, int], dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Strided views: every second token of a wider tensor, with an offset that a norm has to remove."""
    batch, tokens, width = shape
    return [(torch.randn(batch, 2 * tokens, width + 8) + 3).to(dtype)[:, ::2, 4:-4] for _ in range(count)]


def vectors(shape: tuple[int, int, int], dtype: torch.dtype, count: int, shared: bool) -> list[torch.Tensor]:
    """[B or 1, 1, width] each, cut from one tensor as a modulation's linear gives them."""
    batch, _, width = shape
    return list(torch.randn(1 if shared else batch, count, 1, width).to(dtype).unbind(1))


def assert_rounded_once(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=CANCELLATION)


def exact_norm_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x = x.double()
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    return (x - mean) / (variance + EPS).sqrt() * (1 + scale.double()) + shift.double()


@pytest.mark.parametrize("shared", [False, True])
def test_norm_modulate(shape, dtype, shared):
    (x,) = streams(shape, dtype, 1)
    shift, scale = vectors(shape, dtype, 2, shared)
    assert_rounded_once(norm_modulate(x, shift, scale, EPS), exact_norm_modulate(x, shift, scale), dtype)


@pytest.mark.parametrize("shared", [False, True])
def test_gate_residual(shape, dtype, shared):
    residual, y = streams(shape, dtype, 2)
    (gate,) = vectors(shape, dtype, 1, shared)
    expected = residual.double() + gate.double() * y.double()
    assert_rounded_once(gate_residual(residual, y, gate), expected, dtype)


@pytest.mark.parametrize("shared", [False, True])
def test_gate_residual_norm_modulate(shape, dtype, shared):
    residual, y = streams(shape, dtype, 2)
    gate, shift, scale = vectors(shape, dtype, 3, shared)
    stream, normed = gate_residual_norm_modulate(residual, y, gate, shift, scale, EPS)
    assert_rounded_once(stream, residual.double() + gate.double() * y.double(), dtype)
    # Of the stream as the next block will read it.
    assert_rounded_once(normed, exact_norm_modulate(stream, shift, scale), dtype)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("head_dim", [6, 64])
def test_qk_norm_rope(dtype, head_dim, rotated):
    batch, tokens, heads = 2, 5, 3
    # A packed projection: q and k are strided views of it.
    q, k, _ = torch.randn(batch, tokens, 3, heads, head_dim).to(dtype).unbind(2)
    q_weight, k_weight = (torch.rand(2, head_dim) + 0.5).to(dtype)
    angle = torch.randn(tokens, head_dim // 2)
    rope = RotaryTable(angle.cos(), angle.sin()) if rotated else None
    for actual, x, weight in zip(
        qk_norm_rope(q, k, q_weight, k_weight, EPS, rope), (q, k), (q_weight, k_weight), strict=True
    ):
        x = x.double()
        expected = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        if rotated:
            turn = torch.complex(angle.cos().double(), angle.sin().double())[:, None]
            pairs = torch.complex(expected[..., 0::2], expected[..., 1::2]) * turn
            expected = torch.view_as_real(pairs).flatten(-2)
        assert_rounded_once(actual, expected, dtype)


def test_large_values_do_not_overflow_the_statistics():
    x = torch.full((1, 1, 64), 3e4, dtype=torch.float16)
    x[..., ::2] = -3e4
    weight = torch.ones(64, dtype=torch.float16)
    zero = torch.zeros(1, 1, 64, dtype=torch.float16)
    torch.testing.assert_close(norm_modulate(x, zero, zero, EPS), x / 3e4)
    q = x.unflatten(-1, (1, 64))
    torch.testing.assert_close(qk_norm_rope(q, q, weight, weight, EPS, None)[0], q / 3e4)
