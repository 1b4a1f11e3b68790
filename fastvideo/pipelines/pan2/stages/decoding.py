# SPDX-License-Identifier: Apache-2.0
"""Decodes the denoised latents to pixels, on the rank that writes them."""

from __future__ import annotations

import torch
from fastvideo.distributed import get_local_torch_device, get_world_group
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.pipelines.stages.decoding import DecodingStage
from fastvideo.utils import PRECISION_TO_TYPE


class PAN2DecodingStage(DecodingStage):
    """Sets ``batch.output`` [videos, 3, frames, height, width] in [0, 1], float32, on rank 0; other ranks get a video
    of no frames.

    FastVideo reads the first rank's result alone, so a second full-size video on every other GPU would only cost
    memory.
    """

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, fastvideo_args: FastVideoArgs) -> torch.Tensor:
        """Decodes normalised latents [videos, 48, T, h, w].

        The float32 latents reach the fast decoder unrounded: it ignores the autocast that upstream's decode follows.
        """
        config = fastvideo_args.pipeline_config
        device = get_local_torch_device()
        self.vae.to(device)
        latents = self._denormalize_latents(latents.to(device=device, dtype=torch.float32), fastvideo_args)
        dtype = PRECISION_TO_TYPE[config.vae_decode_precision or config.vae_precision]
        if config.vae_tiling:
            self.vae.enable_tiling()
        autocast = dtype != torch.float32 and not fastvideo_args.disable_autocast
        with torch.autocast(device_type=device.type, dtype=dtype, enabled=autocast):
            video = self.vae.decode_on_first_rank(latents, is_writer=get_world_group().is_first_rank)
        if video is None:
            videos, _, _, height, width = latents.shape
            stride = config.vae_config.arch_config.scale_factor_spatial
            return latents.new_empty((videos, 3, 0, height * stride, width * stride))
        return (video / 2 + 0.5).clamp(0, 1)

    def forward(self, batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        batch = super().forward(batch, fastvideo_args)
        if fastvideo_args.output_type != "latent":
            for name, value in self.vae.decode_report().items():
                batch.logging_info.add_stage_metric(self._pipeline_stage_name, name, value)
        return batch
