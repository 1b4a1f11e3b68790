# SPDX-License-Identifier: Apache-2.0
"""Decodes the denoised latents to pixels, on the rank that writes them."""

from __future__ import annotations

import multiprocessing
import os
import shutil

import torch
from fastvideo.distributed import get_local_torch_device, get_world_group
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.logger import init_logger
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.pipelines.stages.decoding import DecodingStage
from fastvideo.utils import PRECISION_TO_TYPE

from wan22_vae_decode.geometry import video_shape

logger = init_logger(__name__)

SHARED_MEMORY = "/dev/shm"


class PAN2DecodingStage(DecodingStage):
    """Sets ``batch.output`` [videos, 3, frames, height, width] in [0, 1], float32, on rank 0; other ranks get a video
    of no frames.

    FastVideo reads the first rank's result alone, so a second full-size video on every other GPU would only cost
    memory. Where nobody asked for the frames themselves, only for a file, the video is quantised as FastVideo's writer
    does it and handed over in host memory, pass by pass: no GPU ever holds the whole of it.
    """

    _for_file = False

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
        on_first_rank = self.vae.frames_on_first_rank if self._for_file else self.vae.decode_on_first_rank
        with torch.autocast(device_type=device.type, dtype=dtype, enabled=autocast):
            video = on_first_rank(latents, is_writer=get_world_group().is_first_rank)
        if video is None:
            videos, _, _, height, width = latents.shape
            stride = config.vae_config.arch_config.scale_factor_spatial
            return latents.new_empty((videos, 3, 0, height * stride, width * stride))
        return video if self._for_file else (video / 2 + 0.5).clamp(0, 1)

    def forward(self, batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        self._for_file = not (batch.return_frames or batch.return_trajectory_decoded) and _host_can_pass_on(batch)
        batch = super().forward(batch, fastvideo_args)
        if fastvideo_args.output_type != "latent":
            for name, value in self.vae.decode_report().items():
                batch.logging_info.add_stage_metric(self._pipeline_stage_name, name, value)
        return batch


def _host_can_pass_on(batch: ForwardBatch) -> bool:
    """False, with one log line, where a video in host memory could not reach the process that writes the file.

    FastVideo's workers hand CPU tensors over in shared memory, of which containers may have as little as 64 MiB.
    """
    hands_over = multiprocessing.parent_process() is not None and os.path.isdir(SHARED_MEMORY)
    if not hands_over or batch.latents is None:
        return True
    videos, _, frames, height, width = batch.latents.shape
    needed = torch.Size(video_shape(videos, frames, height, width)).numel() * torch.float32.itemsize
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed < free:
        return True
    logger.warning_once(
        f"The video stays on the GPU until it is written: {SHARED_MEMORY} has no room for its {needed >> 20} MiB "
        "(docker run --shm-size gives it more)."
    )
    return False
