# SPDX-License-Identifier: Apache-2.0
"""``decode``: latents in a file to a video file."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from wan22_vae_decode.cli import options
from wan22_vae_decode.cli.checkpoint import read_normalisation, read_weights, vae_folder
from wan22_vae_decode.cli.extras import optional
from wan22_vae_decode.cli.latents import read_latents
from wan22_vae_decode.cli.video_file import VideoFile
from wan22_vae_decode.decoder import Decoder
from wan22_vae_decode.geometry import video_shape


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "decode",
        help="latents to a video file",
        description="Decodes the latents of one video to an H.264 file. Frames are encoded while later ones are "
        "decoded. An interrupted or failed run leaves no file, and an older one of that name as it was.",
    )
    parser.add_argument(
        "latents", type=options.path, help=".safetensors, .pt, .pth or .npy with [z, T, H, W] or [1, z, T, H, W]"
    )
    parser.add_argument(
        "--vae",
        type=options.path,
        required=True,
        help="folder of the VAE, or of a whole pipeline, in diffusers' layout",
    )
    parser.add_argument("-o", "--output", type=options.file, required=True, help=".mp4, .mkv or .mov")
    parser.add_argument(
        "--key", type=options.key, help="name of the tensor, in a file of several (default: latents, or the only one)"
    )
    parser.add_argument(
        "--normalized",
        action="store_true",
        help='the latents are as the transformer leaves them (diffusers: output_type="latent"); they are multiplied by '
        "latents_std and latents_mean added, both from the VAE's config.json. Without this option they are decoded "
        "as they are",
    )
    parser.add_argument("--fps", type=_fps, default=24.0, help="frames a second, 0.001 to 1000 (default: 24)")
    parser.add_argument("--crf", type=_crf, default=18, help="quality, 0 (lossless) to 51 (worst) (default: 18)")
    options.add_decoder(parser)
    options.add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Writes the video; prints what it wrote."""
    device = options.device(arguments.device)
    # What can be refused at once comes before what takes time.
    file = VideoFile(arguments.output, arguments.fps, arguments.crf)
    folder = vae_folder(arguments.vae)
    latents = read_latents(arguments.latents, arguments.key)
    if arguments.normalized:
        mean, std = (v.view(1, -1, 1, 1, 1) for v in read_normalisation(folder, latents.shape[1]))
        latents = (latents.double() * std + mean).float()
    decoder = Decoder.from_state_dict(
        read_weights(folder),
        device=device,
        dtype=arguments.dtype,
        backend=arguments.backend,
        frames_per_pass=arguments.frames_per_pass,
    )
    start = time.perf_counter()
    passes = decoder.stream(latents.to(decoder.device), torch.uint8, on_host=True)
    if not latents.float().isfinite().all():
        print("warning: the latents hold NaN or infinite values, which spoil the video", file=sys.stderr)
    _, _, frames, rows, cols = video_shape(1, *latents.shape[2:])
    with file, _progress(frames) as advance:
        _write(passes, file, advance)
    seconds = time.perf_counter() - start
    result = {
        "file": str(arguments.output),
        "frames": frames,
        "height": rows,
        "width": cols,
        "seconds": round(seconds, 3),
        "backend": decoder.backend,
        "dtype": str(decoder.dtype).removeprefix("torch."),
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        how = f"{result['backend']}, {result['dtype']}"
        print(f"{arguments.output}: {frames} frames of {rows}x{cols} in {seconds:.1f} s ({how})")
    return 0


def _write(passes: Iterator[Tensor], file: VideoFile, advance: Callable[[int], None]) -> None:
    """Encodes each pass in a thread while the next is decoded."""
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1) as thread:
        try:
            for pixels in passes:
                if writing is not None:
                    writing.result()
                writing = thread.submit(file.write, pixels[0])
                advance(pixels.shape[2])
            if writing is not None:
                writing.result()
        except BaseException:
            # The executor waits for its thread, and that may wait for a stuck ffmpeg.
            file.abort()
            raise


@contextlib.contextmanager
def _progress(frames: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; gives what to call with the number of frames done."""
    rich = optional("rich.progress", "the progress bar") if sys.stderr is not None and sys.stderr.isatty() else None
    if rich is None:
        yield lambda count: None
        return
    from rich.console import Console

    with rich.Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("decoding", total=frames)
        yield lambda count: bar.advance(task, count)


def _fps(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Of slower videos ffmpeg makes no .mp4; a .mkv counts milliseconds.
    if not 0.001 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.001 to 1000 frames a second")
    return value


def _crf(text: str) -> int:
    if not text.isdecimal() or int(text) > 51:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 0 to 51")
    return int(text)
