# SPDX-License-Identifier: Apache-2.0
"""What PAN2 can be asked for: every request is checked in the caller's process, before any worker or GPU sees it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import PIL.Image

SPATIAL_MULTIPLE = 32  # VAE 16 x patch 2
TEMPORAL_STRIDE = 4
VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"})


def check_request(request: Any) -> None:
    """Checks a sampling parameter set or a forward batch.

    Args:
        request: anything with FastVideo's sampling fields (height, width, num_frames, num_inference_steps, ...).

    Raises:
        ValueError: a field is out of range or not supported; the message says which and what to give instead.
    """
    for name in ("height", "width"):
        size = getattr(request, name)
        if not _is_positive_int(size) or size % SPATIAL_MULTIPLE:
            nearest = (
                max(SPATIAL_MULTIPLE, round((size or 0) / SPATIAL_MULTIPLE) * SPATIAL_MULTIPLE)
                if _is_number(size)
                else 704
            )
            raise ValueError(
                f"{name} is {size}: PAN2 needs a positive multiple of {SPATIAL_MULTIPLE}, for example {nearest}."
            )
    frames = request.num_frames
    if not _is_positive_int(frames) or (frames - 1) % TEMPORAL_STRIDE:
        nearest = max(0, round((frames - 1) / TEMPORAL_STRIDE)) * TEMPORAL_STRIDE + 1 if _is_number(frames) else 313
        raise ValueError(f"num_frames is {frames}: PAN2 needs 4k + 1 frames, for example {nearest}.")
    for name in ("num_inference_steps", "num_videos_per_prompt"):
        if not _is_positive_int(getattr(request, name)):
            raise ValueError(f"{name} is {getattr(request, name)}: give a whole number of at least 1.")
    for name in ("sigmas", "timesteps"):
        if getattr(request, name, None) is not None:
            raise ValueError(f"PAN2 makes its own noise schedule from num_inference_steps: leave {name} out.")
    if not isinstance(request.seed, int) or request.seed < 0:
        raise ValueError(f"seed is {request.seed}: give a whole number of at least 0.")
    _check_conditioning(request)


def _check_conditioning(request: Any) -> None:
    for name in ("video_path", "last_image", "references"):
        if getattr(request, name, None):
            raise ValueError(
                f"PAN2 is conditioned on one first-frame image: leave {name} out and pass image_path or pil_image."
            )
    if getattr(request, "image_path", None) is not None:
        load_image(request.image_path)


def load_image(path: str | os.PathLike[str]) -> PIL.Image.Image:
    """Reads an image file as RGB, turned upright as its EXIF orientation says.

    Raises:
        ValueError: the file is missing, is a video, has several frames or cannot be read as an image.
    """
    from PIL import ImageOps

    file = Path(path)
    if file.suffix.lower() in VIDEO_SUFFIXES:
        raise ValueError(
            f"image_path {path} is a video: PAN2 takes one still image as first frame; extract a frame and pass that."
        )
    if not file.is_file():
        raise ValueError(f"image_path {path} does not exist or is not a file.")
    try:
        with PIL.Image.open(file) as image:
            frames = getattr(image, "n_frames", 1)
            if frames > 1:
                raise ValueError(f"image_path {path} holds {frames} frames: PAN2 takes one still image as first frame.")
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"image_path {path} cannot be read as an image ({error}).") from error


def check_output_path(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if a file could not be created at ``path``."""
    folder = Path(path).absolute().parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"output_path {path} lies below {existing}, which is a file: choose another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"output_path {path} is not writable (no permission in {existing}): choose another folder.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
