# SPDX-License-Identifier: Apache-2.0
"""What ``decode_parallel`` found: the records, the file in which runs of several world sizes meet, table and plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("halo", "prefix", "pixels")
"""Exchanges whose bytes the decoder counts."""


@dataclass
class Clip:
    """One video length. Lists are by rank; peaks are None on CPUs, exchange times where the profiler saw none.

    ``ms`` is the median of the slowest rank's times, ``sent_bytes`` what each rank sent of every kind of exchange,
    ``psnr_db`` and what follows compare with one rank's video.
    """

    one_rank_ms: float
    one_rank_peak_gib: float | None
    ms: float
    spread_ms: float
    peak_gib: list[float | None]
    exchanges: dict[str, int]
    sent_bytes: dict[str, list[int]]
    profiled_ms: list[float]
    exchange_ms: list[float] | None
    waited_ms: list[float] | None
    psnr_db: float
    worst_frame_db: float
    max_error: float
    uint8_step: int
    problems: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.one_rank_ms / self.ms

    @property
    def highest_peak_gib(self) -> float | None:
        return max((gib for gib in self.peak_gib if gib is not None), default=None)

    def share(self, times_ms: list[float] | None) -> float | None:
        """The largest share of the profiled decode over the ranks."""
        if times_ms is None:
            return None
        return max(part / whole for part, whole in zip(times_ms, self.profiled_ms, strict=True))


@dataclass
class Run:
    """One run of one world size. ``communication`` says how it was measured."""

    world: int
    device: str
    date: str
    versions: dict[str, str]
    size: str
    decoder_width: int
    dtype: str
    backend: str
    communication: str
    nccl_nvls_enable: str | None
    clips: dict[str, Clip]

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Run:
        """The inverse of ``asdict``."""
        return cls(**record | {"clips": {frames: Clip(**clip) for frames, clip in record["clips"].items()}})

    @property
    def setting(self) -> tuple[object, ...]:
        """What runs of several world sizes must have in common to be compared."""
        return self.device, self.versions, self.size, self.decoder_width, self.dtype, self.backend

    @property
    def key(self) -> str:
        """The run's name in the file; a later run of the same name replaces it."""
        found = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.world} x {self.title}, {found}, {self.date}"

    @property
    def title(self) -> str:
        width = "" if self.decoder_width == 256 else f", width {self.decoder_width}"
        return f"{self.device}, {self.size}{width}, {self.backend} {self.dtype}"


def report(run: Run, file: Path) -> None:
    """Adds a run to the JSON file; prints and plots the latest of every world size that can be compared with it."""
    records: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    records.pop(run.key, None)
    records[run.key] = asdict(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(records, indent=1) + "\n")
    comparable = {other.world: other for other in map(Run.from_json, records.values()) if other.setting == run.setting}
    runs = [comparable[world] for world in sorted(comparable)]
    print_table(runs)
    plot(runs, file.with_suffix(".png"))
    print(f"{file}, {file.with_suffix('.png')}")


def print_table(runs: list[Run]) -> None:
    """One line a world size and video length; of several ranks the worst figure."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Wan2.2 decode over ranks, {runs[0].title}", caption=f"exchanges: {runs[0].communication}")
    columns = ["frames", "ranks", "ms", "spread", "1 rank ms", "speed-up", "GiB", "1 rank GiB", "exchanges", "waited"]
    for column in (*columns, *(f"{kind} MiB" for kind in KINDS), "dB", "max error", "steps", "problem"):
        table.add_column(column, justify="right")
    for run in runs:
        for frames, clip in run.clips.items():
            shares = map(clip.share, (clip.exchange_ms, clip.waited_ms))
            sent = [max(clip.sent_bytes.get(kind, [0])) / 2**20 for kind in KINDS]
            table.add_row(
                *(frames, str(run.world)),
                *(f"{ms:.0f}" for ms in (clip.ms, clip.spread_ms, clip.one_rank_ms)),
                f"{clip.speedup:.2f}",
                *("-" if gib is None else f"{gib:.1f}" for gib in (clip.highest_peak_gib, clip.one_rank_peak_gib)),
                *("-" if share is None else f"{share:.1%}" for share in shares),
                *(f"{mib:.1f}" for mib in sent),
                *(f"{clip.psnr_db:.1f}", f"{clip.max_error:.1e}", str(clip.uint8_step)),
                "; ".join(clip.problems),
            )
    Console(width=200).print(table)


def plot(runs: list[Run], file: Path) -> None:
    """Time, speed-up and peak memory against the number of ranks, a line for each video length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    worlds = [run.world for run in runs]
    for frames in sorted({frames for run in runs for frames in run.clips}, key=int):
        clips = {run.world: run.clips[frames] for run in runs if frames in run.clips}
        lines = [
            {world: clip.ms / 1000 for world, clip in clips.items()},
            {world: clip.speedup for world, clip in clips.items()},
            {world: clip.highest_peak_gib for world, clip in clips.items() if clip.highest_peak_gib is not None},
        ]
        for axes, line in zip(panels, lines, strict=True):
            axes.plot(line.keys(), line.values(), "o-", label=f"{frames} frames")
    panels[1].plot(worlds, worlds, "--", color="tab:gray", label="ideal")
    panels[1].legend(fontsize=8)
    for axes, label in zip(panels, ("seconds", "speed-up over one rank", "peak GiB of a rank"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(worlds, map(str, worlds))
        axes.set(xlabel="ranks", ylabel=label, ylim=(0, None))
    figure.suptitle(f"Wan2.2 decode over ranks, {runs[0].title}, {runs[-1].date}", fontsize=10)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
