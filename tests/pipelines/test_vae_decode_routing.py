# SPDX-License-Identifier: Apache-2.0
"""Which decode runs, why, and that its video is the one that FastVideo's own decode gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fastvideo.configs.models.vaes.wanvae import WanVAEConfig as UpstreamWanVAEConfig
from fastvideo.models.vaes import wanvae
from fastvideo.models.vaes.wanvae import AutoencoderKLWan as UpstreamAutoencoderKLWan

KERNEL = {"decode_kernel": True, "decode_backend": "torch"}
FALLBACK = "Decoding with FastVideo's own decode: "


@pytest.fixture(scope="module")
def upstream(tiny) -> Any:
    """FastVideo's own class with its own config."""
    return tiny.tiny_vae(tiny.tiny_config(UpstreamWanVAEConfig), UpstreamAutoencoderKLWan)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the VAE logs; FastVideo's loggers do not propagate."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fastvideo.models.vaes.wan22_decode")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@torch.no_grad()
def decoded(vae: Any, z: torch.Tensor) -> torch.Tensor:
    return vae.decode(z)


def assert_fell_back(vae: Any, z: torch.Tensor, upstream: Any, lines: list[str], reason: str) -> None:
    """Upstream's video twice, and the reason in the report and, once, in the log."""
    expected = decoded(upstream, z)
    for _ in range(2):
        assert torch.equal(vae.decode(z), expected)
    assert vae.decode_report()["decode_path"] == "FastVideo"
    assert reason in vae.decode_report()["decode_reason"]
    assert lines == [FALLBACK + vae.decode_report()["decode_reason"]]


# Off


@pytest.mark.parametrize("config", ["ours", "upstream's"])
def test_switched_off_is_upstream_bit_for_bit_and_silent(config, tiny, upstream, lines):
    vae = tiny.tiny_vae(tiny.tiny_config() if config == "ours" else tiny.tiny_config(UpstreamWanVAEConfig))
    z = tiny.tiny_latents(batch=2)
    assert torch.equal(decoded(vae, z), decoded(upstream, z))
    assert vae.decode_report() == {"decode_path": "FastVideo", "decode_reason": "decode_kernel is off"}
    assert not lines


def test_switched_off_keeps_gradients(tiny, upstream):
    z = tiny.tiny_latents(frames=1).requires_grad_()
    (ours,) = torch.autograd.grad(tiny.tiny_vae().decode(z).square().sum(), z)
    (theirs,) = torch.autograd.grad(upstream.decode(z).square().sum(), z)
    assert torch.equal(ours, theirs)


# On


@pytest.mark.parametrize(("frames", "rows", "cols", "batch"), [(1, 1, 1, 1), (2, 3, 2, 2), (5, 2, 3, 1)])
def test_float32_video_is_upstream_s(frames, rows, cols, batch, tiny, upstream, lines):
    vae = tiny.tiny_vae(**KERNEL)
    z = tiny.tiny_latents(frames, rows, cols, batch)
    video = decoded(vae, z)
    assert video.dtype == torch.float32
    torch.testing.assert_close(video, decoded(upstream, z), rtol=0, atol=1e-5)
    assert vae.decode_report() == {
        "decode_path": "wan22_vae_decode, torch, float32",
        "decode_reason": "decode_kernel is on",
    }
    assert torch.equal(decoded(vae, z), video)
    assert lines == ["Decoding with wan22_vae_decode, torch, float32."]


def test_float64_video_is_upstream_s_to_the_last_bit_of_float32(tiny, upstream, monkeypatch):
    # Upstream's nearest-neighbour upsampling rounds to float32 on its way.
    monkeypatch.setattr(wanvae.WanUpsample, "forward", torch.nn.Upsample.forward)
    vae, z = tiny.tiny_vae(**KERNEL, decode_dtype="float64").double(), tiny.tiny_latents().double()
    reference = tiny.tiny_vae(tiny.tiny_config(UpstreamWanVAEConfig), UpstreamAutoencoderKLWan).double()
    difference = (decoded(vae, z) - decoded(reference, z)).abs()
    # Both are handed over as float32.
    assert difference.max() <= 2**-23
    assert (difference > 0).double().mean() < 1e-3


def test_video_does_not_depend_on_the_frames_of_a_pass(tiny):
    z, switches = tiny.tiny_latents(frames=5), KERNEL | {"decode_dtype": "float64"}
    videos = [decoded(tiny.tiny_vae(**switches, decode_frames_per_pass=n), z) for n in (1, 2, 4, 61, "auto")]
    for video in videos[1:]:
        torch.testing.assert_close(video, videos[0], rtol=0, atol=2**-23)


def test_frames_of_a_pass_reach_the_decoder(tiny, monkeypatch):
    passes = []
    from wan22_vae_decode.graph import Graph

    prefix = Graph.prefix
    monkeypatch.setattr(Graph, "prefix", lambda self, x, *rest: passes.append(x.shape[1]) or prefix(self, x, *rest))
    decoded(tiny.tiny_vae(**KERNEL, decode_frames_per_pass=2), tiny.tiny_latents(frames=5))
    assert passes == [2, 2, 1]


@pytest.mark.parametrize(("dtype", "least", "most"), [("float16", 1e-5, 1e-2), ("bfloat16", 1e-3, 1e-1)])
def test_decode_dtype_is_the_compute_type(dtype, least, most, tiny, upstream):
    vae, z = tiny.tiny_vae(**KERNEL, decode_dtype=dtype), tiny.tiny_latents()
    difference = (decoded(vae, z) - decoded(upstream, z)).abs().max()
    assert least < difference < most
    assert vae.decode_report()["decode_path"] == f"wan22_vae_decode, torch, {dtype}"


def test_switches_may_change_between_decodes(tiny, upstream):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents()
    in_float32 = decoded(vae, z)
    vae.config.decode_dtype = "float16"
    assert not torch.equal(decoded(vae, z), in_float32)
    vae.config.decode_kernel = False
    assert torch.equal(decoded(vae, z), decoded(upstream, z))


def test_autocast_does_not_round_the_latents(tiny, upstream):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents()
    exact = decoded(vae, z)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decoded(vae, z), exact)
        assert (decoded(upstream, z) - exact).abs().max() > 1e-3, "autocast does change upstream's decode"


def test_inference_mode_and_no_grad_give_the_same_video(tiny):
    vae, z = tiny.tiny_vae(**KERNEL, frozen=False), tiny.tiny_latents()
    with torch.inference_mode():
        video = vae.decode(z)
        assert vae.decode_report()["decode_path"].startswith("wan22_vae_decode")
    # The decoder that was made in inference mode serves outside of it, too.
    assert torch.equal(decoded(vae, z), video)
    assert torch.equal(decoded(vae, z.clone().requires_grad_()), video)
    assert vae.decode_report()["decode_path"].startswith("wan22_vae_decode")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("frame", [0, 1])
def test_latents_that_are_not_finite_decode_as_upstream_s(value, frame, tiny, upstream):
    z = tiny.tiny_latents()
    z[0, 1, frame, 2, 1] = value
    expected = decoded(upstream, z)
    assert expected.isnan().any()
    video = decoded(tiny.tiny_vae(**KERNEL), z)
    torch.testing.assert_close(video, expected, rtol=0, atol=1e-5, equal_nan=True)


def test_latents_of_any_strides_and_type_decode(tiny, upstream):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents()
    expected = decoded(vae, z)
    assert torch.equal(decoded(vae, z.permute(4, 3, 0, 2, 1).contiguous().permute(2, 4, 3, 1, 0)), expected)
    rounded = z.bfloat16()
    torch.testing.assert_close(decoded(vae, rounded), decoded(upstream, rounded.float()), rtol=0, atol=1e-5)


def test_streaming_decode_gives_the_frames_of_decode(tiny):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents(frames=4)
    with torch.no_grad():
        first, cache = vae.streaming_decode(z[:, :, :1], vae.get_streaming_cache(), is_first_chunk=True)
        whole = vae.decode(z)
        second, _ = vae.streaming_decode(z[:, :, 1:], cache)
    assert vae.decode_report()["decode_path"].startswith("wan22_vae_decode")
    torch.testing.assert_close(torch.cat([first, second], dim=2), whole, rtol=0, atol=1e-5)


def test_without_ranks_only_the_writer_decodes(tiny):
    z = tiny.tiny_latents()
    for switches in ({}, KERNEL, KERNEL | {"decode_kernel_parallel": True}):
        vae = tiny.tiny_vae(**switches)
        with torch.no_grad():
            assert vae.decode_on_first_rank(z, is_writer=False) is None
            assert vae.decode_report()["decode_path"] == ""
            assert torch.equal(vae.decode_on_first_rank(z, is_writer=True), vae.decode(z))


# Falling back

REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "auto": ({"decode_backend": "auto"}, "the CUDA kernels need a CUDA device, not cpu"),
    "cuda": ({"decode_backend": "cuda"}, "the CUDA kernels need a CUDA device, not cpu"),
    "float64 on cuda": ({"decode_backend": "cuda", "decode_dtype": "float64"}, "CUDA"),
    "light": ({"use_light_vae": True}, "use_light_vae changes the rule for the first frame"),
    "tiles": ({"use_feature_cache": False}, "use_feature_cache=False decodes in tiles"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these reasons are a CPU's")
@pytest.mark.parametrize("case", REASONS)
@torch.no_grad()
def test_what_the_kernels_cannot_do_is_upstream_s_with_one_log_line(case, tiny, lines):
    switches, reason = REASONS[case]
    shared = {name: value for name, value in switches.items() if name.startswith("use_")}
    config = tiny.tiny_config(UpstreamWanVAEConfig, **shared)
    theirs = tiny.tiny_vae(config, UpstreamAutoencoderKLWan)
    # Upstream's decode without its cache takes a single latent frame of this VAE.
    z = tiny.tiny_latents(frames=1 if case == "tiles" else 3)
    assert_fell_back(tiny.tiny_vae(**(KERNEL | switches)), z, theirs, lines, reason)


@torch.no_grad()
def test_wan21_vae_is_upstream_s(tiny, lines):
    architecture = {"base_dim": 4, "z_dim": 16}
    vae = tiny.tiny_vae(tiny.tiny_config(architecture=architecture, **KERNEL))
    config = tiny.tiny_config(UpstreamWanVAEConfig, architecture=architecture)
    theirs = tiny.tiny_vae(config, UpstreamAutoencoderKLWan)
    z = torch.randn(1, 16, 2, 4, 3)
    assert decoded(theirs, z).shape == (1, 3, 5, 32, 24)
    assert_fell_back(vae, z, theirs, lines, "this is another one (z_dim 16)")


def test_gradients_are_upstream_s(tiny, upstream, lines):
    z = tiny.tiny_latents(frames=1)
    assert_fell_back(tiny.tiny_vae(**KERNEL, frozen=False), z, upstream, lines, "gradients may be needed")
    lines.clear()
    assert_fell_back(tiny.tiny_vae(**KERNEL), z.requires_grad_(), upstream, lines, "gradients may be needed")
    partly = tiny.tiny_vae(**KERNEL)
    partly.decoder.conv_out.bias.requires_grad_()
    partly.decode(z.detach()).sum().backward()
    assert partly.decoder.conv_out.bias.grad is not None


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


# All of them changes that upstream's decode takes.
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "shape": (
        lambda vae: setattr(vae.decoder.norm_out, "gamma", frozen(torch.full((1, 1, 1, 1), 0.5))),
        "wrong shapes: decoder.norm_out.gamma [1, 1, 1, 1] instead of [8, 1, 1, 1]",
    ),
    "type": (
        lambda vae: setattr(vae.decoder.norm_out, "gamma", frozen(torch.ones(8, 1, 1, 1, dtype=torch.int8))),
        "not floating-point: decoder.norm_out.gamma (torch.int8)",
    ),
    "missing": (lambda vae: setattr(vae.decoder.conv_in, "bias", None), "missing: decoder.conv_in.bias"),
    "extra": (lambda vae: vae.decoder.register_parameter("scale", frozen(torch.ones(1))), "unexpected: decoder.scale"),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_weights_that_are_not_a_wan22_decoder_s_are_upstream_s(change, tiny, lines):
    apply, reason = CHANGES[change]
    vae, theirs, z = tiny.tiny_vae(**KERNEL), tiny.tiny_vae(), tiny.tiny_latents(frames=2)
    decoded(vae, z)
    lines.clear()
    apply(vae)
    apply(theirs)
    assert_fell_back(vae, z, theirs, lines, reason)


@torch.no_grad()
def test_weights_that_are_not_finite_are_upstream_s(tiny, lines):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents(frames=2)
    decoded(vae, z)
    lines.clear()
    vae.decoder.conv_out.bias[4] = torch.nan
    for decode in (vae.decode, lambda z: vae.frames_on_first_rank(z, is_writer=True)):
        assert decode(z).isnan().any()
        assert vae.decode_report()["decode_path"] == "FastVideo"
    assert lines == [
        FALLBACK + "the weights hold NaN or values beyond float32, in decoder.conv_out.bias; load or copy them again"
    ]


def test_module_without_data_is_upstream_s(tiny):
    vae = tiny.tiny_vae(**KERNEL).to("meta")
    with torch.no_grad():
        assert vae.decode(tiny.tiny_latents().to("meta")).is_meta
    assert "without data (meta device)" in vae.decode_report()["decode_reason"]


def test_latents_elsewhere_are_upstream_s_to_refuse(tiny, lines):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents().to("meta")
    with pytest.raises(RuntimeError, match="device"):
        decoded(vae, z)
    assert lines == [FALLBACK + "latents are on meta, but the VAE is on cpu; move one of them"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 2, 3, 2), "latents must be [B, 4, T, H, W], not 4-dimensional"),
        ((1, 5, 2, 3, 2), "latents have 5 channels, but this decoder takes 4"),
        ((1, 4, 0, 3, 2), "latents have no frames"),
    ],
)
def test_wrong_latents_raise_as_upstream_does_after_one_log_line(shape, reason, tiny, upstream, lines):
    z, vae = torch.zeros(shape), tiny.tiny_vae(**KERNEL)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 (whatever upstream raises)
        decoded(upstream, z)
    for _ in range(2):
        with pytest.raises(theirs.type):
            decoded(vae, z)
    assert len(lines) == 1
    assert reason in lines[0]


def test_lack_of_memory_is_upstream_s_and_lets_the_prepared_weights_go(tiny, upstream, lines, monkeypatch):
    from wan22_vae_decode import OutOfMemoryError
    from wan22_vae_decode.backends.torch import TorchBackend

    free = iter([10_000, 20_000])

    def reserve(self, nbytes):
        raise OutOfMemoryError("full")

    monkeypatch.setattr(TorchBackend, "reserve", reserve)
    monkeypatch.setattr(TorchBackend, "free_bytes", lambda self: next(free, 10_000))
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents()
    for _ in range(2):
        assert torch.equal(decoded(vae, z), decoded(upstream, z))
        assert vae._prepared.decoder is None
    assert len(lines) == 1, "the free memory that it tells is another one each time"
    assert "a pass of 1 latent frames needs" in lines[0]
    monkeypatch.undo()
    decoded(vae, z)
    assert vae.decode_report()["decode_path"].startswith("wan22_vae_decode")


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        ({"decode_kernel_parallel": True}, "decode_kernel_parallel splits the kernel decode .* set decode_kernel=True"),
        ({"decode_backend": "cudnn"}, "decode_backend is 'cudnn'"),
        ({"decode_frames_per_pass": 62}, "decode_frames_per_pass is 62; give a whole number of latent frames from 1"),
        ({"decode_frames_per_pass": True}, "decode_frames_per_pass is True"),
    ],
)
def test_switches_without_meaning_are_refused_before_the_model_is_built(switches, sentence, tiny):
    with pytest.raises(ValueError, match=sentence):
        tiny.tiny_vae(**switches)


def test_a_compiled_decoder_module_decodes_by_its_own_weights(tiny, upstream):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents()
    vae.decoder = torch.compile(vae.decoder, backend="eager")
    video = decoded(vae, z)
    assert vae.decode_report()["decode_path"] == "wan22_vae_decode, torch, float32"
    torch.testing.assert_close(video, decoded(upstream, z), rtol=0, atol=1e-5)


def test_weights_that_cannot_be_examined_fall_back(tiny, upstream, lines, monkeypatch):
    def unreadable(state_dict):
        raise RuntimeError("no storage")

    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents()
    monkeypatch.setattr("wan22_vae_decode.module_decoder.signature", unreadable)
    with torch.no_grad():
        assert_fell_back(vae, z, upstream, lines, "the weights cannot be examined (no storage)")
