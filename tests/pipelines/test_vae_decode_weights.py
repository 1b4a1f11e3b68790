# SPDX-License-Identifier: Apache-2.0
"""Prepared weights are made once, and never used once the module's own have changed in whatever way."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from fastvideo.models.vaes import wan22_decode
from torch import nn

KERNEL = {"decode_kernel": True, "decode_backend": "torch"}


@torch.no_grad()
def decoded(vae: Any, z: torch.Tensor) -> torch.Tensor:
    return vae.decode(z)


def upstream_s(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """What FastVideo's own decode makes of the weights that the module has now."""
    with torch.no_grad():
        return super(wan22_decode.AutoencoderKLWan, vae).decode(z)


def first_conv(vae: Any) -> nn.Parameter:
    return vae.decoder.conv_in.weight


def reversed_elements(weight: torch.Tensor) -> None:
    weight.copy_(weight.flatten().flip(0).view_as(weight))


def load(vae: Any, other: Any) -> None:
    vae.load_state_dict(other.state_dict())


WRITES = {
    "load_state_dict": load,
    "load_state_dict, assigned": lambda vae, other: vae.load_state_dict(other.state_dict(), assign=True),
    "load_state_dict, partly": lambda vae, other: vae.load_state_dict(
        {"decoder.conv_out.bias": other.decoder.conv_out.bias + 0.1}, strict=False
    ),
    "in place": lambda vae, other: first_conv(vae).add_(0.05),
    "through .data": lambda vae, other: first_conv(vae).data.mul_(1.2),
    "through .data, a permutation": lambda vae, other: reversed_elements(first_conv(vae).data),
    ".data replaced": lambda vae, other: setattr(first_conv(vae), "data", first_conv(other).data.clone()),
    "one bias": lambda vae, other: vae.decoder.conv_out.bias.data[1:2].add_(0.1),
    "parameter replaced": lambda vae, other: setattr(vae.decoder.conv_in, "weight", first_conv(other)),
    "layer replaced": lambda vae, other: setattr(vae.decoder, "conv_in", other.decoder.conv_in),
    "decoder replaced": lambda vae, other: setattr(vae, "decoder", other.decoder),
    "merged LoRA": lambda vae, other: (
        first_conv(vae).data.view(32, -1).addmm_(torch.ones(32, 2), torch.full((2, first_conv(vae)[0].numel()), 0.02))
    ),
    "rounded": lambda vae, other: vae.to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("write", WRITES)
def test_written_weights_are_the_ones_that_decode(write, tiny, made):
    vae, other, z = tiny.tiny_vae(**KERNEL), tiny.tiny_vae(seed=1), tiny.tiny_latents(frames=2)
    before = decoded(vae, z)
    with torch.no_grad():
        WRITES[write](vae, other)
    after = decoded(vae, z)
    assert len(made) == 2
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, upstream_s(vae, z), rtol=0, atol=1e-5)
    decoded(vae, z)
    assert len(made) == 2


@pytest.mark.parametrize(
    "write",
    [
        lambda vae: vae.to("cpu"),
        lambda vae: vae.float(),
        lambda vae: vae.eval(),
        lambda vae: vae.requires_grad_(False),
        lambda vae: vae.quant_conv.weight.data.add_(1),
        lambda vae: vae.clear_cache(),
        lambda vae: vae.enable_tiling(),
        lambda vae: vae.state_dict(),
    ],
    ids=["to(cpu)", "float", "eval", "requires_grad_", "quant_conv", "clear_cache", "enable_tiling", "state_dict"],
)
def test_what_leaves_the_weights_alone_prepares_nothing_anew(write, tiny, made):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents(frames=2)
    before = decoded(vae, z)
    write(vae)
    assert torch.equal(decoded(vae, z), before)
    assert decoded(vae, z[..., :1]).shape == (1, 3, 5, 48, 16)
    assert len(made) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_type_of_the_module_is_prepared_anew_at_once(dtype, tiny, made):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents(frames=2)
    before = decoded(vae, z)
    vae.to(dtype)
    assert vae._prepared.decoder is None, "its memory would stay behind on the device"
    after = decoded(vae, z)
    assert len(made) == 2
    if dtype == torch.float64:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    else:
        vae.float()
        torch.testing.assert_close(after, upstream_s(vae, z), rtol=0, atol=1e-5)


def test_module_that_leaves_the_device_lets_its_prepared_weights_go(tiny, made):
    vae = tiny.tiny_vae(**KERNEL)
    decoded(vae, tiny.tiny_latents(frames=1))
    vae.to("meta")
    assert vae._prepared.decoder is None


def test_copies_have_decoders_of_their_own(tiny, made):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents(frames=2)
    before = decoded(vae, z)
    pickled = pickle.loads(pickle.dumps(vae))
    copied = copy.deepcopy(vae)
    for other in (copied, pickled):
        assert other._prepared.decoder is None
        assert torch.equal(decoded(other, z), before)
        first_conv(other).data.neg_()
        torch.testing.assert_close(decoded(other, z), upstream_s(other, z), rtol=0, atol=1e-5)
    assert torch.equal(decoded(vae, z), before)
    assert len(made) == 5


def test_saved_state_holds_nothing_of_the_decoder(tiny):
    vae = tiny.tiny_vae(**KERNEL)
    names = set(vae.state_dict())
    decoded(vae, tiny.tiny_latents(frames=1))
    assert set(vae.state_dict()) == names
    size = []
    for module in (vae, tiny.tiny_vae()):
        torch.save(module, buffer := io.BytesIO())
        size.append(buffer.tell())
    assert abs(size[0] - size[1]) < 1000


class LoRA(nn.Module):
    """A layer and a learned addition, as adapters wrap it: its weights have other names then."""

    def __init__(self, base: nn.Conv3d) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_B = nn.Parameter(torch.full((base.out_channels, 1, 1, 1), 0.1), requires_grad=False)

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return self.base_layer(x, *rest) + self.lora_B


def test_wrapped_layer_falls_back_until_it_is_unwrapped(tiny, made):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents(frames=2)
    before = decoded(vae, z)
    conv = vae.decoder.conv_out
    vae.decoder.conv_out = LoRA(conv)
    wrapped = decoded(vae, z)
    assert "decoder.conv_out.weight" in vae.decode_report()["decode_reason"]
    assert torch.equal(wrapped, upstream_s(vae, z))
    assert not torch.equal(wrapped, before)
    vae.decoder.conv_out = conv
    assert torch.equal(decoded(vae, z), before)
    assert vae.decode_report()["decode_path"].startswith("wan22_vae_decode")


def test_parametrised_weight_falls_back(tiny, made):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents(frames=2)
    decoded(vae, z)
    nn.utils.parametrize.register_parametrization(vae.decoder.conv_in, "weight", Doubled())
    assert torch.equal(decoded(vae, z), upstream_s(vae, z))
    assert "decoder.conv_in.weight" in vae.decode_report()["decode_reason"]
    assert len(made) == 1
