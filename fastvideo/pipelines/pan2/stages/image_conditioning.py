# SPDX-License-Identifier: Apache-2.0
"""Turns the first-frame image, if there is one, into condition latents and their mask."""

from __future__ import annotations

import PIL.Image
import torch
import torchvision.transforms.functional as TF
from fastvideo.distributed import get_local_torch_device
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.pipelines.pan2.requests import to_rgb
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.pipelines.stages.base import PipelineStage
from fastvideo.utils import PRECISION_TO_TYPE


def cover_crop(image: PIL.Image.Image, height: int, width: int) -> torch.Tensor:
    """Scales an image to cover the canvas (Lanczos), crops its centre, and returns it as [1, 3, 1, height, width] in
    [-1, 1]. Sizes and offsets are rounded to whole pixels, as in the public implementations.
    """
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    scaled = to_rgb(image).resize(size, PIL.Image.Resampling.LANCZOS)
    fitted = scaled.crop((left, top, left + width, top + height))
    return TF.to_tensor(fitted).mul(2.0).sub(1.0)[None, :, None]


class PAN2ImageConditioningStage(PipelineStage):
    """Sets ``batch.image_latent`` [videos, 48 + 1, T, h, w], float32: condition latents, then the mask.

    Text-to-video: all zero. Image-to-video: the encoder's mode of the image, normalised by the VAE's mean and
    standard deviation, in latent frame 0, whose mask is 1; all else zero.
    """

    performance_component_metric = "vae_encode_time_s"

    def __init__(self, vae) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        assert batch.latents is not None
        videos, channels, frames, height, width = batch.latents.shape
        condition = batch.latents.new_zeros((videos, channels + 1, frames, height, width))
        if batch.pil_image is not None:
            pixels = cover_crop(batch.pil_image, batch.height, batch.width)
            condition[:, :channels, :1] = self._encode(pixels, fastvideo_args)
            condition[:, channels:, :1] = 1.0
        batch.image_latent = condition
        return batch

    def _encode(self, pixels: torch.Tensor, fastvideo_args: FastVideoArgs) -> torch.Tensor:
        device = get_local_torch_device()
        self.vae.to(device)
        dtype = PRECISION_TO_TYPE[fastvideo_args.pipeline_config.vae_precision]
        with torch.autocast(device_type=device.type, enabled=False):
            latents = self.vae.encode(pixels.to(device=device, dtype=dtype)).mode().float()
        mean, std = (
            torch.tensor(values, device=device, dtype=torch.float32).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        if fastvideo_args.vae_cpu_offload:
            self.vae.to("cpu")
        return (latents - mean) / std
