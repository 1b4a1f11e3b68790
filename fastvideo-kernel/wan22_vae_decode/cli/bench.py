# SPDX-License-Identifier: Apache-2.0
"""``bench``: this decoder's times on this machine, by backend and compute type."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wan22_vae_decode
from wan22_vae_decode import backends
from wan22_vae_decode.cli import options, subject, writable
from wan22_vae_decode.cli.extras import optional
from wan22_vae_decode.decoder import DTYPES, Decoder
from wan22_vae_decode.errors import DecodeError, InputError

GPU_SIZE = (704, 1248, 121)

GPU_ROWS = (
    ("cuda", "float16"),
    ("cuda", "bfloat16"),
    ("torch", "float16"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
)
CPU_ROWS = (("torch", "float32"), ("torch", "bfloat16"))


@dataclass
class Row:
    """One backend and type: seconds of a whole decode (median and range), its rate and its memory on the GPU beside the
    weights that it was given, or the problem that kept it from running.
    """

    backend: str
    dtype: str
    seconds: float | None = None
    spread_s: float | None = None
    frames_per_s: float | None = None
    peak_gib: float | None = None
    problem: str | None = None


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "bench",
        help="this decoder's times by backend and type",
        description="Times whole decodes, after one that warms up: the median in seconds, and its spread, the longest "
        "less the shortest. The torch backend is a reference, written to be read, and no measure of other decoders. "
        "Status 1 if a row could not run.",
    )
    subject.add_options(parser, GPU_SIZE)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="BACKEND:DTYPE",
        type=_row,
        help="what to time, for example cuda:float16 (default: all that is of use on the device)",
    )
    parser.add_argument("--repeats", type=options.positive, default=3, help="timed decodes of each (default: 3)")
    parser.add_argument(
        "--out",
        type=options.name,
        metavar="NAME",
        help="also write NAME.json and the plot NAME.png; NAME may lie in a folder that exists, but be none itself",
    )
    options.add_device(parser)
    options.add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 1 if a row has a problem."""
    device = options.device(arguments.device)
    on_gpu = device.type == "cuda"
    files = () if arguments.out is None else _files(arguments.out)
    given = subject.read(arguments, device, GPU_SIZE)
    rows = []
    for backend, dtype in arguments.only or (GPU_ROWS if on_gpu else CPU_ROWS):
        print(f"timing {backend} {dtype} ...", file=sys.stderr)
        rows.append(_timed(Row(backend, dtype), given, arguments.repeats))
    report = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu",
        "size": "x".join(map(str, given.size)),
        "weights": given.origin,
        "repeats": arguments.repeats,
        "versions": {"wan22_vae_decode": wan22_vae_decode.__version__, "torch": torch.__version__},
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(report, indent=1) if arguments.json else _table(report, rows))
    if files:
        _write(report, rows, *files)
    return 1 if any(row.problem for row in rows) else 0


def _files(out: str) -> tuple[Path, Path]:
    """NAME.json and NAME.png; refuses before anything is timed what could not be written afterwards."""
    name = Path(out)
    # A name that ends in a slash ends in an empty part.
    if os.path.basename(out) in ("", ".", "..") or name.is_dir():
        raise InputError(f"--out {out} names a folder; give the files a name in it")
    if not name.parent.is_dir():
        raise InputError(f"there is no folder {name.parent} for --out")
    files = name.with_name(f"{name.name}.json"), name.with_name(f"{name.name}.png")
    for file in files:
        with _writing(file):
            target = Path(os.path.realpath(file))
            writable.try_file(target)
            writable.try_folder(target.parent)
    return files


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"--out: {file} cannot be written: {error.strerror or error}") from error


def _timed(row: Row, given: subject.Subject, repeats: int) -> Row:
    """The row with its figures, or with its problem."""
    latents, device = given.latents, given.latents.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        decoder = Decoder.from_state_dict(given.state_dict, device=device, dtype=row.dtype, backend=row.backend)
        decoder.decode(latents)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = [_seconds(decoder, latents) for _ in range(repeats)]
    except DecodeError as error:
        row.problem = str(error)
        return row
    row.seconds, row.spread_s = statistics.median(seconds), max(seconds) - min(seconds)
    row.frames_per_s = given.size[2] / row.seconds
    if device.type == "cuda":
        row.peak_gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        torch.cuda.empty_cache()
    return row


def _seconds(decoder: Decoder, latents: Tensor) -> float:
    _wait(latents.device)
    start = time.perf_counter()
    decoder.decode(latents)
    _wait(latents.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(report: dict[str, Any], rows: list[Row]) -> str:
    lines = [f"{report['size']} (rows x columns x frames) on {report['device']}, weights: {report['weights']}"]
    lines.append(f"{'backend':<8} {'dtype':<9} {'seconds':>8} {'spread':>7} {'frames/s':>9} {'peak GiB':>9}")
    for row in rows:
        figures = ((row.seconds, 8, 3), (row.spread_s, 7, 3), (row.frames_per_s, 9, 1), (row.peak_gib, 9, 2))
        cells = " ".join(f"{'-':>{w}}" if value is None else f"{value:>{w}.{digits}f}" for value, w, digits in figures)
        lines.append(f"{row.backend:<8} {row.dtype:<9} {cells}" + (f"  {row.problem}" if row.problem else ""))
    return "\n".join(lines)


def _write(report: dict[str, Any], rows: list[Row], table: Path, plot: Path) -> None:
    """The report and, where matplotlib is there, the plot."""
    with _writing(table), writable.replacing(table) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")
    written = [table]
    pyplot = optional("matplotlib.pyplot", "the plot")
    measured = [row for row in rows if row.seconds is not None]
    if pyplot is not None and measured:
        with _writing(plot), writable.replacing(plot) as partial:
            _plot(pyplot, report, measured, partial)
        written.append(plot)
    print(", ".join(map(str, written)), file=sys.stderr)


def _plot(pyplot: Any, report: dict[str, Any], rows: list[Row], file: Path) -> None:
    pyplot.switch_backend("Agg")
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(rows) + 1.3), layout="constrained")
    names = [f"{row.backend} {row.dtype}" for row in rows]
    bars = axes.barh(names, [row.seconds for row in rows], color="tab:blue")
    axes.bar_label(
        bars, [f"{row.seconds:.2f} s, {row.frames_per_s:.0f} frames/s" for row in rows], padding=3, fontsize=8
    )
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, 1.35 * max(row.seconds or 0 for row in rows)))
    axes.set_title(f"wan22_vae_decode, {report['size']}, {report['device']}, {report['date']}", fontsize=9)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _row(text: str) -> tuple[str, str]:
    backend, _, dtype = text.partition(":")
    if backend not in backends.NAMES or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text} is not of {'|'.join(backends.NAMES)}:{'|'.join(DTYPES)}")
    return backend, dtype
