# SPDX-License-Identifier: Apache-2.0
"""What PAN2 can be asked for: every request is checked in the caller's process, before any worker or GPU sees it."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageOps

SPATIAL_MULTIPLE = 32  # VAE 16 x patch 2
TEMPORAL_STRIDE = 4
VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"})
# What PIL raises, by format, for files that are damaged or no images.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    struct.error,
    PIL.Image.DecompressionBombError,
)
# FastVideo's sampling fields that would have no effect here.
UNSUPPORTED = (
    "cfg_normalization",
    "enable_teacache",
    "guidance_rescale",
    "return_trajectory_decoded",
    "return_trajectory_latents",
    "use_embedded_guidance",
)


def check_request(request: Any) -> PIL.Image.Image | None:
    """Checks a sampling parameter set or a forward batch.

    Args:
        request: anything with FastVideo's sampling fields (height, width, num_frames, num_inference_steps, ...).

    Returns:
        The first-frame image, which had to be decoded to be checked, or None.

    Raises:
        ValueError: a field is out of range or not supported; the message says which and what to give instead.
    """
    for name in ("height", "width"):
        size = getattr(request, name)
        if not _is_positive_int(size) or size % SPATIAL_MULTIPLE:
            nearest = max(1, round(size / SPATIAL_MULTIPLE)) * SPATIAL_MULTIPLE if _is_finite(size) else 704
            needed = f"PAN2 needs a positive multiple of {SPATIAL_MULTIPLE}"
            raise ValueError(f"{name} is {size}: {needed}, for example {nearest}.")
    frames = request.num_frames
    if not _is_positive_int(frames) or (frames - 1) % TEMPORAL_STRIDE:
        nearest = max(0, round((frames - 1) / TEMPORAL_STRIDE)) * TEMPORAL_STRIDE + 1 if _is_finite(frames) else 313
        raise ValueError(f"num_frames is {frames}: PAN2 needs 4k + 1 frames, for example {nearest}.")
    for name in ("num_inference_steps", "num_videos_per_prompt", "fps"):
        value = getattr(request, name, 1)
        if not _is_positive_int(value):
            raise ValueError(f"{name} is {value}: give a whole number of at least 1.")
    for name in ("sigmas", "timesteps"):
        if getattr(request, name, None) is not None:
            raise ValueError(f"PAN2 makes its own noise schedule from num_inference_steps: leave {name} out.")
    # Video i takes seed + i, and torch's generators take 64 bits.
    if not isinstance(request.seed, int) or not 0 <= request.seed < 2**63 - request.num_videos_per_prompt:
        raise ValueError(f"seed is {request.seed}: give a whole number from 0 to 2^63 - num_videos_per_prompt.")
    guidance = getattr(request, "guidance_scale", 1.0)
    if not _is_finite(guidance):
        raise ValueError(f"guidance_scale is {guidance}: give a finite number; up to 1 there is no guidance.")
    for name in UNSUPPORTED:
        if getattr(request, name, None):
            raise ValueError(f"PAN2 has no {name}: leave it out.")
    return _first_frame(request)


def _first_frame(request: Any) -> PIL.Image.Image | None:
    for name in ("video_path", "last_image", "references"):
        if getattr(request, name, None):
            raise ValueError(f"PAN2 has no {name}: leave it out; image_path or pil_image give the first frame.")
    path, image = getattr(request, "image_path", None), getattr(request, "pil_image", None)
    if path is not None and image is not None:
        raise ValueError("Both image_path and pil_image are given: PAN2 takes one first-frame image.")
    if path is not None:
        return load_image(path)
    if image is not None and not isinstance(image, PIL.Image.Image):
        raise ValueError(f"pil_image is a {type(image).__name__}: give a PIL image, or the file's path as image_path.")
    return image


def load_image(path: str | os.PathLike[str]) -> PIL.Image.Image:
    """Reads an image file as 8-bit RGB, turned upright as its EXIF orientation says.

    Raises:
        ValueError: the file is missing, is a video, is animated or cannot be read as an image.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"image_path is a {type(path).__name__}: give the path of one image file.")
    file = Path(path)
    if file.suffix.lower() in VIDEO_SUFFIXES:
        raise ValueError(f"image_path {path} is a video: PAN2 takes one still image as first frame; extract one.")
    if not file.is_file():
        raise ValueError(f"image_path {path} does not exist or is not a file.")
    try:
        with PIL.Image.open(file) as image:
            # Many cameras write JPEGs with a preview beside the picture, which PIL calls MPO.
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            picture = to_rgb(PIL.ImageOps.exif_transpose(image)) if frames == 1 else None
    except UNREADABLE as error:
        raise ValueError(f"image_path {path} cannot be read as an image ({error}).") from error
    if picture is None:
        raise ValueError(f"image_path {path} holds {frames} frames: PAN2 takes one still image as first frame.")
    return picture


def to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """8-bit RGB. PIL clips 16-bit greys, kept in the modes I and I;16, to white; here they are scaled."""
    if image.mode.startswith("I") and image.getextrema()[1] > 255:  # type: ignore[operator]
        image = image.convert("I").point(lambda grey: grey / 257).convert("L")
    return image.convert("RGB")


def check_output_path(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if a file could not be created at ``path``."""
    file = Path(path).absolute()
    existing = next(parent for parent in file.parents if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"output_path {path} lies below {existing}, which is a file: choose another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"output_path {path} is not writable (no permission in {existing}): choose another folder.")
    longest = os.pathconf(existing, "PC_NAME_MAX")
    if len(os.fsencode(file.name)) > longest:
        raise ValueError(f"The video's file name has over {longest} bytes: give an output_path that ends in NAME.mp4.")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
