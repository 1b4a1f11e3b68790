# SPDX-License-Identifier: Apache-2.0
"""A paper estimate of the decode time on cards that it was never run on, from the ops measured on an H200.

    python benchmarks/blackwell_estimate.py

Of each op's time, what a matmul of the same arithmetic takes on the same card is called tensor-core-bound and the rest
memory-bound. Each share shrinks by the ratio of the cards' public peak rates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

LATENT_FRAMES = 31  # of 121 frames


class Peaks(NamedTuple):
    """Public peak rates: dense float16 and bfloat16 with fp32 accumulation, and memory."""

    tflops: float
    tbs: float


MEASURED_ON = "H200"
CARDS = {"H200": Peaks(989, 4.8), "B200": Peaks(2250, 8.0), "B300": Peaks(2250, 8.0)}


def shares(report: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a decode of 121 frames that tensor cores and memory bound, from a report of `ops.py`."""
    passes = LATENT_FRAMES / report["latent_frames"]
    tensor_ms = total_ms = 0.0
    for row in report["rows"]:
        matmul_ms = row["flops"] / report["matmul_tflops"] / 1e9
        tensor_ms += passes * row["count"] * min(row["ms"], matmul_ms)
        total_ms += passes * row["count"] * row["ms"]
    return tensor_ms, total_ms - tensor_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ops.json"))
    report = json.loads(parser.parse_args().json.read_text())
    if MEASURED_ON not in report["device"]:
        raise SystemExit(f"the ops were measured on {report['device']}, not on an {MEASURED_ON}")
    tensor_ms, memory_ms = shares(report)
    base = CARDS[MEASURED_ON]
    print(f"{'card':<6} {'TFLOP/s':>8} {'TB/s':>6} {'tensor ms':>10} {'memory ms':>10} {'sum ms':>8}")
    for name, peaks in CARDS.items():
        tensor, memory = tensor_ms * base.tflops / peaks.tflops, memory_ms * base.tbs / peaks.tbs
        note = "measured" if name == MEASURED_ON else "estimate"
        figures = f"{tensor:>10.0f} {memory:>10.0f} {tensor + memory:>8.0f}"
        print(f"{name:<6} {peaks.tflops:>8.0f} {peaks.tbs:>6.1f} {figures}  {note}")


if __name__ == "__main__":
    main()
