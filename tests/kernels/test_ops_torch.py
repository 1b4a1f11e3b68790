# SPDX-License-Identifier: Apache-2.0
"""Each reference op against its definition in channels-first float64, written out independently."""

import pytest
import torch
import torch.nn.functional as F

from wan22_vae_decode import layers, weights, winograd
from wan22_vae_decode.backends.base import Halo
from wan22_vae_decode.backends.torch import TorchBackend

CPU = torch.device("cpu")
# Batch, frames, rows, columns: one pixel, odd sizes, several tiles.
SIZES = [(1, 1, 1, 1), (2, 3, 5, 4), (1, 2, 9, 7)]


@pytest.fixture
def ops():
    return TorchBackend(CPU, torch.float64)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def poisoned(*shape, dtype=torch.float64):
    return torch.full(shape, float("nan"), dtype=dtype)


def first(x):
    """Channels last to channels first."""
    return x.movedim(-1, 1)


def norm_silu(x, norm):
    return F.silu(F.normalize(x, dim=-1, eps=1e-12) * norm)


def close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12)


def causal(x, history):
    """x behind its history, or behind two frames of zeros."""
    return torch.cat([torch.zeros_like(x[:, :1]).expand(-1, 2, -1, -1, -1) if history is None else history, x], dim=1)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_norm_silu_pad(size, later, ops):
    x, norm = draw(*size, 6), draw(6)
    x[0, 0, 0, 0] = 0
    history = draw(size[0], 2, *size[2:], 6) if later else None
    padded, kept = ops.norm_silu_pad(x, norm, history, None, None)
    expected = causal(norm_silu(x, norm), history)
    assert close(padded.tensor, expected)
    assert (padded.tensor[0, 2, 0, 0] == 0).all(), "a zero vector stays zero"
    assert close(kept, expected[:, -2:])
    assert kept.untyped_storage().data_ptr() != padded.tensor.untyped_storage().data_ptr()


def test_norm_silu_pad_with_halo(ops):
    x, norm, above, below = draw(2, 3, 4, 5, 6), draw(6), draw(2, 3, 1, 5, 6), torch.zeros(2, 3, 1, 5, 6).double()
    history = draw(2, 2, 6, 5, 6)
    padded, kept = ops.norm_silu_pad(x, norm, history, Halo(above, below), None)
    expected = causal(norm_silu(torch.cat([above, x, below], dim=2), norm), history)
    assert close(padded.tensor, expected)
    assert close(kept, expected[:, -2:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_statistics_are_in_float32(dtype):
    """Squares of these values overflow or lose everything in half precision."""
    ops = TorchBackend(CPU, dtype)
    for scale in (300.0, 1e-4):
        x = (scale * draw(1, 1, 2, 2, 512)).to(dtype)
        padded, _ = ops.norm_silu_pad(x, torch.full((512,), 512**0.5), None, None, None)
        expected = norm_silu(x.double(), torch.full((512,), 512**0.5, dtype=torch.float64))
        assert (padded.tensor[:, 2:].double() - expected).abs().max() < 8 * torch.finfo(dtype).eps


def test_infinity_does_not_survive_a_norm_unseen():
    ops = TorchBackend(CPU, torch.float16)
    x = torch.ones(1, 1, 1, 2, 8, dtype=torch.float16)
    x[..., 0, 3] = float("inf")
    padded, _ = ops.norm_silu_pad(x, torch.ones(8), None, None, None)
    assert torch.isnan(padded.tensor[0, 2, 0, 0, 3])


@pytest.mark.parametrize("halo", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [None, layers.WinogradForm(3), layers.WinogradForm(4, float_products=True)])
def test_causal_conv3d(form, size, later, halo, ops):
    batch, frames, rows, cols = size
    x, weight, bias = draw(*size, 6), draw(5, 3, 3, 3, 6), draw(5)
    history = draw(batch, 2, rows + 2 * halo, cols, 6) if later else None
    neighbours = Halo(draw(batch, frames, 1, cols, 6), draw(batch, frames, 1, cols, 6)) if halo else None
    whole = x if neighbours is None else torch.cat([neighbours.above, x, neighbours.below], dim=2)
    expected = F.conv3d(first(causal(whole, history)), first(weight), bias, padding=(0, 0 if halo else 1, 1)).movedim(
        1, -1
    )
    if form is None:
        conv, op = layers.Conv(weight, bias), ops.causal_conv3d
    else:
        components = winograd.transform_weight(weight, form.columns)
        conv, op = layers.WinogradConv(components, bias, form), ops.winograd_conv3d
    padded, _ = ops.causal_pad(x, history, neighbours, conv)
    y = op(padded, conv)
    assert y.is_contiguous()
    assert torch.allclose(y, expected, rtol=0, atol=1e-10)
    residual = draw(*y.shape)
    assert torch.allclose(op(padded, conv, residual), expected + residual, rtol=0, atol=1e-10)
    out = poisoned(*y.shape)
    assert op(padded, conv, residual, out).data_ptr() == out.data_ptr()
    assert torch.allclose(out, expected + residual, rtol=0, atol=1e-10)
    in_place = residual.clone()
    op(padded, conv, in_place, in_place)
    assert torch.equal(in_place, out)


@pytest.mark.parametrize("bias", [False, True])
def test_pointwise_conv(bias, ops):
    x, conv = draw(2, 3, 4, 5, 6), layers.Pointwise(draw(7, 6), draw(7) if bias else None)
    expected = F.conv3d(first(x), conv.weight[:, :, None, None, None], conv.bias).movedim(1, -1)
    assert close(ops.pointwise_conv(x, conv), expected)


@pytest.mark.parametrize("size", SIZES)
def test_attention(size, ops):
    c = 6
    x = draw(*size, c)
    w = layers.Attention(draw(c), layers.Pointwise(draw(3 * c, c), draw(3 * c)), layers.Pointwise(draw(c, c), draw(c)))
    flag = ops.nonfinite_flag()
    y = ops.attention(x, w, flag)
    expected = x.clone()
    for item in range(size[0]):
        for frame in range(size[1]):
            pixels = F.normalize(x[item, frame].reshape(-1, c), dim=-1) * w.norm
            q, k, v = (pixels @ w.qkv.weight.T + w.qkv.bias).split(c, dim=-1)
            mixed = torch.softmax(q @ k.T / c**0.5, dim=-1) @ v
            expected[item, frame] += (mixed @ w.proj.weight.T + w.proj.bias).view(*size[2:], c)
    assert close(y, expected)
    assert flag.item() == 0


def test_attention_flags_what_softmax_hides(ops):
    """A key of minus infinity has weight zero: the result is finite, the flag is not."""
    c = 4
    qkv = torch.zeros(3 * c, c).double()
    bias = torch.zeros(3 * c).double()
    bias[0], bias[c] = 1, -float("inf")
    w = layers.Attention(torch.ones(c).double(), layers.Pointwise(qkv, bias), layers.Pointwise(qkv[:c], bias[2 * c :]))
    flag = ops.nonfinite_flag()
    ops.attention(draw(1, 1, 2, 2, c), w, flag)
    assert flag.item() == 1


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_time_double(size, later, ops):
    batch, frames, rows, cols = size
    x, conv = draw(*size, 6), layers.Conv(draw(12, 3, 1, 1, 6), draw(12))
    history = draw(batch, 2, rows, cols, 6) if later else None
    padded, kept = ops.causal_pad(x, history, None, conv)
    video = poisoned(batch, 2 * frames + 1, rows, cols, 6)
    ops.time_double(padded, conv, video[:, 1:])
    y = F.conv3d(first(causal(x, history)), first(conv.weight), conv.bias).movedim(1, -1)
    for frame in range(frames):
        assert close(video[:, 1 + 2 * frame], y[:, frame, ..., :6])
        assert close(video[:, 2 + 2 * frame], y[:, frame, ..., 6:])
    assert torch.isnan(video[:, 0]).all()
    assert close(kept, causal(x, history)[:, -2:])


def dup_up(x, c_out, factor, skip):
    """DupUp3D by its index formula, pixel by pixel."""
    batch, frames, rows, cols, c_in = x.shape
    y = poisoned(batch, factor * frames - skip, 2 * rows, 2 * cols, c_out)
    repeats = c_out * factor * 4 // c_in
    for frame in range(y.shape[1]):
        source, t = divmod(frame + skip, factor)
        for row in range(2):
            for col in range(2):
                for o in range(c_out):
                    channel = (o * factor * 4 + t * 4 + row * 2 + col) // repeats
                    y[:, frame, row::2, col::2, o] = x[:, source, :, :, channel]
    return y


def enlarged_conv(x, weight, bias):
    """Nearest x2, then the 3x3 conv with zero padding."""
    enlarged = F.interpolate(x.flatten(0, 1).movedim(-1, 1), scale_factor=2)
    return F.conv2d(enlarged, weight, bias, padding=1).movedim(1, -1).unflatten(0, x.shape[:2])


def prepared(form, weight, bias):
    if form == "winograd":
        return layers.UpsampleConv(None, weights.upsample_components(weight), bias)
    return layers.UpsampleConv(weights.upsample_phases(weight), None, bias)


@pytest.mark.parametrize("form", ["phases", "winograd"])
@pytest.mark.parametrize(("factor", "skip", "shortcut_channels"), [(2, 0, 4), (2, 1, 4), (1, 0, 8)])
@pytest.mark.parametrize("size", [*SIZES, *((1, 1, rows, 8 - rows) for rows in range(1, 8))])
def test_upsample_conv2x(size, factor, skip, shortcut_channels, form, ops):
    batch, frames, rows, cols = size
    c = 4
    shortcut = draw(*size, shortcut_channels)
    x = draw(batch, factor * frames - skip, rows, cols, c)
    weight, bias = draw(c, c, 3, 3), draw(c)
    result = ops.upsample_conv2x(x, prepared(form, weight, bias), shortcut, skip, None)
    assert close(result, enlarged_conv(x, weight, bias) + dup_up(shortcut, c, factor, skip))


@pytest.mark.parametrize("form", ["phases", "winograd"])
@pytest.mark.parametrize("first", range(11))
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_upsample_conv2x_on_a_band(rows, first, form, ops):
    """Any rows of an image of 11, from them and the neighbours' alone."""
    rows = min(rows, 11 - first)
    image, shortcut, weight, bias = draw(2, 3, 11, 5, 4), draw(2, 3, 11, 5, 4), draw(6, 4, 3, 3), draw(6)
    shortcut = shortcut.repeat_interleave(6, dim=-1)
    up = prepared(form, weight, bias)
    rim = up.halo_rows
    padded, band = F.pad(image, (0, 0, 0, 0, rim, rim)), slice(first, first + rows)
    around = padded[:, :, first : first + rows + 2 * rim]
    halo = Halo(around[:, :, :rim].contiguous(), around[:, :, -rim:].contiguous(), first)
    result = ops.upsample_conv2x(image[:, :, band].contiguous(), up, shortcut[:, :, band].contiguous(), 0, halo)
    expected = enlarged_conv(image, weight, bias) + dup_up(shortcut, 6, 1, 0)
    assert close(result, expected[:, :, 2 * first : 2 * (first + rows)])


@pytest.mark.parametrize("halo", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_output_head(size, later, halo, ops):
    batch, frames, rows, cols = size
    x, norm, weight, bias = draw(*size, 6), draw(6), draw(12, 6, 3, 3, 3) / 4, draw(12) / 4
    history = draw(batch, 2, rows + 2 * halo, cols, 6) if later else None
    edge = (batch, frames, 1, cols, 6)
    neighbours = Halo(draw(*edge), draw(*edge)) if halo else None
    whole = x if neighbours is None else torch.cat([neighbours.above, x, neighbours.below], dim=2)
    normed = causal(norm_silu(whole, norm), history)
    y = F.conv3d(first(normed), weight, bias, padding=(0, 0 if halo else 1, 1)).clamp(-1, 1)
    expected = poisoned(batch, 3, frames, 2 * rows, 2 * cols)
    for channel in range(12):
        c, r, q = channel // 4, channel // 2 % 2, channel % 2
        expected[:, c, :, q::2, r::2] = y[:, channel]
    head = layers.Head(norm, weights.head_weight(weight), bias)
    padded, _ = ops.norm_silu_pad(x, norm, history, neighbours, head)
    video = poisoned(batch, 3, frames + 2, 2 * rows + 4, 2 * cols)
    flag = ops.nonfinite_flag()
    ops.output_head(padded, head, video[:, :, 1:-1, 2:-2], flag)
    assert close(video[:, :, 1:-1, 2:-2].clone(), expected)
    assert torch.isnan(video).sum() == video.numel() - expected.numel(), "nothing else is written"
    assert flag.item() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_output_head_sees_what_the_clamp_would_hide(value, ops):
    head = layers.Head(torch.ones(6), weights.head_weight(draw(12, 6, 3, 3, 3)), draw(12))
    padded, _ = ops.causal_pad(draw(1, 2, 3, 4, 6), None, None, head)
    padded.tensor[0, 3, 1, 2, 5] = value
    flag = ops.nonfinite_flag()
    ops.output_head(padded, head, poisoned(1, 3, 2, 6, 8), flag)
    assert flag.item() == 1


def test_rows_and_frames_change_places(ops):
    """split_rows on every rank, exchanged, then join_frames on every rank: the prefix transpose."""
    x = draw(2, 5, 7, 3, 4)
    intervals, bands = [(0, 2), (2, 5)], [(0, 4), (4, 7)]
    flats = []
    for start, stop in intervals:
        sizes = [2 * (stop - start) * (b - a) * 12 for a, b in bands]
        flats.append(ops.split_rows(x[:, start:stop], bands).split(sizes))
    for rank, (top, bottom) in enumerate(bands):
        received = torch.cat([flat[rank] for flat in flats])
        assert torch.equal(ops.join_frames(received, [2, 3], 2, bottom - top, 3, 4), x[:, :, top:bottom])


@pytest.mark.parametrize("rows", [1, 2])
def test_edge_rows(ops, rows):
    x = draw(2, 3, 4, 5, 6)
    above, below = ops.edge_rows(x, rows)
    assert torch.equal(above, x[:, :, :rows])
    assert torch.equal(below, x[:, :, 4 - rows :])
    assert above.is_contiguous()
    assert below.is_contiguous()
