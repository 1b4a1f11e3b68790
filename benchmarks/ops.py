# SPDX-License-Identifier: Apache-2.0
"""Builds, checks and times every CUDA op at the shapes of a 704x1248 decode, beside the torch op in the same run.

    python benchmarks/ops.py [--dtype fp16] [--latent-frames 4] [--slab 2] [--json benchmarks/results/ops.json]

Each row gives the op's time, its rate and that rate's share of the ceiling measured in the same run (an 8192^3 matmul
for arithmetic, a large copy for memory), the torch op's time, and the relative difference of their results. The last
lines add up a decode of 31 latent frames (121 frames of video). Exits with 1 if a check fails.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wan22_vae_decode import jit, layers, weights, winograd
from wan22_vae_decode.backends.base import Backend
from wan22_vae_decode.backends.cuda import heuristics, library, selftest
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.backends.cuda.targets import TARGETS
from wan22_vae_decode.backends.torch import TorchBackend

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LATENT_ROWS, LATENT_COLS, LATENT_FRAMES = 44, 78, 31
# Both results are rounded to the type, the torch op's also between its steps.
DIFFERENCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
WINOGRAD_DIFFERENCE = {torch.float16: 6e-3, torch.bfloat16: 5e-2}
# Calls are timed together until they take this long, at most so many.
SHORT_MS, SHORT_CALLS = 2.0, 20


@dataclass
class Row:
    """One op at one shape. `count` is how often a pass (or a slab of it) runs it."""

    op: str
    shape: str
    count: float
    flops: float = 0.0
    nbytes: float = 0.0
    ms: float = 0.0
    torch_ms: float = 0.0
    difference: float = 0.0
    share: float = 0.0
    failed: str = ""


@dataclass
class Report:
    device: str
    torch: str
    dtype: str
    latent_frames: int
    slab: int
    build_s: float
    load_s: float
    matmul_tflops: float
    copy_tbs: float
    selftest: dict[str, float] = field(default_factory=dict)
    failures: int = 0
    rows: list[Row] = field(default_factory=list)
    decode_121_ms: float = 0.0


def median_ms(run: Callable[[], object], repeats: int = 7, warmup: int = 2) -> float:
    """Median time of a call on the GPU by events. Short calls follow each other, so that only the first one's launch
    counts.
    """

    def sample(calls: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    for _ in range(warmup):
        once = sample(1)
    calls = max(1, min(SHORT_CALLS, round(SHORT_MS / once)))
    return statistics.median(sample(calls) for _ in range(repeats))


def difference(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference||, in pieces; inf where the result has NaN."""
    error = scale = 0.0
    for a, b in zip(result.flatten().split(1 << 27), reference.flatten().split(1 << 27), strict=True):
        b = b.float()
        error += float(torch.linalg.vector_norm(a.float() - b)) ** 2
        scale += float(torch.linalg.vector_norm(b)) ** 2
    ratio = (error / max(scale, 1e-30)) ** 0.5
    return ratio if ratio == ratio else float("inf")


class Bench:
    """Random tensors of a compute type, and rows timed on two backends."""

    def __init__(self, ours: CudaBackend, theirs: Backend, report: Report, only: str) -> None:
        self.ours = ours
        self.theirs = theirs
        self.report = report
        self.only = only

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=self.ours.dtype, device=self.ours.device) * scale

    def weight(self, *shape: int) -> Tensor:
        fan_in = 1
        for size in shape[1:]:
            fan_in *= size
        return self.random(*shape, scale=fan_in**-0.5)

    def fp32(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.ours.device)

    def row(
        self,
        row: Row,
        run: Callable[[Backend], Tensor],
        timed: Callable[[Backend], object] | None = None,
        limit: float | None = None,
        beside: bool = True,
    ) -> None:
        """Checks `run` on both backends and times it on both (without `beside` on ours); `timed` where the timed part
        is less than what gives the result.
        """
        if self.only not in row.op:
            return
        timed = timed or run
        try:
            result = run(self.ours)
            row.difference = difference(result, run(self.theirs))
            if row.difference > (limit or DIFFERENCE[self.ours.dtype]):
                row.failed = "differs"
            row.ms = median_ms(lambda: timed(self.ours))
            if beside:
                row.torch_ms = median_ms(lambda: timed(self.theirs), repeats=3, warmup=1)
        except Exception as error:
            row.failed = f"{type(error).__name__}: {error}"
        self._finish(row)

    def part(self, row: Row, run: Callable[[], object]) -> None:
        """Times a kernel whose result a whole op's row has checked."""
        if self.only not in row.op:
            return
        try:
            row.ms = median_ms(run)
        except Exception as error:
            row.failed = f"{type(error).__name__}: {error}"
        self._finish(row)

    def _finish(self, row: Row) -> None:
        rate = (row.flops / self.report.matmul_tflops if row.flops else row.nbytes / self.report.copy_tbs) / 1e9
        row.share = rate / row.ms if row.ms else 0.0
        self.report.rows.append(row)
        print_row(row)


def print_row(row: Row) -> None:
    rate = row.flops / row.ms / 1e9 if row.flops and row.ms else row.nbytes / row.ms / 1e9 if row.ms else 0.0
    unit = "TFLOP/s" if row.flops else "TB/s"
    print(
        f"{row.op:<18} {row.shape:<26} {row.ms:9.3f} ms {rate:7.2f} {unit:<7} {row.share:6.1%}  "
        f"torch {row.torch_ms:9.3f} ms  diff {row.difference:.1e} {row.failed}",
        flush=True,
    )


def ceilings(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """TFLOP/s of an 8192^3 matmul and TB/s (read + write) of a 4 GiB copy."""
    a, b = (torch.randn(8192, 8192, dtype=dtype, device=device) for _ in range(2))
    matmul = 2 * 8192**3 / median_ms(lambda: a @ b, repeats=15, warmup=5) / 1e9
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source)) / 1e9
    return matmul, copy


def run_selftest(backend: CudaBackend, report: Report) -> None:
    """Every self-test case on both tile widths; goes on after a failure so that one run shows all of them."""
    for columns in backend.kernels.target.tile_cost:
        for number, case in enumerate(selftest.CASES):
            name = f"{case.op} #{number} tile {columns} {backend.dtype}"
            try:
                error = selftest.compare(backend.with_tile(columns), case, seed=number)
                torch.cuda.synchronize()
            except Exception as problem:
                error = float("inf")
                print(f"{name}: {type(problem).__name__}: {problem}")
            report.selftest[name] = error
            if error > selftest.tolerance(case, backend.dtype):
                report.failures += 1
                print(f"SELF-TEST FAILED {name}: {error:.2e} {case}", flush=True)


def time_ops(bench: Bench, frames: int, slab: int) -> None:
    """Rows in the order of the graph. `frames` latent frames a pass, `slab` of them at a time in up blocks 2 and 3."""
    h, w = LATENT_ROWS, LATENT_COLS
    parts = frames / slab
    levels = (
        # level, frames, rows, cols, C_in, C_out, convs from C_in, convs from C_out
        (0, frames, h, w, 1024, 1024, 0, 10),
        (1, 2 * frames, 2 * h, 2 * w, 1024, 1024, 0, 6),
        (2, 4 * slab, 4 * h, 4 * w, 1024, 512, parts, 5 * parts),
        (3, 4 * slab, 8 * h, 8 * w, 512, 256, parts, 5 * parts),
    )
    conv_row(bench, 0, frames, h, w, 48, 1024, 1, residual=False, normed=False)
    for level, t, rows, cols, c_in, c_out, first, rest in levels:
        for channels, count in ((c_in, first), (c_out, rest)):
            if not count:
                continue
            residual = channels == c_out
            # Both methods side by side; only the chosen one counts.
            form = bench.ours.winograd_form(level, channels, c_out, split_rows=False)
            conv_row(bench, level, t, rows, cols, channels, c_out, count * (form is None), residual)
            used, form = count * (form is not None), form or layers.WinogradForm(4)
            winograd_rows(bench, level, t, rows, cols, channels, c_out, used, residual, form)
        if first:
            pointwise_row(bench, level, t, rows, cols, c_in, c_out, first)
    # Counted in the attention.
    pointwise_row(bench, 0, frames, h, w, 1024, 3072, 0)
    attention_row(bench, frames, h, w, 1024)
    time_double_row(bench, 0, frames, h, w, 1024)
    time_double_row(bench, 1, 2 * frames, 2 * h, 2 * w, 1024)
    upsample_row(bench, 0, 2 * frames, h, w, 1024, 1024, 2, 1)
    upsample_row(bench, 1, 4 * frames, 2 * h, 2 * w, 1024, 1024, 2, 1)
    upsample_row(bench, 2, 4 * slab, 4 * h, 4 * w, 512, 1024, 1, parts)
    for dtype in (torch.float32, torch.uint8):
        head_row(bench, 4 * slab, 8 * h, 8 * w, 256, dtype, parts if dtype == torch.float32 else 0)
    rows_row(bench, frames, h, w, 1024)


def conv_row(bench, level, t, rows, cols, c_in, c_out, count, residual, normed=True) -> None:
    """The pad (with norm) and the conv of one layer."""
    x, history = bench.random(1, t, rows, cols, c_in), bench.random(1, 2, rows, cols, c_in)
    norm = 1 + 0.1 * bench.fp32(c_in)
    conv = layers.Conv(bench.weight(c_out, 3, 3, 3, c_in), bench.fp32(c_out))
    size = x.element_size()
    shape = f"L{level} {t}x{rows}x{cols} {c_in}->{c_out}"
    pixels = t * rows * cols

    def pad(ops: Backend):
        if not normed:
            return ops.causal_pad(x, history, None, conv)
        return ops.norm_silu_pad(x, norm, history, None, conv)

    # Read x and history, write the padded input and the next history.
    moved = (2 * t + 6) * rows * cols * c_in * size
    row = Row("norm_silu_pad" if normed else "causal_pad", shape, count, nbytes=moved)
    bench.row(row, lambda ops: pad(ops)[0].tensor, pad)
    skip = bench.random(1, t, rows, cols, c_out) if residual else None
    padded = {id(ops): pad(ops)[0] for ops in (bench.ours, bench.theirs)}
    out = torch.empty(1, t, rows, cols, c_out, dtype=x.dtype, device=x.device)

    def run(ops: Backend) -> Tensor:
        return ops.causal_conv3d(padded[id(ops)], conv, skip, None if ops is bench.theirs else out)

    row = Row("causal_conv3d", shape + (" +res" if residual else ""), count, flops=2.0 * 27 * pixels * c_in * c_out)
    bench.row(row, run)


def winograd_rows(bench, level, t, rows, cols, c_in, c_out, count, residual, form) -> None:
    """A whole Winograd conv with what makes its input, then the three kernels of its first band."""
    x, history = bench.random(1, t, rows, cols, c_in), bench.random(1, 2, rows, cols, c_in)
    norm = 1 + 0.1 * bench.fp32(c_in)
    weight = bench.weight(c_out, 3, 3, 3, c_in)
    conv = layers.WinogradConv(winograd.prepare_weight(weight, form.columns, weight.dtype), bench.fp32(c_out), form)
    direct = layers.Conv(weight, conv.bias)
    skip = bench.random(1, t, rows, cols, c_out) if residual else None
    out = torch.empty(1, t, rows, cols, c_out, dtype=x.dtype, device=x.device)
    suffix = f" {form_name(form)}" + (" +res" if residual else "")
    shape = f"L{level} {t}x{rows}x{cols} {c_in}->{c_out}{suffix}"

    def run(ops: Backend) -> Tensor:
        if ops is bench.ours:
            return ops.winograd_conv3d(ops.norm_silu_pad(x, norm, history, None, conv)[0], conv, skip, out)
        return ops.causal_conv3d(ops.norm_silu_pad(x, norm, history, None, direct)[0], direct, skip)

    # Checked against torch's direct conv, timed in the rows above; the rate is that of the products that remain.
    number, (down, across) = len(conv.weight), winograd.tiles(rows, cols, form.columns)
    flops = 2.0 * number * 3 * t * down * across * c_in * c_out
    row = Row("winograd_conv3d", shape, count, flops=flops)
    bench.row(row, run, limit=WINOGRAD_DIFFERENCE[x.dtype], beside=False)

    for part, run_part in winograd_parts(bench.ours, level, x[0], norm, history[0], conv, skip, out[0]):
        bench.part(part, run_part)


def form_name(form: layers.WinogradForm) -> str:
    """In the names of rows."""
    return f"4x{form.columns}" + (" float products" if form.float_products else "")


def winograd_parts(
    ops: CudaBackend,
    level: int,
    x: Tensor,
    norm: Tensor,
    history: Tensor,
    conv: layers.WinogradConv,
    skip: Tensor | None,
    out: Tensor,
) -> list[tuple[Row, Callable[[], None]]]:
    """The three kernels of the first band of a Winograd conv of ``x``, [T, H, W, C_in], in their order: what each moves
    or multiplies, and its launch.
    """
    t, rows, cols, c_in = x.shape
    c_out, kernels, size = out.shape[-1], ops.kernels, x.element_size()
    number, (down, across) = len(conv.weight), winograd.tiles(rows, cols, conv.form.columns)
    band = heuristics.tile_rows_per_band(down, t, heuristics.tile_row_bytes(conv.form, cols, t, c_in, c_out, x.dtype))
    tiles = band * across
    components = x.new_empty(number, t + 2, band, across, c_in)
    product_type = heuristics.product_type(conv.form, x.dtype)
    products = x.new_empty(number, t, band, across, c_out, dtype=product_type)
    kept = torch.empty_like(history)
    suffix = "" if skip is None else " +res"
    shape = f"L{level} {t}x{4 * band}x{cols} {c_in}->{c_out} {form_name(conv.form)}{suffix}"

    def transform_input() -> None:
        kernels.winograd_input(x, norm, history, None, 0, components, kept)

    def multiply() -> None:
        windows = components.as_strided((number, t * tiles, 3, c_in), (components.stride(0), c_in, tiles * c_in, 1))
        kernels.tap_gemm(windows, conv.weight, None, None, products.flatten(1, 3))

    def transform_output() -> None:
        kernels.winograd_output(products, conv.bias, None if skip is None else skip[0], 0, out)

    pixels = min(4 * band, rows) * cols
    read = (t + 2) * pixels * c_in * size
    moved = products.numel() * product_type.itemsize + (1 if skip is None else 2) * t * pixels * c_out * size
    return [
        (Row("winograd_input", shape, 0, nbytes=read + components.numel() * size), transform_input),
        (Row("winograd GEMM", shape, 0, flops=2.0 * number * 3 * t * tiles * c_in * c_out), multiply),
        (Row("winograd_output", shape, 0, nbytes=moved), transform_output),
    ]


def pointwise_row(bench, level, t, rows, cols, c_in, c_out, count) -> None:
    x = bench.random(1, t, rows, cols, c_in)
    conv = layers.Pointwise(bench.weight(c_out, c_in), bench.fp32(c_out))
    pixels = t * rows * cols
    row = Row("pointwise_conv", f"L{level} {t}x{rows}x{cols} {c_in}->{c_out}", count, flops=2.0 * pixels * c_in * c_out)
    bench.row(row, lambda ops: ops.pointwise_conv(x, conv))


def attention_row(bench, t, rows, cols, c) -> None:
    x = bench.random(1, t, rows, cols, c)
    weights = layers.Attention(
        1 + 0.1 * bench.fp32(c),
        layers.Pointwise(bench.weight(3 * c, c), bench.fp32(3 * c)),
        layers.Pointwise(bench.weight(c, c), bench.fp32(c)),
    )
    pixels = rows * cols
    row = Row("attention", f"L0 {t}x{rows}x{cols} {c}", 1, flops=2.0 * t * pixels * (4 * c * c + 2 * pixels * c))
    bench.row(row, lambda ops: ops.attention(x, weights, ops.nonfinite_flag()))


def time_double_row(bench, level, t, rows, cols, c) -> None:
    x = bench.random(1, t, rows, cols, c)
    conv = layers.Conv(bench.weight(2 * c, 3, 1, 1, c), bench.fp32(2 * c))
    padded = {id(ops): ops.causal_pad(x, None, None, conv)[0] for ops in (bench.ours, bench.theirs)}
    out = torch.empty(1, 2 * t, rows, cols, c, dtype=x.dtype, device=x.device)

    def run(ops: Backend) -> Tensor:
        ops.time_double(padded[id(ops)], conv, out)
        return out.clone()

    row = Row("time_double", f"L{level} {t}x{rows}x{cols} {c}", 1, flops=2.0 * t * rows * cols * 6 * c * c)
    bench.row(row, run, lambda ops: ops.time_double(padded[id(ops)], conv, out))


def upsample_row(bench, level, t, rows, cols, c_out, c_shortcut, factor, count) -> None:
    """The whole op in both forms, of which the chosen one counts, then the other kernels of the phases and of the
    first band of Winograd tiles alone.
    """
    x = bench.random(1, t, rows, cols, c_out)
    weight, bias = bench.weight(c_out, c_out, 3, 3), bench.fp32(c_out)
    shortcut = bench.random(1, t // factor, rows, cols, c_shortcut)
    shape = f"L{level} {t}x{rows}x{cols} {c_out}"
    pixels, size = t * rows * cols, x.element_size()
    phases, components = (
        rewrite(weight.double()).to(weight.dtype).contiguous()
        for rewrite in (weights.upsample_phases, weights.upsample_components)
    )
    up, tiled = layers.UpsampleConv(phases, None, bias), layers.UpsampleConv(None, components, bias)
    chosen = bench.ours.upsample_method(level, c_out, c_out)
    flops = 2.0 * 16 * pixels * c_out * c_out
    row = Row("upsample phases", shape, count * (chosen == "phases"), flops=flops)
    bench.row(row, lambda ops: ops.upsample_conv2x(x, up, shortcut, 0, None))
    # Checked against torch's phases, timed in the row above; the rate is that of the products that remain.
    tiles = len(winograd.upsample_tiles(rows)) * len(winograd.upsample_tiles(cols))
    flops = 2.0 * winograd.UPSAMPLE_COMPONENTS * t * tiles * 4 * c_out * c_out
    row = Row("upsample winograd", shape, count * (chosen == "winograd"), flops=flops)
    bench.row(
        row,
        lambda ops: ops.upsample_conv2x(x, tiled if ops is bench.ours else up, shortcut, 0, None),
        limit=WINOGRAD_DIFFERENCE[x.dtype],
        beside=False,
    )
    upsample_winograd_parts(bench, level, x[0], tiled, shortcut[0], factor)

    slab = heuristics.frames_per_slab(t, 4 * rows * cols * c_out * size) // factor * factor or factor
    part = bench.random(2, 2, slab, rows, cols, c_out)
    out = torch.empty(slab, 2 * rows, 2 * cols, c_out, dtype=x.dtype, device=x.device)
    repeats = c_out * 4 * factor // c_shortcut

    def combine(ops: Backend) -> Tensor:
        if ops is bench.ours:
            bench.ours.kernels.upsample_combine(part, up.bias, shortcut[0], 0, factor, out)
            return out
        position = torch.arange(c_out, device=x.device) * 4 * factor
        wanted = torch.empty_like(out)
        for frame in range(slab):
            source, phase = divmod(frame, factor)
            for r in range(2):
                for c in range(2):
                    extra = shortcut[0, source][..., (position + 4 * phase + 2 * r + c) // repeats]
                    wanted[frame, r::2, c::2] = part[r, c, frame].float() + up.bias + extra
        return wanted

    moved = (8 * part[0, 0].numel() + shortcut[0, : slab // factor].numel()) * size
    # Counted in the whole op already.
    bench.row(Row("upsample_combine", f"L{level} {slab}x{rows}x{cols} {c_out}", 0, nbytes=moved), combine)


def upsample_winograd_parts(bench, level, x, up, shortcut, factor) -> None:
    """The three kernels of a band of tiles."""
    t, rows, cols, c = x.shape
    kernels, size, count = bench.ours.kernels, x.element_size(), winograd.UPSAMPLE_COMPONENTS
    slab, band, _ = heuristics.upsample_slab(t, rows, cols, False, c, c, size)
    across = len(winograd.upsample_tiles(cols))
    tiles = slab * band * across
    source = x[:slab]
    components = torch.empty(count, slab, band, across, c, dtype=x.dtype, device=x.device)
    products = torch.empty(count, slab, band, across, 2, 2, c, dtype=x.dtype, device=x.device)
    out = torch.empty(slab, 2 * rows, 2 * cols, c, dtype=x.dtype, device=x.device)
    kept = min(winograd.UPSAMPLE_TILE * band, rows)
    shape = f"L{level} {slab}x{kept}x{cols} {c}"
    pixels = slab * kept * cols

    def multiply() -> None:
        a, d = components.view(count, tiles, 1, c), products.view(count, tiles, 4 * c)
        kernels.tap_gemm(a, up.components.view(count, 4 * c, 1, c), None, None, d)

    def transform_output() -> None:
        kernels.upsample_output(products, up.bias, shortcut, 0, factor, 0, 0, out)

    moved = (pixels * c + components.numel()) * size
    bench.part(
        Row("upsample_input", shape, 0, nbytes=moved), lambda: kernels.upsample_input(source, None, 0, components)
    )
    bench.part(Row("upsample GEMM", shape, 0, flops=2.0 * count * tiles * 4 * c * c), multiply)
    moved = (products.numel() + pixels * (4 * c + shortcut.shape[-1] / factor)) * size
    bench.part(Row("upsample_output", shape, 0, nbytes=moved), transform_output)


def head_row(bench, t, rows, cols, c, dtype, count) -> None:
    x, weight = bench.random(1, t, rows, cols, c), bench.weight(112, 3, 1, 1, c) * 0.2
    weight[108:] = 0
    head = layers.Head(1 + 0.1 * bench.fp32(c), weight, 0.1 * bench.fp32(12))
    padded = {id(ops): ops.norm_silu_pad(x, head.norm, None, None, head)[0] for ops in (bench.ours, bench.theirs)}
    row = Row(
        "norm_silu_pad",
        f"L3 {t}x{rows}x{cols} {c} head",
        count,
        nbytes=2.0 * (t + 2) * x[0, 0].numel() * x.element_size(),
    )
    bench.row(row, lambda ops: ops.norm_silu_pad(x, head.norm, None, None, head)[0].tensor)
    video = torch.empty(1, 3, t, 2 * rows, 2 * cols, dtype=dtype, device=x.device)

    def run(ops: Backend) -> Tensor:
        ops.output_head(padded[id(ops)], head, video, ops.nonfinite_flag())
        return video.clone()

    shape = f"L3 {t}x{rows}x{cols} {c} {str(dtype).removeprefix('torch.')}"
    pixels, size = t * rows * cols, x.element_size()
    pixel_bytes = 12 * video.element_size()
    # The GEMM reads its input once and writes 112 channels, the stencil reads those and writes pixels.
    moved = pixels * ((c + 2 * 112) * size + pixel_bytes) + 2 * rows * cols * c * size
    row = Row("output_head", shape, count, nbytes=moved)
    bench.row(row, run, lambda ops: ops.output_head(padded[id(ops)], head, video, ops.nonfinite_flag()))

    part = bench.random(t, rows, cols, 112, scale=0.1)
    flag = bench.ours.nonfinite_flag()

    def stencil(ops: Backend) -> Tensor:
        if ops is bench.ours:
            bench.ours.kernels.output_head(part, head.bias, False, video[0], flag)
            return video
        taps = torch.nn.functional.pad(part, (0, 0, 1, 1, 1, 1))
        y = head.bias
        for tap in range(9):
            dy, dx = divmod(tap, 3)
            y = y + taps[:, dy : dy + rows, dx : dx + cols, 12 * tap : 12 * tap + 12]
        pixel = y.clamp(-1, 1).unflatten(-1, (3, 2, 2)).permute(3, 0, 1, 5, 2, 4).flatten(4, 5).flatten(2, 3)
        return (((pixel / 2 + 0.5) * 255) if dtype == torch.uint8 else pixel).to(dtype)

    moved = pixels * (112 * size + pixel_bytes)
    bench.row(Row("head stencil", shape, 0, nbytes=moved), stencil)


def rows_row(bench, t, rows, cols, c) -> None:
    x = bench.random(1, t, rows, cols, c)
    bands = [(0, rows // 2), (rows // 2, rows)]
    row = Row("split_rows", f"L0 {t}x{rows}x{cols} {c}", 0, nbytes=2.0 * x.numel() * x.element_size())
    bench.row(row, lambda ops: ops.split_rows(x, bands))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--latent-frames", type=int, default=4, help="latent frames of a pass")
    parser.add_argument("--slab", type=int, default=2, help="latent frames at a time in up blocks 2 and 3")
    parser.add_argument("--only", default="", help="rows whose op contains this")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ops.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/ops.py needs a CUDA device")
        return 1
    device, dtype = torch.device("cuda", torch.cuda.current_device()), DTYPES[options.dtype]
    torch.manual_seed(0)

    begin = time.perf_counter()
    arch = jit.running_arch(torch.cuda.get_device_capability(device))
    kernels = library.recipe(arch)
    folder = jit.build(kernels)
    built = time.perf_counter()
    jit.build(kernels)
    loaded = library.Library(folder, kernels.library)
    load_s = time.perf_counter() - built
    properties = torch.cuda.get_device_properties(device)
    ours = CudaBackend(device, dtype, Kernels(loaded.launch, TARGETS[arch], properties.multi_processor_count))
    theirs = TorchBackend(device, dtype)
    matmul, copy = ceilings(dtype, device)
    report = Report(
        device=properties.name,
        torch=torch.__version__,
        dtype=options.dtype,
        latent_frames=options.latent_frames,
        slab=options.slab,
        build_s=built - begin,
        load_s=load_s,
        matmul_tflops=matmul,
        copy_tbs=copy,
    )
    print(
        f"{report.device}, torch {report.torch}: built in {report.build_s:.0f} s, found again in {load_s:.2f} s; "
        f"matmul {matmul:.0f} TFLOP/s, copy {copy:.2f} TB/s",
        flush=True,
    )
    for other in DTYPES.values():
        run_selftest(CudaBackend(device, other, ours.kernels), report)
    worst = max(report.selftest.values())
    print(f"self-test of {len(report.selftest)} cases: largest relative error {worst:.1e}", flush=True)

    bench = Bench(ours, theirs, report, options.only)
    time_ops(bench, options.latent_frames, options.slab)
    passes = LATENT_FRAMES / options.latent_frames
    report.decode_121_ms = passes * sum(row.count * row.ms for row in report.rows)
    by_op: dict[str, float] = {}
    for row in report.rows:
        by_op[row.op] = by_op.get(row.op, 0.0) + passes * row.count * row.ms
    print(f"\n121 frames, sum of ops: {report.decode_121_ms:.0f} ms")
    for op, ms in sorted(by_op.items(), key=lambda item: -item[1]):
        if ms:
            print(f"  {op:<18} {ms:8.1f} ms")

    report.failures += sum(1 for row in report.rows if row.failed)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(asdict(report), indent=1))
    print(f"{report.failures} checks FAILED" if report.failures else "all checks passed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
