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
import subprocess
import uuid
from pathlib import Path
from typing import Any

import imageio_ffmpeg
from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.entrypoints.video_generator import VideoGenerator
from fastvideo.pipelines.pan2.checkpoint import check_checkpoint, is_pan2_folder, read_index
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
        if os.path.isdir(fastvideo_args.model_path):
            _check_folder(fastvideo_args)
        if torchrun:
            return cls(fastvideo_args, InProcessExecutor, log_stats=False, log_queue=log_queue)
        return upstream(cls, fastvideo_args, log_queue=log_queue)

    return from_fastvideo_args


def _check_folder(fastvideo_args) -> None:
    """Raises ValueError for a PAN2 checkpoint folder that cannot be generated from."""
    folder, config = fastvideo_args.model_path, fastvideo_args.pipeline_config
    if not isinstance(config, PAN2PipelineConfig):
        if is_pan2_folder(folder):
            raise ValueError(
                f"{folder} holds a PAN2 checkpoint, but FastVideo takes it for another model by its name "
                f"({type(config).__name__}): rename the folder."
            )
        return
    check_checkpoint(folder, read_index(folder), sp_size=fastvideo_args.sp_size)
    lora = fastvideo_args.lora_path
    if lora and not os.path.exists(lora) and (os.path.isabs(lora) or lora.startswith(".")):
        raise ValueError(f"lora_path {lora} does not exist.")


def _wrap_generation(upstream):
    @functools.wraps(upstream)
    def _generate_single_video(self, prompt, sampling_param=None, fastvideo_args=None, **kwargs) -> dict[str, Any]:
        arguments = fastvideo_args or self.fastvideo_args
        executor = self.executor
        final = Path(kwargs["output_path"])
        if isinstance(arguments.pipeline_config, PAN2PipelineConfig):
            _check_on_every_rank(executor, sampling_param, final)
        if isinstance(executor, InProcessExecutor) and not executor.is_writer:
            sampling_param.save_video = sampling_param.return_frames = False
        saves = sampling_param.save_video and arguments.output_type != "latent"
        if not saves or not isinstance(arguments.pipeline_config, PAN2PipelineConfig):
            return upstream(self, prompt, sampling_param, fastvideo_args, **kwargs)

        partial = final.with_name(f".partial-{uuid.uuid4().hex[:8]}{final.suffix}")
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


def _check_on_every_rank(executor, sampling_param, final: Path) -> None:
    """Raises ValueError on all ranks if the request fails on any of them: one that went on alone would pair its next
    collective with another request's.
    """
    problem = None
    try:
        check_request(sampling_param)
        if sampling_param.save_video and getattr(executor, "is_writer", True):
            check_output_path(final)
    except ValueError as error:
        problem = str(error)
    problems = executor.gather(problem) if isinstance(executor, InProcessExecutor) else [problem]
    for found in problems:
        if found is not None:
            raise ValueError(found)


def _check_written(video: Path, frames: int) -> None:
    """Raises OSError if the encoder left fewer frames than it was given: ffmpeg's failure does not reach imageio."""
    # One line per packet, without decoding; what ffmpeg's log says of frames changes with its version.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", video, "-map", "0:v:0", "-c", "copy"]
    packets = subprocess.run([*command, "-f", "framecrc", "-"], capture_output=True, text=True, check=False).stdout
    written = sum(not line.startswith("#") for line in packets.splitlines())
    if written != frames:
        raise OSError(f"Only {written} of {frames} frames could be written to {video.parent}: is the disk full?")
