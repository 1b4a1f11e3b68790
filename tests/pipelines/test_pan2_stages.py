# SPDX-License-Identifier: Apache-2.0
"""The stages one by one: schedule, noise, condition tensor, guidance."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.models.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from fastvideo.pipelines.pan2.presets import PAN2_I2V, PAN2_T2V
from fastvideo.pipelines.pan2.stages import (
    PAN2DenoisingStage,
    PAN2ImageConditioningStage,
    PAN2LatentPreparationStage,
    PAN2TimestepPreparationStage,
    denoising,
)
from fastvideo.pipelines.pan2.stages.image_conditioning import cover_crop
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from PIL import Image


@pytest.fixture
def arguments() -> SimpleNamespace:
    config = PAN2PipelineConfig()
    config.vae_config.update_model_arch(
        {"z_dim": 48, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    )
    config.dit_precision = "fp32"
    return SimpleNamespace(
        pipeline_config=config,
        vae_cpu_offload=False,
        dit_cpu_offload=False,
        dit_layerwise_offload=False,
        use_fsdp_inference=False,
    )


def batch_of(**fields) -> ForwardBatch:
    values = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "guidance_scale": 1.0} | fields
    return ForwardBatch(data_type="video", **values)


@pytest.mark.parametrize("preset", [PAN2_T2V, PAN2_I2V])
def test_presets_are_the_released_defaults(preset):
    expected = {
        "height": 704,
        "width": 1248,
        "num_frames": 313,
        "fps": 24,
        "num_inference_steps": 50,
        "guidance_scale": 2.5,
    }
    assert preset.defaults.items() >= expected.items()


@pytest.mark.parametrize("shift", [1.0, 7.0])
def test_schedule_is_shifted_once(arguments, shift):
    batch = batch_of(num_inference_steps=4)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    PAN2TimestepPreparationStage(scheduler).forward(batch, arguments)
    linear = np.array([1.0, 0.75, 0.5, 0.25])
    expected = shift * linear / (1 + (shift - 1) * linear)
    torch.testing.assert_close(batch.timesteps, torch.tensor(1000 * expected, dtype=torch.float32))
    torch.testing.assert_close(scheduler.sigmas, torch.tensor([*expected, 0.0], dtype=torch.float32))


def test_noise_of_each_video_is_its_own_seed_s(arguments):
    both = batch_of(num_videos_per_prompt=2)
    both.generator = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    PAN2LatentPreparationStage().forward(both, arguments)
    assert both.latents.shape == (2, 48, 3, 4, 6)
    assert both.latents.dtype == torch.float32
    alone = batch_of()
    alone.generator = [torch.Generator().manual_seed(6)]
    PAN2LatentPreparationStage().forward(alone, arguments)
    assert torch.equal(both.latents[1:], alone.latents)


def test_latents_of_another_shape_are_refused(arguments):
    batch = batch_of(latents=torch.zeros(1, 48, 2, 4, 6))
    with pytest.raises(
        ValueError, match=r"latents have shape \(1, 48, 2, 4, 6\): this request needs \(1, 48, 3, 4, 6\)"
    ):
        PAN2LatentPreparationStage().forward(batch, arguments)


class Encoder:
    """Stands in for the VAE: the mode of an image is its mean colour, spread over the latent channels."""

    config = SimpleNamespace(latents_mean=[0.5] * 48, latents_std=[2.0] * 48)

    def to(self, device):
        return self

    def encode(self, pixels):
        self.pixels = pixels
        mode = pixels.mean().expand(1, 48, 1, pixels.shape[3] // 16, pixels.shape[4] // 16)
        return SimpleNamespace(mode=lambda: mode)


def test_text_to_video_condition_and_mask_are_zero(arguments):
    batch = batch_of(latents=torch.randn(2, 48, 3, 4, 6))
    PAN2ImageConditioningStage(Encoder()).forward(batch, arguments)
    assert batch.image_latent.shape == (2, 49, 3, 4, 6)
    assert not batch.image_latent.any()


def test_image_condition_is_the_normalised_mode_in_frame_0(arguments):
    batch = batch_of(latents=torch.randn(2, 48, 3, 4, 6), pil_image=Image.new("RGB", (50, 50), (255, 255, 255)))
    encoder = Encoder()
    PAN2ImageConditioningStage(encoder).forward(batch, arguments)
    assert encoder.pixels.shape == (1, 3, 1, 64, 96)
    condition = batch.image_latent
    torch.testing.assert_close(condition[:, :48, 0], torch.full((2, 48, 4, 6), (1.0 - 0.5) / 2.0))
    assert (condition[:, 48:, 0] == 1).all()
    assert not condition[:, :, 1:].any()


def test_cover_crop_keeps_the_centre():
    # A wide image on a square canvas: the height is covered, left and right are cut.
    pixels = np.zeros((10, 40, 3), np.uint8)
    pixels[:, 15:25] = 255
    cropped = cover_crop(Image.fromarray(pixels), 32, 32)
    assert cropped.shape == (1, 3, 1, 32, 32)
    assert cropped[..., 8:24].mean() > 0.9
    assert -1.0 <= cropped.min() <= cropped.max() <= 1.0


@pytest.mark.parametrize("size", [(600, 400), (601, 397), (50, 99), (33, 1000)])
@pytest.mark.parametrize("canvas", [(192, 320), (32, 64), (64, 32)])
def test_cover_crop_follows_the_whole_pixel_rule(size, canvas):
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    height, width = canvas
    scale = max(width / size[0], height / size[1])
    scaled = Image.fromarray(pixels).resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.LANCZOS)
    left, top = round((scaled.width - width) / 2), round((scaled.height - height) / 2)
    expected = np.asarray(scaled)[top : top + height, left : left + width]
    actual = (cover_crop(Image.fromarray(pixels), height, width)[0, :, 0].permute(1, 2, 0) + 1) * 127.5
    assert np.abs(actual.numpy() - expected).max() < 1e-2


class Transformer(torch.nn.Module):
    """Predicts the sum of its text, so that guidance shows."""

    def forward(self, hidden_states, encoder_hidden_states, timestep):
        self.calls = [*getattr(self, "calls", []), (hidden_states, encoder_hidden_states, timestep)]
        return encoder_hidden_states.sum(dim=(1, 2)).view(-1, 1, 1, 1, 1).expand(-1, 48, *hidden_states.shape[2:])


@pytest.mark.parametrize(("scale", "velocity"), [(1.0, 6.0), (0.5, 6.0), (2.5, 2.0 + 2.5 * (6.0 - 2.0))])
def test_guidance_takes_texts_of_unequal_length(arguments, monkeypatch, scale, velocity):
    monkeypatch.setattr(denoising, "get_world_group", lambda: SimpleNamespace(is_first_rank=False))
    batch = batch_of(guidance_scale=scale, latents=torch.zeros(2, 48, 3, 4, 6), num_inference_steps=3)
    batch.prompt_embeds = [torch.ones(1, 3, 2)]
    batch.negative_prompt_embeds = [torch.ones(1, 1, 2)]
    batch.image_latent = torch.full((2, 49, 3, 4, 6), 0.25)
    scheduler, transformer = FlowMatchEulerDiscreteScheduler(shift=7.0), Transformer()
    PAN2TimestepPreparationStage(scheduler).forward(batch, arguments)
    PAN2DenoisingStage(transformer, scheduler).forward(batch, arguments)
    # The sigmas run from 1 to 0, so a constant velocity takes zero to minus itself.
    torch.testing.assert_close(batch.latents, torch.full((2, 48, 3, 4, 6), -velocity))
    assert len(transformer.calls) == (6 if scale > 1 else 3)
    hidden, text, timestep = transformer.calls[0]
    assert hidden.shape == (2, 97, 3, 4, 6)
    assert (hidden[:, 48:] == 0.25).all()
    assert text.shape[0] == 2
    torch.testing.assert_close(timestep, torch.tensor([1000.0, 1000.0]))
