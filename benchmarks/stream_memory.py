# SPDX-License-Identifier: Apache-2.0
"""Peak GPU memory of a decode against the length of the video: decode() beside stream(on_host=True), in one run.

    python benchmarks/stream_memory.py

decode() holds the whole video on the GPU, in float32 or in bytes; stream() holds two passes' pixels, so that its line
is flat but for the latents. Memory counts from what the prepared weights take, with random weights and latents. A
stream's frames are dropped as they come; the first and last frames of both byte videos are compared. Writes JSON and a
plot to benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

import wan22_vae_decode
from wan22_vae_decode import Decoder
from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.random_weights import random_state_dict

MODES = ("decode, float32", "decode, uint8", "stream, uint8 on the host")


@dataclass
class Row:
    """One way to decode: GiB beside the weights, and seconds, by number of frames; lists go with ``Report.frames``."""

    mode: str
    peak_gib: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Report:
    """One run."""

    date: str
    device: str
    versions: dict[str, str]
    size: str
    backend: str
    dtype: str
    weights_gib: float
    frames: list[int]
    rows: list[Row]


def parse_arguments() -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=704, help="pixels, a multiple of 16 (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1248, help="pixels, a multiple of 16 (default: %(default)s)")
    parser.add_argument(
        "--frames", type=int, nargs="+", default=[17, 61, 121, 181, 241, 313], help="video lengths, 4k + 1"
    )
    parser.add_argument("--backend", default="auto", help="as for Decoder.from_state_dict (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="as for Decoder.from_state_dict (default: %(default)s)")
    parser.add_argument("--channels", type=int, default=256, help="decoder_base_dim (default: the released 256)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--replot", type=Path, help="only draw the plot of an earlier run's JSON anew, beside it")
    return parser.parse_args()


def main() -> int:
    """Measures every length and mode; 1 if the modes' bytes differ."""
    arguments = parse_arguments()
    if arguments.replot is not None:
        earlier = json.loads(arguments.replot.read_text())
        report = Report(**earlier | {"rows": [Row(**row) for row in earlier["rows"]]})
        plot(report, arguments.replot.with_suffix(".png"))
        return 0
    if not torch.cuda.is_available():
        print("This benchmark needs an NVIDIA GPU, since it measures one's memory.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    state_dict = random_state_dict(Architecture(arguments.channels), dtype=torch.float32)
    decoder = Decoder.from_state_dict(state_dict, device=device, dtype=arguments.dtype, backend=arguments.backend)
    report = Report(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        device=torch.cuda.get_device_name(device),
        versions={"wan22_vae_decode": wan22_vae_decode.__version__, "torch": torch.__version__},
        size=f"{arguments.height}x{arguments.width}",
        backend=decoder.backend,
        dtype=str(decoder.dtype).removeprefix("torch."),
        weights_gib=torch.cuda.memory_allocated(device) / 2**30,
        frames=sorted(arguments.frames),
        rows=[Row(mode) for mode in MODES],
    )
    alike = True
    for frames in report.frames:
        ends = [measure(row, decoder, frames, (arguments.height // 16, arguments.width // 16)) for row in report.rows]
        same = torch.equal(ends[1], ends[2])
        alike &= same
        figures = ", ".join(f"{row.mode} {row.peak_gib[-1]:.2f} GiB {row.seconds[-1]:.2f} s" for row in report.rows)
        print(f"{frames} frames: {figures}{'' if same else '; THE BYTES DIFFER'}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "stream_memory.json"
    file.write_text(json.dumps(asdict(report), indent=1) + "\n")
    plot(report, file.with_suffix(".png"))
    print(f"{file}, {file.with_suffix('.png')}")
    return 0 if alike else 1


def measure(row: Row, decoder: Decoder, frames: int, size: tuple[int, int]) -> Tensor:
    """Adds a length's figures to a row; returns the video's first and last frame."""
    device = decoder.device
    generator = torch.Generator(device).manual_seed(0)
    baseline = torch.cuda.memory_allocated(device)
    latents = torch.randn(1, decoder.arch.latent, (frames - 1) // 4 + 1, *size, device=device, generator=generator)
    run: Callable[[], Iterator[Tensor]] = {
        MODES[0]: lambda: iter([decoder.decode(latents)]),
        MODES[1]: lambda: iter([decoder.decode(latents, torch.uint8)]),
        MODES[2]: lambda: decoder.stream(latents, torch.uint8, on_host=True),
    }[row.mode]
    for _ in run():  # warms up
        pass
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    first = last = None
    for pixels in run():
        first = pixels[:, :, :1].cpu() if first is None else first
        last = pixels[:, :, -1:].cpu()
        del pixels
    torch.cuda.synchronize(device)
    row.seconds.append(time.perf_counter() - start)
    row.peak_gib.append((torch.cuda.max_memory_allocated(device) - baseline) / 2**30)
    assert first is not None
    assert last is not None
    return torch.cat([first, last], dim=2)


def plot(report: Report, file: Path) -> None:
    """GiB against frames, a line for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for row in report.rows:
        (line,) = axes.plot(report.frames, row.peak_gib, marker="o", label=row.mode)
        axes.annotate(
            f"{row.peak_gib[-1]:.1f}",
            (report.frames[-1], row.peak_gib[-1]),
            textcoords="offset points",
            xytext=(6, -3),
            color=line.get_color(),
            fontsize=8,
        )
    axes.set(xlabel="video frames", ylabel="peak GiB beside the weights", ylim=(0, None))
    title = f"Wan2.2 decode, {report.size}, {report.backend} {report.dtype}, {report.device}, {report.date}"
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
