# SPDX-License-Identifier: Apache-2.0
"""Weights are checked by name, shape and type, and prepared into forms that compute the same convolutions."""

import pytest
import torch
import torch.nn.functional as F

from wan22_vae_decode import Decoder, WeightsError, weights, why_not, winograd
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.layers import WinogradForm

CPU = torch.device("cpu")


def test_released_decoder_has_110_tensors_in_this_order():
    shapes = weights.expected_shapes(Architecture(base=256, latent=48))
    names = list(shapes)
    assert len(names) == 110
    landmarks = {
        0: ("post_quant_conv.weight", (48, 48, 1, 1, 1)),
        2: ("decoder.conv_in.weight", (1024, 48, 3, 3, 3)),
        4: ("decoder.mid_block.attentions.0.norm.gamma", (1024, 1, 1)),
        9: ("decoder.mid_block.resnets.0.norm1.gamma", (1024, 1, 1, 1)),
        39: ("decoder.up_blocks.0.upsampler.resample.1.weight", (1024, 1024, 3, 3)),
        41: ("decoder.up_blocks.0.upsampler.time_conv.weight", (2048, 1024, 3, 1, 1)),
        71: ("decoder.up_blocks.2.resnets.0.conv_shortcut.weight", (512, 1024, 1, 1, 1)),
        87: ("decoder.up_blocks.3.resnets.0.norm1.gamma", (512, 1, 1, 1)),
        107: ("decoder.norm_out.gamma", (256, 1, 1, 1)),
        108: ("decoder.conv_out.weight", (12, 256, 3, 3, 3)),
    }
    assert {index: (names[index], shapes[names[index]]) for index in landmarks} == landmarks


def test_names_are_diffusers(reference_vae):
    ours = weights.expected_shapes(Architecture(base=8, latent=4))
    theirs = weights.decoder_tensors(reference_vae.state_dict())
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == ours
    assert list(theirs) == list(ours)


@pytest.mark.parametrize(("base", "latent"), [(4, 1), (4, 16), (12, 5)])
def test_any_width_is_recognised(base, latent, make_state_dict, latents):
    tensors = make_state_dict(base, latent)
    assert weights.check(tensors) == Architecture(base, latent)
    video = Decoder.from_state_dict(tensors, dtype="float32").decode(latents(1, 1, 2, channels=latent).float())
    assert video.shape == (1, 3, 1, 16, 32)


def test_other_tensors_are_ignored(state_dict, latents):
    extended = state_dict | {"encoder.conv_in.weight": torch.ones(1), "quant_conv.bias": torch.ones(1)}
    z = latents(1, 1, 1).float()
    assert torch.equal(Decoder.from_state_dict(extended).decode(z), Decoder.from_state_dict(state_dict).decode(z))


def test_one_error_lists_everything_that_is_wrong(make_state_dict):
    tensors = make_state_dict()
    del tensors["decoder.conv_in.bias"], tensors["decoder.up_blocks.3.resnets.2.conv2.weight"]
    tensors["decoder.extra.weight"] = torch.zeros(1)
    tensors["decoder.norm_out.gamma"] = torch.zeros(8)
    tensors["decoder.conv_out.bias"] = torch.zeros(12, dtype=torch.int8)
    tensors["post_quant_conv.bias"] = torch.zeros(4, device="meta")
    with pytest.raises(WeightsError) as refusal:
        Decoder.from_state_dict(tensors)
    message = str(refusal.value)
    assert "missing: decoder.conv_in.bias, decoder.up_blocks.3.resnets.2.conv2.weight;" in message
    assert "unexpected: decoder.extra.weight;" in message
    assert "wrong shapes: decoder.norm_out.gamma [8] instead of [8, 1, 1, 1];" in message
    assert "not floating-point: decoder.conv_out.bias (torch.int8);" in message
    assert "without data (meta device): post_quant_conv.bias" in message
    assert why_not(tensors) == message


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda tensor: tensor.to(torch.int8), "not floating-point: {} (torch.int8), "),
        (lambda tensor: tensor.to("meta"), "without data (meta device): {}, "),
        (lambda tensor: [], "but these are none: {} (list), "),
    ],
)
def test_an_error_about_every_tensor_names_the_first_few(change, kind, state_dict):
    with pytest.raises(WeightsError) as refusal:
        Decoder.from_state_dict({name: change(tensor) for name, tensor in state_dict.items()})
    assert kind.format("post_quant_conv.weight") in str(refusal.value)
    assert str(refusal.value).endswith(" and 106 more")
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("name", list(weights.expected_shapes(Architecture(8, 4)))[::9])
def test_every_tensor_is_needed(name, state_dict):
    with pytest.raises(WeightsError, match=name):
        weights.check({key: tensor for key, tensor in state_dict.items() if key != name})


def test_other_checkpoints_are_named(state_dict):
    with pytest.raises(WeightsError, match=r"Wan2\.1"):
        weights.check(state_dict | {"decoder.up_blocks.0.upsamplers.0.resample.1.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match="no tensor is named decoder"):
        Decoder.from_state_dict({"model.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match="has 2 dimensions instead of 5"):
        weights.check({"post_quant_conv.weight": torch.zeros(4, 4)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_refused_before_anything_is_prepared(dtype, value, make_state_dict, monkeypatch):
    tensors = {name: tensor.to(dtype) for name, tensor in make_state_dict().items()}
    monkeypatch.setattr(weights, "prepare", lambda *_, **__: pytest.fail("prepared them"))
    tensors["decoder.conv_in.weight"][3, 1, 2, 0, 1] = value
    sentence = "the weights hold NaN or values beyond float32, in decoder.conv_in.weight; load or copy them again"
    for options in ({}, {"dtype": "float16"}):
        with pytest.raises(WeightsError) as refusal:
            Decoder.from_state_dict(tensors, **options)
        assert str(refusal.value) == sentence
    tensors["decoder.conv_out.bias"][0] = tensors["decoder.norm_out.gamma"][0] = value
    with pytest.raises(WeightsError, match=r"in decoder\.conv_in\.weight and 2 other tensors; load"):
        Decoder.from_state_dict(tensors)


def test_values_are_finite_up_to_float32_s_largest(state_dict):
    def check(value):
        weights.check_finite(state_dict | {"decoder.conv_out.bias": torch.full((12,), value, dtype=torch.float64)})

    largest = torch.finfo(torch.float32).max
    check(largest)
    for value in (1e300, -2 * largest):
        with pytest.raises(WeightsError, match=r"values beyond float32, in decoder\.conv_out\.bias; load"):
            check(value)


def test_fingerprint_sees_every_kind_of_change(make_state_dict):
    tensors = make_state_dict()
    name = "decoder.conv_in.bias"
    before = weights.fingerprint(tensors)
    assert weights.fingerprint(dict(tensors)) == before
    changed = [tensors | {name: tensors[name].clone()}, tensors | {name: tensors[name].half()}]
    assert all(weights.fingerprint(other) != before for other in changed)
    with torch.no_grad():
        tensors[name].add_(1)
    assert weights.fingerprint(tensors) != before


def test_fingerprint_of_inference_tensors():
    with torch.inference_mode():
        tensors = {"decoder.x": torch.zeros(2)}
    assert weights.fingerprint(tensors) == weights.fingerprint(tensors)


def test_preparation_copies(make_state_dict, latents):
    """Writing to the checkpoint afterwards must not change a decoder, not even in the checkpoint's own type."""
    tensors = make_state_dict()
    decoder = Decoder.from_state_dict(tensors, dtype="float64")
    z = latents(1, 1, 1)
    before = decoder.decode(z)
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(decoder.decode(z), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_rounded_once_after_the_sums(dtype, state_dict):
    prepared = weights.prepare(state_dict, Architecture(8, 4), TorchBackend(CPU, dtype))
    upsampler = prepared.up_blocks[2].upsampler
    assert upsampler is not None
    exact = weights.upsample_phases(state_dict["decoder.up_blocks.2.upsampler.resample.1.weight"])
    assert torch.equal(upsampler.spatial.phases, exact.to(dtype))
    assert prepared.head.weight.dtype == dtype
    assert prepared.head.norm.dtype == prepared.head.bias.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", winograd.POINTS)
def test_winograd_weights_are_rounded_jointly(columns, dtype, state_dict, monkeypatch):
    name = "decoder.up_blocks.1.resnets.1.conv1"
    exact = winograd.transform_weight(state_dict[f"{name}.weight"].permute(0, 2, 3, 4, 1), columns)
    # As many parts as output channels: filters do not depend on each other.
    monkeypatch.setattr(winograd, "_PART_CHANNELS", 1)
    ops = TorchBackend(CPU, dtype, winograd_levels={1: WinogradForm(columns)})
    prepared = weights.prepare(state_dict, Architecture(8, 4), ops).up_blocks[1].resnets[1].conv1.weight
    assert prepared.is_contiguous()
    assert torch.equal(prepared, winograd.round_weight(exact, dtype))
    assert torch.equal(prepared, exact.to(dtype)) == (dtype == torch.float32)


def test_phase_sums_are_the_enlarged_convolution():
    weight = torch.randn(3, 5, 3, 3, dtype=torch.float64)
    x = torch.randn(1, 5, 4, 6, dtype=torch.float64)
    expected = F.conv2d(F.interpolate(x, scale_factor=2), weight, padding=1)
    phases = weights.upsample_phases(weight)
    assert phases.shape == (2, 2, 3, 2, 2, 5)
    padded = F.pad(x, (1, 1, 1, 1))
    for row in range(2):
        for col in range(2):
            y = F.conv2d(padded[:, :, row : row + 5, col : col + 7], phases[row, col].permute(0, 3, 1, 2))
            assert (y - expected[:, :, row::2, col::2]).abs().max() < 1e-13


def test_upsampling_components_are_the_phases_transformed():
    """Each component is a phase's taps as a polynomial in two variables, at a pair of the points."""
    weight = torch.randn(3, 5, 3, 3, dtype=torch.float64)
    components, phases = weights.upsample_components(weight), weights.upsample_phases(weight)
    assert components.shape == (16, 2, 2, 3, 5)
    taps = phases.permute(0, 1, 2, 5, 3, 4)
    # At 0 and infinity twice the first and the last tap (at 0 negated), at 1 and -1 their sum and difference.
    rows = [-2 * taps[..., 0, :], taps.sum(-2), taps[..., 0, :] - taps[..., 1, :], 2 * taps[..., 1, :]]
    for i, line in enumerate(rows):
        for j, value in enumerate([-2 * line[..., 0], line.sum(-1), line[..., 0] - line[..., 1], 2 * line[..., 1]]):
            assert (components[4 * i + j] - value).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_upsampling_components_are_rounded_once(dtype, state_dict, monkeypatch):
    # As many parts as output channels.
    monkeypatch.setattr(weights, "_PART_CHANNELS", 1)
    ops = TorchBackend(CPU, dtype, upsample_winograd={1})
    prepared = weights.prepare(state_dict, Architecture(8, 4), ops)
    exact = weights.upsample_components(state_dict["decoder.up_blocks.1.upsampler.resample.1.weight"])
    upsamplers = [block.upsampler.spatial for block in prepared.up_blocks[:3]]
    assert [upsampler.phases is None for upsampler in upsamplers] == [False, True, False]
    assert upsamplers[1].components.is_contiguous()
    assert torch.equal(upsamplers[1].components, exact.to(dtype))


def test_head_rearrangement_keeps_every_tap():
    weight = torch.randn(12, 5, 3, 3, 3, dtype=torch.float64)
    head = weights.head_weight(weight)
    assert head.shape == (112, 3, 1, 1, 5)
    assert (head[108:] == 0).all()
    for tap in range(9):
        dy, dx = divmod(tap, 3)
        channels = head[12 * tap : 12 * tap + 12, :, 0, 0, :]
        assert torch.equal(channels, weight[:, :, :, dy, dx].transpose(1, 2))


def test_shortcut_bias_is_carried_by_the_second_conv(state_dict):
    prepared = weights.prepare(state_dict, Architecture(8, 4), TorchBackend(CPU, torch.float64))
    resnet = prepared.up_blocks[3].resnets[0]
    name = "decoder.up_blocks.3.resnets.0"
    assert resnet.shortcut is not None
    assert resnet.shortcut.bias is None
    total = state_dict[f"{name}.conv2.bias"] + state_dict[f"{name}.conv_shortcut.bias"]
    assert torch.equal(resnet.conv2.bias, total)


def test_norms_carry_the_square_root_of_the_width(state_dict):
    prepared = weights.prepare(state_dict, Architecture(8, 4), TorchBackend(CPU, torch.float64))
    gamma = state_dict["decoder.mid_block.resnets.1.norm2.gamma"].flatten()
    assert torch.allclose(prepared.mid_resnets[1].norm2, gamma * 32**0.5, rtol=1e-15)
