# SPDX-License-Identifier: Apache-2.0
"""Draws the initial noise."""

from __future__ import annotations

import torch
from fastvideo.distributed import get_local_torch_device
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.pipelines.pan2.requests import TEMPORAL_STRIDE
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.pipelines.stages.base import PipelineStage


class PAN2LatentPreparationStage(PipelineStage):
    """Sets ``batch.latents`` [videos, 48, (frames - 1) / 4 + 1, height / 16, width / 16], float32.

    Each video draws from its own generator, so video i of a request equals the single video of seed + i.
    """

    def forward(self, batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        """Raises ValueError if the caller's own latents have another shape."""
        config = fastvideo_args.pipeline_config
        stride = config.vae_config.arch_config.scale_factor_spatial
        shape = (
            config.dit_config.arch_config.out_channels,
            (batch.num_frames - 1) // TEMPORAL_STRIDE + 1,
            batch.height // stride,
            batch.width // stride,
        )
        if batch.latents is None:
            assert isinstance(batch.generator, list)
            batch.latents = torch.stack([torch.randn(shape, generator=generator) for generator in batch.generator])
        elif tuple(batch.latents.shape) != (batch.num_videos_per_prompt, *shape):
            raise ValueError(
                f"latents have shape {tuple(batch.latents.shape)}: "
                f"this request needs {(batch.num_videos_per_prompt, *shape)}."
            )
        batch.latents = batch.latents.to(device=get_local_torch_device(), dtype=torch.float32)
        batch.raw_latent_shape = tuple(batch.latents.shape)
        return batch
