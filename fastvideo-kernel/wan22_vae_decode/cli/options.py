# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and their checks."""

from __future__ import annotations

import argparse
import math
import os
import re
from pathlib import Path
from typing import Literal

import torch

from wan22_vae_decode import backends, memory
from wan22_vae_decode.decoder import DTYPES
from wan22_vae_decode.errors import BackendUnavailableError, InputError
from wan22_vae_decode.geometry import FRAMES_PER_LATENT, SPATIAL

# Far beyond what fits any memory, and within what torch can count.
MAX_PIXELS, MAX_VIDEO_FRAMES, MAX_COUNT, MAX_CHANNELS = 65536, 1_000_001, 1_000_000, 4096


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda, cuda:1 and so on, or cpu (default: cuda where there is one)")


def add_decoder(parser: argparse.ArgumentParser) -> None:
    """How to decode."""
    add_device(parser)
    parser.add_argument(
        "--backend",
        choices=("auto", *backends.NAMES),
        default="auto",
        help="cuda: this package's kernels; torch: reference ops on any device; auto: the first that runs",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="compute type (default: float16 on CUDA, float32 elsewhere)",
    )
    parser.add_argument(
        "--frames-per-pass",
        type=frames_per_pass,
        default=4,
        metavar="N",
        help=f"latent frames of a pass, 1 to {memory.MAX_FRAMES}, or auto for what memory allows (default: 4)",
    )


def add_size(parser: argparse.ArgumentParser, gpu: str, cpu: str) -> None:
    """The size of a video and of random weights; both are small without a GPU."""
    parser.add_argument(
        "--size", type=size, metavar="HxWxF", help=f"rows, columns and frames of the video (default: {gpu}; CPU: {cpu})"
    )
    parser.add_argument(
        "--channels", type=channels, help="decoder_base_dim of random weights (default: the released 256; CPU: 16)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of random weights and latents (default: 0)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def device(name: str | None) -> torch.device:
    """The device that ``--device`` means.

    Raises:
        InputError: it names none, or one of a kind that nothing here is made for.
        BackendUnavailableError: CUDA is asked for where torch sees no device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", name)
    if named is None:
        raise InputError(f"--device {name} is neither cpu nor cuda, with or without a number such as cuda:1")
    if name == "cpu":
        return torch.device(name)
    count = torch.cuda.device_count()
    if count == 0:
        raise BackendUnavailableError("torch sees no CUDA device: see `wan22-vae-decode doctor`, or use --device cpu")
    if named[1] is None:
        return torch.device("cuda")
    if int(named[1]) >= count:
        raise InputError(f"--device {name}: there are {count} CUDA devices, counted from 0")
    return torch.device("cuda", int(named[1]))


def frames_per_pass(text: str) -> int | Literal["auto"]:
    """``--frames-per-pass``."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not 1 <= int(text) <= memory.MAX_FRAMES:
        raise argparse.ArgumentTypeError(f"{text} is neither auto nor from 1 to {memory.MAX_FRAMES}")
    return int(text)


def path(text: str) -> Path:
    """A file or a folder; pathlib takes an empty name, often that of an unset variable, for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name is no file or folder")
    if "\0" in text:
        raise argparse.ArgumentTypeError("a name with a NUL character is no file or folder")
    return Path(text)


def file(text: str) -> Path:
    """A file; pathlib drops the slash that makes a name a folder's."""
    named = path(text)
    if os.path.basename(text) in ("", ".", ".."):
        raise argparse.ArgumentTypeError(f"{text} names a folder; give the file a name in it")
    return named


def key(text: str) -> str:
    """``--key``: the name of a tensor."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name is no tensor")
    return text


def name(text: str) -> str:
    """What the names of several files begin with."""
    path(text)
    return text


def positive(text: str, most: int = MAX_COUNT) -> int:
    """A whole number from 1 to ``most``."""
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 to {most}")
    return int(text)


def channels(text: str) -> int:
    """``--channels``: such that the weights have a size that a machine may hold."""
    return positive(text, MAX_CHANNELS)


def finite(text: str) -> float:
    """A number, neither infinite nor NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return value


def seed(text: str) -> int:
    """``--seed``: what torch's generators take."""
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise argparse.ArgumentTypeError(f"{text} has more than 64 bits")
    return value


def size(text: str) -> tuple[int, int, int]:
    """``--size``: rows and columns, multiples of 16, and frames, 4k + 1."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is no ROWSxCOLUMNSxFRAMES, for example 704x1248x121")
    rows, cols, frames = map(int, parts)
    if rows < 1 or cols < 1 or rows % SPATIAL or cols % SPATIAL:
        raise argparse.ArgumentTypeError(f"{text}: rows and columns must be multiples of {SPATIAL}")
    if max(rows, cols) > MAX_PIXELS or frames > MAX_VIDEO_FRAMES:
        most = f"{MAX_PIXELS} rows and columns and {MAX_VIDEO_FRAMES} frames"
        raise argparse.ArgumentTypeError(f"{text} is more than {most}")
    if frames % FRAMES_PER_LATENT != 1:
        raise argparse.ArgumentTypeError(f"{text}: frames must be one more than a multiple of {FRAMES_PER_LATENT}")
    return rows, cols, frames


def latents_shape(video: tuple[int, int, int], channels: int) -> tuple[int, int, int, int, int]:
    """[1, z, T, H, W] of the latents of a video of so many rows, columns and frames."""
    rows, cols, frames = video
    return 1, channels, (frames - 1) // FRAMES_PER_LATENT + 1, rows // SPATIAL, cols // SPATIAL
