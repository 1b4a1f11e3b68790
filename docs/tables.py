# SPDX-License-Identifier: Apache-2.0
"""Writes the measured tables of accuracy.md and performance.md from the JSON files in benchmarks/results.

    python docs/tables.py [--check]

A block of a page between ``<!-- table: NAME -->`` and ``<!-- /table -->`` belongs to the function of that name below;
whatever stands there is replaced. --check writes nothing and exits with 1 if a page disagrees with the JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGES = ("accuracy.md", "performance.md")

BLOCK = re.compile(r"<!-- table: (?P<name>\S+) -->\n.*?<!-- /table -->", re.DOTALL)

LATENT_FRAMES = 31
"""Of 121 frames, which ops.json adds up to."""

KINDS = {
    "Winograd convs, norm and SiLU included": ("winograd_conv3d",),
    "direct 3x3x3 convs": ("causal_conv3d",),
    "upsampling convs": ("upsample phases", "upsample winograd"),
    "norm, SiLU and pad of direct convs and the head": ("norm_silu_pad", "causal_pad"),
    "1x1x1 convs": ("pointwise_conv",),
    "time convs": ("time_double",),
    "head": ("output_head",),
    "attention": ("attention",),
}
"""What a line of the table of ops adds up."""

LEAST_STAGE_S = 0.01
"""Of a pipeline's stage that is worth a line."""

WINOGRAD_PARTS = ("winograd_input", "winograd GEMM", "winograd_output")
UPSAMPLE_PARTS = ("upsample_input", "upsample GEMM", "upsample_output")


def main() -> int:
    """Rewrites the pages; with --check returns 1 if that would change one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = []
    for name in PAGES:
        page = DOCS / name
        before = page.read_text(encoding="utf-8")
        after = rewritten(before, RESULTS)
        if after != before:
            stale.append(name)
            if not check:
                page.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'rewritten'}: {', '.join(stale)}", file=sys.stderr)
    return 1 if check and stale else 0


def rewritten(page: str, results: Path) -> str:
    """A page's text with its blocks made anew from the results in a folder."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- table: {name} -->\n{TABLES[name](results).strip()}\n<!-- /table -->"

    return BLOCK.sub(block, page)


Table = Callable[[dict[str, Any]], str]


def _made_of(name: str, part: str | None = None, plot: str = "") -> Callable[[Table], Callable[[Path], str]]:
    """Makes of a function of NAME.json one of the folder of results, which says so if it holds none, or not this part
    of it. The plot follows, under this description, where the run left one.
    """

    def decorate(table: Table) -> Callable[[Path], str]:
        @functools.wraps(table)
        def made(results: Path) -> str:
            file, picture = results / f"{name}.json", results / f"{name}.png"
            report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
            if not report or (part is not None and not report.get(part)):
                return f"*No result is committed yet; `benchmarks/{name}.py` writes it.*"
            shown = plot and picture.exists()
            return table(report) + (f"\n\n![{plot}](../benchmarks/results/{name}.png)" if shown else "")

        return made

    return decorate


# decode.json


@_made_of("decode")
def decode_accuracy(report: dict[str, Any]) -> str:
    """PSNR and SSIM of every decoder with both weight sets."""
    sets = _sets(report)
    rows = []
    for row in report["rows"]:
        if not row["psnr_db"]:
            continue
        rows.append(
            [
                _name(row),
                *(_figure(row["psnr_db"].get(kind), 1) for kind in sets),
                *(_figure(row["worst_frame_db"].get(kind), 1) for kind in sets),
                _figure(min(row["ssim"].values(), default=None), 6),
            ]
        )
    header = ["decoder", *(f"dB, {kind}" for kind in sets), *(f"worst frame, {kind}" for kind in sets), "least SSIM"]
    frames = report["accuracy_frames"]
    note = f"The first {frames} latent frames ({4 * frames - 3} frames of video) at {report['size']}."
    return f"{_origin(report)} {note}\n\n{_table(header, rows)}"


@_made_of("decode")
def decode_time(report: dict[str, Any]) -> str:
    """Seconds and memory of every decoder."""
    lengths = sorted({length for row in report["rows"] for length in row["ms"]}, key=int)
    header = ["decoder"]
    for length in lengths:
        header += [f"{length} frames: s", f"{length}: GiB", f"{length}: own GiB"]
    rows = []
    for row in report["rows"]:
        cells = [_name(row)]
        for length in lengths:
            ms = row["ms"].get(length)
            cells.append(row["problem"][:60] if row["problem"] and ms is None else _figure(ms and ms / 1000, 2))
            cells += [_figure(row[kind].get(length), 1) for kind in ("peak_gib", "own_gib")]
        rows.append([*cells, _figure(min(row["psnr_db"].values(), default=None), 1)])
    ceilings = (
        f"{report['matmul_tflops']:.0f} TFLOP/s bf16 matmul and {report['copy_tbs']:.2f} TB/s copy in the same run"
    )
    return f"{_origin(report)} {report['size']}; {ceilings}.\n\n{_table([*header, 'dB, harder set'], rows)}"


# ops.json


@_made_of("ops")
def ops(report: dict[str, Any]) -> str:
    """What the ops of a decode of 121 frames add up to, by kind."""
    passes = LATENT_FRAMES / report["latent_frames"]
    counted = [row | {"total": passes * row["count"] * row["ms"]} for row in report["rows"] if row["count"]]
    whole = sum(row["total"] for row in counted)
    known = {op for group in KINDS.values() for op in group}
    groups = KINDS | {row["op"]: (row["op"],) for row in counted if row["op"] not in known}
    lines = []
    for kind, names in groups.items():
        rows = [row for row in counted if row["op"] in names]
        total = sum(row["total"] for row in rows)
        if not rows:
            continue
        bound = "tensor cores" if sum(row["flops"] for row in rows) else "memory"
        reached = sum(row["total"] * row["share"] for row in rows) / total
        work = _tflop(rows, passes)
        cells = [kind, f"{total:.0f}", _percent(total / whole), f"{work:.0f}" if work else "-", bound]
        lines.append((total, [*cells, _percent(reached)]))
    header = ["ops", "ms of 121 frames", "share", "TFLOP", "ceiling", "reached"]
    table = _table(header, [cells for _, cells in sorted(lines, key=lambda line: -line[0])])
    setting = f"{report['dtype']}, passes of {report['latent_frames']} latent frames, slabs of {report['slab']}"
    ceilings = f"ceilings of the same run: {report['matmul_tflops']:.0f} TFLOP/s, {report['copy_tbs']:.2f} TB/s"
    sums = f"{whole:.0f} ms, {_tflop(counted, passes):.0f} TFLOP"
    return f"{_origin(report)} {setting}; {ceilings}. Sum: {sums}.\n\n{table}"


def _tflop(rows: Iterable[dict[str, Any]], passes: float) -> float:
    return sum(passes * row["count"] * row["flops"] for row in rows) / 1e12


@_made_of("ops")
def winograd_kernels(report: dict[str, Any]) -> str:
    """The three kernels of a Winograd conv, on one band of tiles of each layer shape."""
    return _kernels(report, WINOGRAD_PARTS, "band")


@_made_of("ops")
def upsample_kernels(report: dict[str, Any]) -> str:
    """The three kernels of an upsampling conv in Winograd form, on one slab of each layer shape."""
    return _kernels(report, UPSAMPLE_PARTS, "slab")


def _kernels(report: dict[str, Any], parts: Sequence[str], first: str) -> str:
    rows = []
    for shape in [row["shape"] for row in report["rows"] if row["op"] == parts[0]]:
        of_shape = {row["op"]: row for row in report["rows"] if row["shape"] == shape}
        cells = [f"{of_shape[op]['ms']:.2f} ({_percent(of_shape[op]['share'])})" for op in parts if op in of_shape]
        rows.append([f"`{shape}`", *cells])
    return f"{_origin(report)}\n\n{_table([first, *(f'{op}, ms' for op in parts)], rows)}"


# energy.json


@_made_of("energy")
def energy(report: dict[str, Any]) -> str:
    """Power and energy of the largest kernels and of whole decodes."""
    rows = []
    for row in report["rows"]:
        work = "-"
        if row["flops"]:
            work = f"{1e12 * row['joules'] / row['flops']:.2f} pJ/FLOP"
        elif row["nbytes"]:
            work = f"{1e12 * row['joules'] / row['nbytes']:.0f} pJ/byte"
        figures = [f"{row['ms']:.2f}", f"{row['watts']:.0f}", f"{row['mhz']:.0f}", f"{row['joules']:.3g}", work]
        rows.append([f"`{row['name']}`", *figures])
    header = ["in a loop", "ms", "W", "MHz", "J", "that is"]
    return f"{_origin(report)} Power limit {report['limit_watts']:.0f} W.\n\n{_table(header, rows)}"


# winograd_levels.json


@_made_of("winograd_levels")
def winograd_levels(report: dict[str, Any]) -> str:
    """Accuracy and time of the decode by the levels that run in Winograd form."""
    sets = _sets(report)
    rows = []
    for row in report["rows"]:
        tiles = ", ".join(f"4x{columns} at {level}" for level, columns in sorted(row["columns"].items()))
        if row.get("float_products"):
            tiles += f"; products float32 at {' and '.join(map(str, row['float_products']))}"
        psnr = [_figure(row["psnr_db"].get(kind), 1) for kind in sets]
        rows.append([tiles or "none", *psnr, _figure(row["ms"] / 1000, 2)])
    header = ["tiles, and levels", *(f"dB, {kind}" for kind in sets), "121 frames, s"]
    return f"{_origin(report)} float16.\n\n{_table(header, rows)}"


# rounding.json


@_made_of("rounding")
def rounding(report: dict[str, Any]) -> str:
    """Accuracy with each rounding left out, and with other forms of the convs."""
    frames, rows, cols = report["latents"]
    now = report["rows"][0]["psnr_db"]
    lines = [[row["name"], f"{row['psnr_db']:.2f}", f"{row['psnr_db'] - now:+.2f}"] for row in report["rows"]]
    note = f"{frames} latent frames of {rows}x{cols}, the harder set."
    return f"{_origin(report)} {note}\n\n{_table(['float16, emulated', 'dB', 'difference'], lines)}"


# stream_memory.json and decode_parallel.json


@_made_of("stream_memory", plot="Peak memory against frames")
def stream_memory(report: dict[str, Any]) -> str:
    """Peak memory by length and way to decode."""
    header = ["GiB beside the weights", *(f"{frames} frames" for frames in report["frames"])]
    table = _table(header, [[row["mode"], *(f"{gib:.1f}" for gib in row["peak_gib"])] for row in report["rows"]])
    note = f"{report['size']}, {report['backend']} {report['dtype']}."
    return f"{_origin(report)} {note}\n\n{table}"


@_made_of("decode_parallel", plot="Time and memory against ranks")
def decode_parallel(records: dict[str, Any]) -> str:
    """The latest run of every number of ranks that can be compared with the last run of all."""
    last = list(records.values())[-1]
    setting = ("device", "versions", "size", "decoder_width", "dtype", "backend")
    runs = {run["world"]: run for run in records.values() if all(run[key] == last[key] for key in setting)}
    header = ["ranks", "frames", "s", "speed-up", "GiB of a rank", "halo MiB", "prefix MiB", "pixels MiB", "dB to one"]
    rows = []
    for world, run in sorted(runs.items()):
        for frames, clip in run["clips"].items():
            sent = [max(clip["sent_bytes"].get(kind, [0])) / 2**20 for kind in ("halo", "prefix", "pixels")]
            peak = max((gib for gib in clip["peak_gib"] if gib is not None), default=None)
            speedup = clip["one_rank_ms"] / clip["ms"]
            figures = [f"{clip['ms'] / 1000:.2f}", f"{speedup:.2f}", _figure(peak, 1), *(f"{mib:.0f}" for mib in sent)]
            rows.append([str(world), frames, *figures, _figure(clip["psnr_db"], 1)])
    note = f"{last['size']}, {last['backend']} {last['dtype']}. Bytes are those that the busiest rank sent."
    table = _table(header, rows)
    return f"{_origin(last)} {note}\n\n{table}"


# pan2_fusions.json and pan2.json


@_made_of("pan2_fusions", part="ops")
def pan2_fusions(report: dict[str, Any]) -> str:
    """The transformer's elementwise groups, three ways."""
    rows = [
        [
            f"`{op['name']}`",
            f"{op['gigabytes']:.2f}",
            *(f"{op[way]:.2f}" for way in ("eager_ms", "compiled_ms", "fused_ms")),
            _percent(op["copy_share"]),
        ]
        for op in report["ops"]
    ]
    header = ["group", "GB moved", "torch, ms", "torch.compile, ms", "Triton, ms", "share of copy"]
    note = f"{report['tokens']} tokens x 4096 in bf16."
    return f"{_origin(report)} {note}\n\n{_table(header, rows)}"


@_made_of("pan2_fusions", part="forward")
def pan2_forward(report: dict[str, Any]) -> str:
    """One evaluation of the whole transformer, three ways."""
    forward = report["forward"]
    names = {"eager": "torch", "compiled": "torch.compile", "fused": "Triton kernels"}
    rows = [[names.get(way, way), f"{ms / 1000:.2f}"] for way, ms in forward["median_ms"].items()]
    kernels = report.get("block", {}).get("shares", {})
    shares = ", ".join(f"{name} {_percent(share)}" for name, share in kernels.items())
    note = f"{report['layers']} blocks, peak {forward['peak_gib']:.1f} GiB."
    note += f" GPU time of a fused block: {shares}." if shares else ""
    return f"{_origin(report)} {note}\n\n{_table(['a forward', 's'], rows)}"


@_made_of("pan2")
def pan2(report: dict[str, Any]) -> str:
    """Seconds of each stage of the demo with the VAE at its real size, and one guided step of the real transformer."""
    parts = []
    run = report.get("full_vae")
    if run:
        videos = [name for name, value in run.items() if isinstance(value, dict)]
        stages = [name for name, value in run[videos[0]].items() if isinstance(value, float)]
        seconds = {name: [run[video].get(name, 0) for video in videos] for name in stages}
        rows = [[name, *(f"{s:.2f}" for s in times)] for name, times in seconds.items() if max(times) >= LEAST_STAGE_S]
        options = " ".join(run["options"])
        parts.append(f"The demo with `{options}`: a tiny random transformer, the VAE at its real size.")
        parts.append(_table(["stage", *(f"{video}, s" for video in videos)], rows))
    step = report.get("step")
    if step:
        steps = ", ".join(f"{s:.1f}" for s in step["step_s"])
        kernels = "with" if step.get("fused_kernels") else "without"
        parts.append(
            f"A guided denoising step of the released size ({step['parameters'] / 1e9:.1f} B parameters, latents "
            f"{step['latents']}, {kernels} the Triton kernels): {steps} s, peak {step['peak_gib']:.1f} GiB."
        )
    return "\n\n".join([_origin(report), *parts])


# Their parts


def _origin(report: dict[str, Any]) -> str:
    """Card, date and torch of a run."""
    versions = report.get("versions", {})
    torch = versions.get("torch") or report.get("torch", "")
    known = [report["device"], report.get("date"), f"torch {torch}".split(",")[0] if torch else None]
    return f"{', '.join(part for part in known if part)}."


def _sets(report: dict[str, Any]) -> list[str]:
    """The weight sets of a report, in order."""
    return list(dict.fromkeys(kind for row in report["rows"] for kind in row["psnr_db"]))


def _name(row: dict[str, Any]) -> str:
    return f"**{row['name']}**" if row["ours"] else row["name"]


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.02 else f"{100 * share:.1f} %"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first are aligned right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "decode-accuracy": decode_accuracy,
    "decode-time": decode_time,
    "ops": ops,
    "winograd-kernels": winograd_kernels,
    "upsample-kernels": upsample_kernels,
    "energy": energy,
    "winograd-levels": winograd_levels,
    "rounding": rounding,
    "stream-memory": stream_memory,
    "decode-parallel": decode_parallel,
    "pan2-fusions": pan2_fusions,
    "pan2-forward": pan2_forward,
    "pan2": pan2,
}


if __name__ == "__main__":
    sys.exit(main())
