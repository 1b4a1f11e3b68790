# SPDX-License-Identifier: Apache-2.0
"""Times and checks every way to decode a Wan2.2 video, side by side in one run.

    python benchmarks/decode.py --vllm-omni vllm_omni-0.30.0-py3-none-any.whl

Each decoder gets the same random latents and weights. Accuracy is measured against float32 without TF32 on the first
latent frames, with both weight sets of ``decode_weights``. Peak memory counts everything on the GPU; "own" leaves out
the VAE module that was there before. Writes JSON and a plot to benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import decode_peers
import decode_weights
import torch
from torch import Tensor

from wan22_vae_decode import backends
from wan22_vae_decode.accuracy import strict_float32
from wan22_vae_decode.backends.cuda.backend import CudaBackend

Decode = Callable[[Tensor], Tensor]


@dataclass
class Row:
    """One decoder."""

    name: str
    ours: bool
    ms: dict[str, float] = field(default_factory=dict)
    spread_ms: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)
    own_gib: dict[str, float] = field(default_factory=dict)
    psnr_db: dict[str, float] = field(default_factory=dict)
    worst_frame_db: dict[str, float] = field(default_factory=dict)
    ssim: dict[str, float] = field(default_factory=dict)
    prepare_s: float = 0.0
    repeats_exactly: bool | None = None
    problem: str = ""


@dataclass
class Report:
    """One run."""

    date: str
    device: str
    versions: dict[str, str]
    size: str
    matmul_tflops: float
    copy_tbs: float
    accuracy_frames: int
    rows: list[Row] = field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=704, help="pixels, a multiple of 16 (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1248, help="pixels, a multiple of 16 (default: %(default)s)")
    parser.add_argument(
        "--frames",
        type=int,
        nargs="+",
        default=[121],
        help="video lengths, 4k + 1 (default: 121); all but the first are timed once, and not on the torch backend",
    )
    parser.add_argument(
        "--accuracy-frames", type=int, default=3, help="latent frames to compare (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed decodes of each (default: %(default)s)")
    parser.add_argument("--only", nargs="+", help="names (or their beginnings) of the decoders to run")
    parser.add_argument("--vllm-omni", type=Path, help="wheel of vllm-omni 0.30.0, whose fast path is the peer")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes over a minute)")
    parser.add_argument("--decoder-width", type=int, default=256, help="decoder_base_dim (default: the released 256)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script out (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--replot", type=Path, help="only draw the plot of an earlier run's JSON anew, beside it")
    parser.add_argument("--name", default="decode", help="name of the result files (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Runs every decoder; returns 1 if one of ours had a problem."""
    arguments = parse_arguments()
    if arguments.replot is not None:
        earlier = json.loads(arguments.replot.read_text())
        report = Report(**earlier | {"rows": [Row(**row) for row in earlier["rows"]]})
        plot(report, str(arguments.frames[0]), arguments.replot.with_suffix(".png"))
        return 0
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "This benchmark needs an NVIDIA GPU; --device cpu --decoder-width 16 tries the script out.", file=sys.stderr
        )
        return 2
    matmul, copy = ceilings(device)
    report = Report(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        versions=versions(),
        size=f"{arguments.height}x{arguments.width}",
        matmul_tflops=matmul,
        copy_tbs=copy,
        accuracy_frames=arguments.accuracy_frames,
    )
    print(f"{report.device}: {matmul:.0f} TFLOP/s bf16 matmul, {copy:.2f} TB/s copy", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in decode_weights.SETS:
            measure_set(kind, report, arguments, device, Path(scratch))
    print_table(report, arguments.frames)
    file = save(report, arguments)
    plot(report, str(arguments.frames[0]), file.with_suffix(".png"))
    print(f"{file}, {file.with_suffix('.png')}")
    return 1 if any(row.problem for row in report.rows if row.ours) else 0


def save(report: Report, arguments: argparse.Namespace) -> Path:
    """Writes the JSON: after every decoder, so that a run that is cut short keeps what it measured."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"{arguments.name}.json"
    file.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return file


def measure_set(kind: str, report: Report, arguments: argparse.Namespace, device: torch.device, scratch: Path) -> None:
    """Accuracy of every decoder with one weight set; with the first set, times too."""
    rows, cols = arguments.height // 16, arguments.width // 16
    vae = decode_weights.random_vae(kind, device, width=arguments.decoder_width)
    generator = torch.Generator(device).manual_seed(1)
    latents = torch.randn(1, 48, arguments.accuracy_frames, rows, cols, device=device, generator=generator)
    with torch.no_grad(), strict_float32():
        reference = vae.decode(latents).sample
    print(f"{kind}: reference spans [{reference.min():.2f}, {reference.max():.2f}]", flush=True)
    for name, ours, build in decoders(vae, kind, arguments, device, scratch):
        if arguments.only and not any(name.startswith(prefix) for prefix in arguments.only):
            continue
        row = next((row for row in report.rows if row.name == name), None)
        if row is None:
            row = Row(name, ours)
            report.rows.append(row)
        baseline = allocated(device)
        start = time.perf_counter()
        try:
            with build() as decode:
                synchronize(device)
                row.prepare_s = row.prepare_s or time.perf_counter() - start
                row.psnr_db[kind], row.worst_frame_db[kind], row.ssim[kind] = compare(decode(latents), reference)
                if kind == decode_weights.SETS[0]:
                    for index, frames in enumerate(arguments.frames):
                        # The reference ops are there for their accuracy; long videos take minutes.
                        if index and name.startswith("ours torch"):
                            continue
                        repeats = 1 if index else arguments.repeats
                        measure_time(row, decode, frames, (rows, cols), repeats, device, baseline)
        except Exception as error:
            row.problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        times = ", ".join(f"{frames} frames {ms:.0f} ms" for frames, ms in row.ms.items())
        print(f"  {name}: {row.psnr_db.get(kind, math.nan):.1f} dB {times} {row.problem}", flush=True)
        save(report, arguments)


def decoders(
    vae: Any, kind: str, arguments: argparse.Namespace, device: torch.device, scratch: Path
) -> Iterator[tuple[str, bool, Any]]:
    """Name, whether it is ours, and a context manager that builds it and takes it down again."""
    yield "diffusers fp32 (TF32)", False, lambda: module(vae, torch.float32)
    yield "diffusers bf16", False, lambda: module(vae, torch.bfloat16)
    yield "diffusers bf16 channels_last", False, lambda: module(vae, torch.bfloat16, channels_last=True)
    if not arguments.no_compile and kind == decode_weights.SETS[0]:  # as accurate as without
        yield "diffusers bf16 channels_last compile", False, lambda: module(vae, torch.bfloat16, True, compiled=True)
    for level in ("lossless", "channels_last"):
        yield f"vLLM-Omni {level} bf16", False, lambda level=level: fastpath(vae, level, arguments.vllm_omni, scratch)
    for backend, dtypes in (("torch", ("float32", "bfloat16", "float16")), ("cuda", ("float16", "bfloat16"))):
        if backend == "cuda" and device.type != "cuda":
            continue
        for dtype in dtypes:
            yield f"ours {backend} {dtype}", True, lambda b=backend, d=dtype: ours(vae, b, d, device)


@contextmanager
def module(vae: Any, dtype: torch.dtype, channels_last: bool = False, compiled: bool = False) -> Iterator[Decode]:
    """diffusers' own decode. Its float32 uses TF32 convolutions, as torch does by default."""
    import copy

    copied = copy.deepcopy(vae).to(dtype) if dtype != torch.float32 else vae
    if channels_last:
        for part in copied.modules():
            if isinstance(part, torch.nn.Conv3d | torch.nn.Conv2d):
                is_3d = isinstance(part, torch.nn.Conv3d)
                part.to(memory_format=torch.channels_last_3d if is_3d else torch.channels_last)
    if compiled:
        copied.decoder = torch.compile(copied.decoder)

    def decode(latents: Tensor) -> Tensor:
        latents = latents.to(dtype)
        if channels_last:
            latents = latents.contiguous(memory_format=torch.channels_last_3d)
        return copied.decode(latents).sample

    with torch.no_grad():
        yield decode
    if compiled:
        torch._dynamo.reset()


@contextmanager
def fastpath(vae: Any, level: str, wheel: Path | None, scratch: Path) -> Iterator[Decode]:
    """vLLM-Omni's fast path on a bf16 copy."""
    import copy

    package = decode_peers.load(wheel, scratch)
    copied = copy.deepcopy(vae).to(torch.bfloat16)
    report = package.install_wan_vae_fastpath(copied, level=level)
    if not report.installed:
        raise decode_peers.PeerAbsentError(report.reason)
    with torch.no_grad():
        yield lambda latents: package.decode_frames(copied, latents.to(torch.bfloat16))


@contextmanager
def ours(vae: Any, backend: str, dtype: str, device: torch.device) -> Iterator[Decode]:
    """This package's decoder; float32 of the torch backend uses TF32 as torch does by default."""
    from wan22_vae_decode import Decoder

    decoder = Decoder.from_state_dict(vae.state_dict(), device=device, dtype=dtype, backend=backend)
    yield decoder.decode


def measure_time(
    row: Row, decode: Decode, frames: int, size: tuple[int, int], repeats: int, device: torch.device, baseline: int
) -> None:
    """Median time of whole decodes after one that warms up, and their peak memory."""
    generator = torch.Generator(device).manual_seed(2)
    latents = torch.randn(1, 48, (frames - 1) // 4 + 1, *size, device=device, generator=generator)
    first = decode(latents) if row.ours else None
    if first is None:
        decode(latents[:, :, :4])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # The warm-up's video lies there, beside what a decode takes, until it is compared with another.
    held = first.numel() * first.element_size() if first is not None else 0
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        video = decode(latents)
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
        if first is not None and row.repeats_exactly is not False:
            row.repeats_exactly = torch.equal(first, video)
            first = first if repeats > 1 else None
        del video
    key = str(frames)
    row.ms[key], row.spread_ms[key] = statistics.median(times), max(times) - min(times)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        row.peak_gib[key], row.own_gib[key] = (peak - held) / 2**30, (peak - held - baseline) / 2**30


def compare(video: Tensor, reference: Tensor) -> tuple[float, float, float]:
    """PSNR over everything, PSNR of the worst frame (both in dB, of the range 2), and mean SSIM of three frames."""
    from skimage.metrics import structural_similarity

    video = video.float()
    if not torch.isfinite(video).all():
        return math.nan, math.nan, math.nan
    errors = (video.double() - reference.double()).square().mean(dim=(0, 1, 3, 4)).clamp_min(1e-30)
    psnr = 10 * torch.log10(4 / errors)
    whole = 10 * math.log10(4 / errors.mean().item())
    picks = sorted({0, video.shape[2] // 2, video.shape[2] - 1})
    frames = [tensor[0, :, picks].permute(1, 2, 3, 0).cpu().numpy() for tensor in (video, reference)]
    ssim = [structural_similarity(a, b, data_range=2.0, channel_axis=-1) for a, b in zip(*frames, strict=True)]
    return whole, psnr.min().item(), float(statistics.mean(ssim))


def ceilings(device: torch.device) -> tuple[float, float]:
    """bf16 matmul rate in TFLOP/s and copy rate in TB/s (bytes read plus written), on random data."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.randn(2**30 if device.type == "cuda" else 2**20, device=device)
    target = torch.empty_like(source)
    matmul = 2 * size**3 / seconds(lambda: a @ b, device) / 1e12
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), device) / 1e12
    return matmul, copy


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Mean time of a call, after three that warm up."""
    for _ in range(3):
        run()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on the GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def float16_kernels() -> CudaBackend | None:
    """The kernels on the current GPU; None, and a line on stderr, where there is no GPU."""
    if not torch.cuda.is_available():
        print("This benchmark needs an NVIDIA GPU with CUDA kernels: `wan22-vae-decode doctor` tells.", file=sys.stderr)
        return None
    backend = backends.create("cuda", torch.device("cuda", torch.cuda.current_device()), torch.float16)
    assert isinstance(backend, CudaBackend)
    return backend


def write_report(file: Path, device: str | None = None, **figures: object) -> None:
    """Writes figures of a device (None: of the current GPU) as JSON, with what they depend on, and prints the file's
    name.
    """
    report = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device or torch.cuda.get_device_name(),
        "versions": versions(),
        **figures,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(file)


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import diffusers

    import wan22_vae_decode

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "wan22_vae_decode": wan22_vae_decode.__version__,
    }
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return found


def print_table(report: Report, lengths: list[int]) -> None:
    """The run as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Wan2.2 decode, {report.size}, {report.device}")
    table.add_column("decoder")
    for frames in lengths:
        for title in (f"{frames} ms", "spread", "GiB", "own GiB"):
            table.add_column(title, justify="right")
    for title in ("dB", "dB branches", "worst", "SSIM", "prepare s", "problem"):
        table.add_column(title, justify="right")
    for row in report.rows:
        cells = [row.name]
        for frames in map(str, lengths):
            for values in (row.ms, row.spread_ms):
                cells.append(f"{values[frames]:.0f}" if frames in values else "-")
            for values in (row.peak_gib, row.own_gib):
                cells.append(f"{values[frames]:.1f}" if frames in values else "-")
        for kind in decode_weights.SETS:
            cells.append(f"{row.psnr_db.get(kind, math.nan):.1f}")
        cells.append(f"{min(row.worst_frame_db.values(), default=math.nan):.1f}")
        cells.append(f"{min(row.ssim.values(), default=math.nan):.5f}")
        table.add_row(*cells, f"{row.prepare_s:.1f}", row.problem[:60])
    Console(width=200).print(table)


def plot(report: Report, frames: str, file: Path) -> None:
    """Seconds of each decoder as bars, with its accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted((row for row in report.rows if frames in row.ms and not row.problem), key=lambda row: -row.ms[frames])
    seconds = [row.ms[frames] / 1000 for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    bars = axes.barh([row.name for row in rows], seconds, color=["tab:red" if row.ours else "tab:gray" for row in rows])
    labels = [f"{time:.2f} s, {min(row.psnr_db.values()):.1f} dB" for time, row in zip(seconds, rows, strict=True)]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set(xlim=(0, 1.2 * max(seconds)), xlabel=f"seconds for {frames} frames; PSNR against strict float32")
    axes.set_title(f"Wan2.2 decode, {report.size}, {report.device}, {report.date}", fontsize=10)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
