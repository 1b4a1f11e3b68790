# SPDX-License-Identifier: Apache-2.0
"""What ``VideoGenerator`` does differently once PAN2 is registered. Two of its methods are wrapped, nothing else of
upstream:

- construction: a PAN2 checkpoint is checked before any worker starts, and under torchrun the worker runs in this
  process;
- generation: a PAN2 request is checked in the caller's process, since a worker that fails takes its parent down
  with it, and its video appears under its name only when it is complete. Under torchrun the first rank alone writes.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import imageio_ffmpeg
from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.entrypoints.video_generator import VideoGenerator
from fastvideo.pipelines.pan2.checkpoint import check_checkpoint, read_index
from fastvideo.pipelines.pan2.in_process_executor import InProcessExecutor, launched_by_torchrun
from fastvideo.pipelines.pan2.requests import check_output_path, check_request

_INSTALLED = "_pan2_wrapped"


def install() -> None:
    """Wraps the two methods, once per process."""
    if getattr(VideoGenerator, _INSTALLED, False):
        return
    VideoGenerator.from_fastvideo_args = classmethod(_wrap_construction(VideoGenerator.from_fastvideo_args.__func__))
    VideoGenerator._generate_single_video = _wrap_generation(VideoGenerator._generate_single_video)
    setattr(VideoGenerator, _INSTALLED, True)


def _wrap_construction(upstream):
    @functools.wraps(upstream)
    def from_fastvideo_args(cls, fastvideo_args, *, log_queue=None):
        torchrun = launched_by_torchrun()
        if torchrun:
            InProcessExecutor.adopt_world(fastvideo_args)
        if isinstance(fastvideo_args.pipeline_config, PAN2PipelineConfig) and os.path.isdir(fastvideo_args.model_path):
            check_checkpoint(
                fastvideo_args.model_path, read_index(fastvideo_args.model_path), sp_size=fastvideo_args.sp_size
            )
        if torchrun:
            return cls(fastvideo_args, InProcessExecutor, log_stats=False, log_queue=log_queue)
        return upstream(cls, fastvideo_args, log_queue=log_queue)

    return from_fastvideo_args


def _wrap_generation(upstream):
    @functools.wraps(upstream)
    def _generate_single_video(self, prompt, sampling_param=None, fastvideo_args=None, **kwargs) -> dict[str, Any]:
        arguments = fastvideo_args or self.fastvideo_args
        executor = self.executor
        if isinstance(executor, InProcessExecutor) and not executor.is_writer:
            sampling_param.save_video = sampling_param.return_frames = False
        if not isinstance(arguments.pipeline_config, PAN2PipelineConfig):
            return upstream(self, prompt, sampling_param, fastvideo_args, **kwargs)

        check_request(sampling_param)
        if not sampling_param.save_video or arguments.output_type == "latent":
            return upstream(self, prompt, sampling_param, fastvideo_args, **kwargs)
        final = Path(kwargs["output_path"])
        check_output_path(final)
        partial = final.with_name(f".{final.stem}.partial{final.suffix}")
        try:
            result = upstream(self, prompt, sampling_param, fastvideo_args, **(kwargs | {"output_path": str(partial)}))
            _check_written(partial, sampling_param.num_frames)
            os.replace(partial, final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        result["video_path"] = str(final)
        return result

    return _generate_single_video


def _check_written(video: Path, frames: int) -> None:
    """Raises OSError if the encoder left fewer frames than it was given: ffmpeg's failure does not reach imageio."""
    try:
        written, _ = imageio_ffmpeg.count_frames_and_secs(str(video))
    except (OSError, RuntimeError):
        written = 0
    if written != frames:
        raise OSError(
            f"Only {written} of {frames} frames could be written to {video.parent}: check that the disk is not full."
        )
