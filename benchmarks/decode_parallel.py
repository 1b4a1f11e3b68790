# SPDX-License-Identifier: Apache-2.0
"""Times and checks the decode over several ranks against one rank's in the same run.

    torchrun --nproc_per_node 4 benchmarks/decode_parallel.py --frames 121 313

    torchrun --nproc_per_node 2 benchmarks/decode_parallel.py \\
        --device cpu --decoder-width 16 --height 64 --width 64 --frames 9          tries it out over gloo

Rank 0 decodes alone, then all ranks together, over NCCL on GPUs. Frames must be those of one rank: float32 within 1e-5,
float16 at 90 dB or more, uint8 within one step, and the same bits on every rank; bytes of halos must be those of
``halo_bytes``. NCCL is left as the environment sets it up (NCCL_NVLS_ENABLE is recorded).

Communication is measured in one more decode, under torch.profiler: on GPUs the time of NCCL's kernels, which contains
the waiting for other ranks, on CPUs the wall time of the exchanges. A rank's wait is what its exchanges took longer
than each of them took on the rank where it was shortest; halos are longer between two neighbours than at the image's
edge, so this is an upper estimate.

Runs of several world sizes come together in decode_parallel.json and a plot in benchmarks/results. Exit code 1: frames
or bytes are wrong; 2: cannot run, with the reason (torchrun itself turns either into 1).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decode import compare, synchronize, versions
from decode_weights import CONFIG, random_vae
from parallel_report import Clip, Run, report
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from wan22_vae_decode import Decoder, weights
from wan22_vae_decode.accuracy import strict_float32
from wan22_vae_decode.backends.base import Backend
from wan22_vae_decode.geometry import RESNETS, SPATIAL, Architecture

WEIGHT_SET = "branches"
"""The set in which an error inside a resnet's branch shows."""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

METHODS = {"cuda": "time of NCCL's kernels", "cpu": "wall time of the exchanges over gloo"}
"""How communication is measured."""


@dataclass
class Alone:
    """One rank's decodes of a video length; the videos are on the CPU."""

    times_ms: list[float]
    peak_gib: float | None
    video: Tensor
    pixels: Tensor


def parse_arguments() -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=704, help="pixels, a multiple of 16 (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1248, help="pixels, a multiple of 16 (default: %(default)s)")
    parser.add_argument("--frames", type=int, nargs="+", default=[121, 313], help="video lengths, 4k + 1")
    parser.add_argument("--repeats", type=int, default=5, help="timed decodes of each (default: %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "float16", "float32"), default="auto", help="the compute type")
    parser.add_argument("--decoder-width", type=int, default=256, help="decoder_base_dim (default: the released 256)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    return parser.parse_args()


def main() -> int:
    """Measures on every rank; rank 0 reports. See the top for the exit codes."""
    arguments = parse_arguments()
    problem = why_not(arguments)
    if problem is not None:
        if os.environ.get("RANK", "0") == "0":
            print(problem, file=sys.stderr)
        return 2
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with torch.no_grad(), strict_float32():
        run = measure(arguments, device)
    if dist.get_rank() == 0:
        report(run, arguments.out / "decode_parallel.json")
    dist.destroy_process_group()
    return 1 if any(clip.problems for clip in run.clips.values()) else 0


def why_not(arguments: argparse.Namespace) -> str | None:
    """Why this process cannot take part, in one sentence, or None."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        return f"Start this benchmark with torchrun --nproc_per_node N: it did not set {', '.join(missing)}."
    world, local_world = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if arguments.device == "cuda" and local_world > torch.cuda.device_count():
        return (
            f"{local_world} ranks need as many NVIDIA GPUs, but torch sees {torch.cuda.device_count()}; "
            "--device cpu --decoder-width 16 tries the script out."
        )
    if any(size < SPATIAL or size % SPATIAL for size in (arguments.height, arguments.width)):
        return f"Height and width must be multiples of {SPATIAL}, not {arguments.height}x{arguments.width}."
    if any(frames < 1 or frames % 4 != 1 for frames in arguments.frames):
        return f"Video lengths must be 4k + 1 frames, not {arguments.frames}."
    rows = arguments.height // SPATIAL
    if rows < world:
        return f"{arguments.height} pixel rows are {rows} latent rows, too few for {world} ranks."
    return None


# Measuring


def measure(arguments: argparse.Namespace, device: torch.device) -> Run:
    """Every video length, on one rank and on all."""
    arch = Architecture(base=arguments.decoder_width, latent=CONFIG["z_dim"])
    tensors = shared_weights(arch, device)
    latents = {frames: random_latents(arch, frames, arguments, device) for frames in arguments.frames}
    alone: dict[int, Alone] = {}
    if dist.get_rank() == 0:
        decoder = Decoder.from_state_dict(tensors, device=device, dtype=arguments.dtype)
        alone = {frames: decode_alone(decoder, z, arguments.repeats) for frames, z in latents.items()}
        del decoder
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    gathered(None)
    decoder = Decoder.from_state_dict(tensors, device=device, dtype=arguments.dtype, group=dist.group.WORLD)
    clips = {}
    for frames, z in latents.items():
        clips[str(frames)] = decode_together(decoder, z, alone.get(frames), arguments.repeats)
    is_cuda = device.type == "cuda"
    return Run(
        world=dist.get_world_size(),
        device=torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu",
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        versions=versions() | ({"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if is_cuda else {}),
        size=f"{arguments.height}x{arguments.width}",
        decoder_width=arguments.decoder_width,
        dtype=str(decoder.dtype).removeprefix("torch."),
        backend=decoder.backend,
        communication=METHODS[device.type],
        nccl_nvls_enable=os.environ.get("NCCL_NVLS_ENABLE"),
        clips=clips,
    )


def shared_weights(arch: Architecture, device: torch.device) -> dict[str, Tensor]:
    """Random weights, made on rank 0: every device would calibrate its own to other last bits."""
    shapes = weights.expected_shapes(arch)
    if dist.get_rank() == 0:
        tensors = weights.decoder_tensors(random_vae(WEIGHT_SET, device, width=arch.base).state_dict())
    else:
        tensors = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}
    for name in shapes:
        dist.broadcast(tensors[name], src=0)
    return tensors


def random_latents(arch: Architecture, frames: int, arguments: argparse.Namespace, device: torch.device) -> Tensor:
    """Latents [1, z, T, H, W] of a video of so many frames, the same on every rank."""
    shape = (1, arch.latent, (frames - 1) // 4 + 1, arguments.height // SPATIAL, arguments.width // SPATIAL)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def decode_alone(decoder: Decoder, latents: Tensor, repeats: int) -> Alone:
    """What one rank does without the others."""
    times, peak = timed(decoder, latents, repeats, line_up=lambda: None)
    return Alone(times, peak, decoder.decode(latents).cpu(), decoder.decode(latents, torch.uint8).cpu())


def decode_together(decoder: Decoder, latents: Tensor, alone: Alone | None, repeats: int) -> Clip:
    """What all ranks do together, compared with what rank 0 (which has ``alone``) did before."""
    times, peak = timed(decoder, latents, repeats, line_up=lambda: gathered(None))
    slowest = [max(ranks) for ranks in zip(*gathered(times), strict=True)]
    video = decoder.decode(latents)
    stats = gathered(decoder.stats)
    sent = {kind: [rank.bytes[kind] for rank in stats] for kind in stats[0].bytes}
    pixels = decoder.decode(latents, torch.uint8)
    digests = gathered(hashlib.sha256(pixels.cpu().numpy()).hexdigest())
    profiled_ms, exchange_ms = zip(*gathered(profiled(decoder, latents)), strict=True)
    # All ranks take part in every exchange; anything else means that the profiler saw them only in part.
    counts = set(map(len, exchange_ms))
    seen = len(counts) == 1 and (0 not in counts or len(stats) == 1)
    clip = Clip(
        ms=statistics.median(slowest),
        spread_ms=max(slowest) - min(slowest),
        peak_gib=gathered(peak),
        exchanges=stats[0].counts,
        sent_bytes=sent,
        profiled_ms=list(profiled_ms),
        exchange_ms=[sum(times) for times in exchange_ms] if seen else None,
        waited_ms=waits(exchange_ms) if seen else None,
        **gathered(None if alone is None else against(alone, video, pixels))[0],
    )
    clip.problems += wrong_frames(clip, decoder.dtype, digests)
    clip.problems += wrong_bytes(sent.get("halo", []), decoder, latents)
    return clip


def timed(
    decoder: Decoder, latents: Tensor, repeats: int, line_up: Callable[[], object]
) -> tuple[list[float], float | None]:
    """Milliseconds of each of several decodes, after one that warms up, and their peak in GiB (GPUs only).

    ``line_up`` is called before each.
    """
    device = latents.device
    decoder.decode(latents)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeats):
        synchronize(device)
        line_up()
        start = time.perf_counter()
        decoder.decode(latents)
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return times, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def profiled(decoder: Decoder, latents: Tensor) -> tuple[float, list[float]]:
    """Milliseconds of one decode under the profiler, and of each of its exchanges in order."""
    on_gpu = latents.device.type == "cuda"
    gathered(None)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        decoder.decode(latents)
        synchronize(latents.device)
        wall = 1000 * (time.perf_counter() - start)
    prefix = ("ncclDevKernel", "ncclKernel") if on_gpu else ("wan.exchange.",)
    exchanges = [event for event in profiler.events() if event.name.startswith(prefix)]
    exchanges.sort(key=lambda event: event.time_range.start)
    return wall, [event.time_range.elapsed_us() / 1000 for event in exchanges]


def waits(times_ms: tuple[list[float], ...]) -> list[float]:
    """By rank: how much longer its exchanges took than each took on the rank where it was shortest."""
    shortest = sum(min(ranks) for ranks in zip(*times_ms, strict=True))
    return [sum(times) - shortest for times in times_ms]


def gathered(value: Any) -> list[Any]:
    """Every rank's value, once all have come here."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# Checking


def against(alone: Alone, video: Tensor, pixels: Tensor) -> dict[str, Any]:
    """``Clip``'s comparison of all ranks' video, as floats and as bytes, with one rank's."""
    reference = alone.video.to(video.device)
    psnr, worst, _ = compare(video, reference)
    steps = pixels.short().sub_(alone.pixels.to(pixels.device)).abs_().max()
    return {
        "one_rank_ms": statistics.median(alone.times_ms),
        "one_rank_peak_gib": alone.peak_gib,
        "psnr_db": psnr,
        "worst_frame_db": worst,
        "max_error": (video - reference).abs().max().item(),
        "uint8_step": int(steps),
    }


def wrong_frames(clip: Clip, dtype: torch.dtype, digests: list[str]) -> list[str]:
    """What is wrong with the frames, one sentence each."""
    problems = []
    # Written so that NaN is wrong.
    if dtype == torch.float32 and not clip.max_error <= 1e-5:
        problems.append(f"differs by {clip.max_error:.2e} from one rank, more than 1e-5")
    if dtype == torch.float16 and not clip.psnr_db >= 90:
        problems.append(f"is {clip.psnr_db:.1f} dB from one rank, less than 90")
    if clip.uint8_step > 1:
        problems.append(f"differs by {clip.uint8_step} steps in uint8 from one rank, more than 1")
    if len(set(digests)) > 1:
        problems.append("is not the same on every rank")
    return problems


def wrong_bytes(sent: list[int], decoder: Decoder, latents: Tensor) -> list[str]:
    """Ranks whose halos were not those of the formula."""
    frames, cols = latents.shape[2], latents.shape[4]
    row_bytes = halo_bytes(decoder.arch, frames, cols, decoder._ops)
    last = len(sent) - 1
    expected = [row_bytes * ((rank > 0) + (rank < last)) for rank in range(len(sent))]
    return [] if sent == expected else [f"sent {sent} bytes of halos, where the formula gives {expected}"]


def halo_bytes(arch: Architecture, frames: int, cols: int, ops: Backend) -> int:
    """Bytes of all rows that a rank sends to one neighbour in a decode of ``frames`` latent frames, ``cols`` wide.

    One row before each 3x3 conv from the mid block's second resnet on, two before an upsampling conv in Winograd form.
    The video's first frame is never doubled.
    """
    rate, values = 1, 2 * frames * cols * arch.inner
    for block in arch.up_blocks:
        row = cols << block.level
        resnets = block.c_in + (2 * RESNETS - 1) * block.c_out
        values += (rate * (frames - 1) + 1) * row * resnets
        rate *= 2 if block.doubles_time else 1
        # The upsampler's conv works at the block's resolution; in the last block it is the head.
        tiled = block.doubles_space and ops.upsample_method(block.level, block.c_out, block.c_out) == "winograd"
        values += (rate * (frames - 1) + 1) * row * block.c_out * (2 if tiled else 1)
    return values * ops.dtype.itemsize


if __name__ == "__main__":
    sys.exit(main())
