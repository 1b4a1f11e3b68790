# SPDX-License-Identifier: Apache-2.0
"""The graph computes what the reference VAE computes, whatever the geometry, the pass size and the form of the
convs.
"""

import pytest
import torch

from wan22_vae_decode import Decoder
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.layers import WinogradForm

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 3), (3, 4), (5, 1)])
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 9])
def test_decode_equals_diffusers_in_float64(frames, rows, cols, state_dict, reference_vae, latents):
    z = latents(frames, rows, cols)
    expected = reference_vae.decode(z).sample
    video = Decoder.from_state_dict(state_dict, dtype="float64").decode(z, out_dtype=torch.float64)
    assert video.shape == (1, 3, 4 * frames - 3, 16 * rows, 16 * cols)
    assert (video - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("frames", "rows", "cols"), [(1, 3, 2), (3, 2, 5)])
def test_decode_equals_diffusers_in_float32(frames, rows, cols, state_dict, reference_vae, latents):
    z = latents(frames, rows, cols)
    exact = reference_vae.decode(z).sample
    reference_vae.float()
    try:
        rounding = (reference_vae.decode(z.float()).sample - exact).abs().max()
    finally:
        reference_vae.double()
        reference_vae.load_state_dict(state_dict, strict=False)
    video = Decoder.from_state_dict(state_dict, dtype=torch.float32).decode(z.float())
    assert video.dtype == torch.float32
    assert (video - exact).abs().max() < 3 * rounding + 1e-6


def test_decode_of_a_batch_equals_its_items(state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict, dtype="float64", frames_per_pass=2)
    z = latents(3, 2, 3, batch=3)
    items = [decoder.decode(item[None], out_dtype=torch.float64) for item in z]
    assert torch.allclose(decoder.decode(z, out_dtype=torch.float64), torch.cat(items), rtol=0, atol=1e-13)


def test_clamp_is_the_references(state_dict, reference_vae, latents):
    z = 30 * latents(2, 2, 2)
    expected = reference_vae.decode(z).sample
    assert (expected.abs() == 1).any()
    video = Decoder.from_state_dict(state_dict, dtype="float64").decode(z, out_dtype=torch.float64)
    assert (video - expected).abs().max() < 1e-12
    assert video.min() >= -1
    assert video.max() <= 1


@pytest.mark.parametrize("frames_per_pass", [1, 2, 3, 5])
def test_video_does_not_depend_on_the_pass_size(frames_per_pass, state_dict, latents):
    z = latents(9, 2, 3)
    whole = Decoder.from_state_dict(state_dict, dtype="float64", frames_per_pass=9).decode(z, torch.float64)
    parts = Decoder.from_state_dict(state_dict, dtype="float64", frames_per_pass=frames_per_pass)
    assert (parts.decode(z, torch.float64) - whole).abs().max() < 1e-13


@pytest.mark.parametrize("frames_per_slab", [1, 2, 3])
def test_video_does_not_depend_on_the_slab(frames_per_slab, monkeypatch, state_dict, latents):
    from wan22_vae_decode import memory

    z = latents(5, 2, 2, batch=2)
    decoder = Decoder.from_state_dict(state_dict, dtype="float64", frames_per_pass=4)
    monkeypatch.setattr(memory, "DEFAULT_SLAB", 4)
    whole = decoder.decode(z, torch.float64)
    monkeypatch.setattr(memory, "DEFAULT_SLAB", frames_per_slab)
    assert (decoder.decode(z, torch.float64) - whole).abs().max() < 1e-13


@pytest.mark.parametrize(
    "options",
    [
        {"winograd_levels": {0: WinogradForm(3), 1: WinogradForm(3, True), 2: WinogradForm(4), 3: WinogradForm(4)}},
        {"upsample_winograd": {0, 1, 2}},
    ],
    ids=["winograd", "upsampling"],
)
def test_other_forms_of_the_convs_are_the_same_function(options, state_dict, latents):
    z = latents(4, 3, 5)
    direct = Decoder.from_state_dict(state_dict, dtype="float64").decode(z, torch.float64)
    ops = TorchBackend(CPU, torch.float64, **options)
    other = Decoder.from_state_dict(state_dict, backend=ops, dtype="float64").decode(z, torch.float64)
    assert not torch.equal(other, direct)
    assert (other - direct).abs().max() < 1e-11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_the_exact_video(dtype, state_dict, latents):
    z = latents(3, 3, 4)
    exact = Decoder.from_state_dict(state_dict, dtype="float64").decode(z, torch.float64)
    video = Decoder.from_state_dict(state_dict, dtype=dtype).decode(z.float())
    error = (video.double() - exact).square().mean().sqrt()
    assert error < 16 * torch.finfo(dtype).eps


def test_fastvideo_names_and_decodes_alike(state_dict, latents):
    wanvae = pytest.importorskip("fastvideo.models.vaes.wanvae")
    configs = pytest.importorskip("fastvideo.configs.models.vaes.wanvae")
    arch = configs.WanVAEArchConfig(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=4,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    )
    config = configs.WanVAEConfig(arch_config=arch)
    config.load_encoder, config.load_decoder = False, True
    vae = wanvae.AutoencoderKLWan(config).eval().requires_grad_(False)
    vae.load_state_dict({name: tensor.float() for name, tensor in state_dict.items()}, strict=False)
    z = latents(3, 2, 3).float()
    video = Decoder.from_state_dict(vae.state_dict(), dtype="float32").decode(z)
    assert (video - vae.decode(z)).abs().max() < 1e-4
