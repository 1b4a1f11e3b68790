# SPDX-License-Identifier: Apache-2.0
"""PAN2's fused Triton kernels beside the torch ops and torch.compile, at the size of a 704x1248 video of 313 frames.

    python benchmarks/pan2_fusions.py [--quick] [--tune] [--only ops block forward]

Three parts. `ops`: each elementwise group on 67,782 tokens x 4096 in bf16, with its share of the copy speed of the same
run and its error against fp32. `block`: one transformer block, what its GPU time goes to, and separate against packed
q/k/v projections. `forward`: one evaluation of the released transformer with random weights, 58 GB made on the GPU; a
denoising step with guidance is two of them. --tune times every launch that the kernels could choose from. Writes JSON
and a plot; exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = ("norm_modulate", "qk_norm_rope", "gate_residual_norm_modulate", "gate_residual")
# Milliseconds on an H200; and what holds on any card.
BARS_MS = {"norm_modulate": 0.30, "qk_norm_rope": 0.60, "gate_residual_norm_modulate": 0.60}
BAR_OVER_COMPILE = 1.2
BAR_COPY_SHARE = 0.9
BAR_ELEMENTWISE_SHARE = 0.02

WIDTH, HEADS, HEAD_DIM, TEXT_TOKENS = 4096, 32, 128, 300
EPS = 1e-6
# Relative error against fp32 of one rounding to bf16, with a margin; of a whole block, against the unfused one's.
ROUNDING_ERROR = 3e-3
BLOCK_ERROR_RATIO = 1.1
# Of the distances of two results from the eager one.
FORWARD_DIFFERENCE_RATIO = 2.0

# Parts of the names of GPU kernels.
ATTENTION_KERNELS = ("flash", "fmha", "attention", "sdpa")
MATMUL_KERNELS = ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk")
OUR_KERNELS = tuple(f"{name}_kernel" for name in NAMES)

START = time.perf_counter()


@dataclass
class OpRow:
    """One elementwise group; errors are relative to fp32."""

    name: str
    gigabytes: float
    eager_ms: float = 0.0
    compiled_ms: float = 0.0
    fused_ms: float = 0.0
    copy_share: float = 0.0
    fused_error: float = 0.0
    eager_error: float = 0.0
    bars: dict[str, bool] = field(default_factory=dict)


@dataclass
class Report:
    date: str
    device: str
    torch: str
    triton: str
    tokens: int
    layers: int
    copy_tbs: float = 0.0
    ops: list[OpRow] = field(default_factory=list)
    launches: dict[str, dict[str, float]] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def say(line: str) -> None:
    print(f"[{time.perf_counter() - START:5.0f} s] {line}", flush=True)


def queued_ms(call: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median GPU time of a call when the GPU never waits for the CPU: work is queued ahead of the first event."""
    for _ in range(warmup):
        call()
    ahead = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    for _ in range(16):
        ahead.zero_()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; inf where a value is not finite."""
    error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    return error if error == error else float("inf")


def worst_error(actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> float:
    if isinstance(actual, Tensor):
        actual, expected = (actual,), (expected,)
    return max(relative_error(*pair) for pair in zip(actual, expected, strict=True))


def triton_version() -> str:
    import triton

    return triton.__version__


# Ops


def op_arguments(name: str, grid: tuple[int, int, int]) -> tuple:
    """Random arguments of a group, as the video stream has them."""
    from fastvideo.configs.models.dits.pan2 import PAN2Config
    from fastvideo.models.dits.pan2 import rotary_table

    tokens = grid[0] * grid[1] * grid[2]
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    streams = [torch.randn(1, tokens, WIDTH, **options) for _ in range(1 if name == "norm_modulate" else 2)]
    if name == "qk_norm_rope":
        config = PAN2Config()
        rope = rotary_table(grid, config.rope_axes_dim, config.rope_theta, config.rope_temporal_scale, "cuda")
        q, k = (stream.unflatten(-1, (HEADS, HEAD_DIM)) for stream in streams)
        q_weight, k_weight = torch.rand(2, HEAD_DIM, **options) + 0.5
        return q, k, q_weight, k_weight, EPS, rope
    gate, shift, scale = torch.randn(1, 3, 1, WIDTH, **options).unbind(1)
    if name == "norm_modulate":
        return *streams, shift, scale, EPS
    if name == "gate_residual":
        return *streams, gate
    return *streams, gate, shift, scale, EPS


def bytes_moved(name: str, arguments: tuple) -> int:
    """What the group has to read and write at least."""
    stream = arguments[0].numel() * arguments[0].element_size()
    passes = {"norm_modulate": 2, "qk_norm_rope": 4, "gate_residual_norm_modulate": 4, "gate_residual": 3}[name]
    tables = sum(part.numel() * part.element_size() for part in arguments[-1]) if name == "qk_norm_rope" else 0
    return passes * stream + tables


def copy_speed(tokens: int) -> float:
    """TB/s of reading and writing one stream."""
    source = torch.randn(1, tokens, WIDTH, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    ms = queued_ms(lambda: target.copy_(source))
    return 2 * source.numel() * source.element_size() / ms / 1e9


def in_fp32(arguments: tuple) -> tuple:
    return tuple(value.float() if isinstance(value, Tensor) else value for value in arguments)


def measure_op(name: str, grid: tuple[int, int, int], report: Report) -> OpRow:
    from fastvideo.models.dits.pan2_fusions import FUSED_OPS
    from fastvideo.models.dits.pan2_ops import TORCH_OPS

    arguments = op_arguments(name, grid)
    row = OpRow(name, bytes_moved(name, arguments) / 1e9)
    fused, eager = getattr(FUSED_OPS, name), getattr(TORCH_OPS, name)
    exact = eager(*in_fp32(arguments))
    row.fused_error = worst_error(fused(*arguments), exact)
    row.eager_error = worst_error(eager(*arguments), exact)
    del exact
    if not row.fused_error < ROUNDING_ERROR:
        report.failures.append(f"{name}: relative error {row.fused_error:.1e} against fp32")

    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)
    row.eager_ms = queued_ms(lambda: eager(*arguments), repeats=10)
    row.compiled_ms = queued_ms(lambda: compiled(*arguments))
    row.fused_ms = queued_ms(lambda: fused(*arguments))
    row.copy_share = row.gigabytes / row.fused_ms / report.copy_tbs
    if name in BARS_MS:
        row.bars = {
            f"<= {BARS_MS[name]} ms": row.fused_ms <= BARS_MS[name],
            f">= {BAR_OVER_COMPILE} x torch.compile": row.compiled_ms >= BAR_OVER_COMPILE * row.fused_ms,
            f">= {BAR_COPY_SHARE:.0%} of copy": row.copy_share >= BAR_COPY_SHARE,
        }
    bars = ", ".join(f"{bar}: {'met' if met else 'NOT met'}" for bar, met in row.bars.items())
    say(
        f"{name:<28} {row.gigabytes:5.2f} GB  eager {row.eager_ms:6.2f}  compile {row.compiled_ms:6.3f}  "
        f"fused {row.fused_ms:6.3f} ms, {row.copy_share:4.0%} of copy, error {row.fused_error:.1e} "
        f"(eager {row.eager_error:.1e})  {bars}"
    )
    return row


def candidate_launches(name: str) -> list[Any]:
    from fastvideo.models.dits.pan2_fusions.launch import HeadLaunch, RowLaunch

    if name == "qk_norm_rope":
        shapes = [(32, 4), (32, 8), (32, 16), (16, 4), (16, 8), (8, 2), (8, 4)]
        return [HeadLaunch(block, warps) for block, warps in shapes]
    shapes = [(rows, warps) for rows in (1, 2, 4) for warps in (4, 8, 16, 32)]
    return [RowLaunch(WIDTH, rows, warps) for rows, warps in shapes]


def tune(name: str, grid: tuple[int, int, int], report: Report) -> None:
    """Times every candidate; the wrong ones fail."""
    launching = getattr(importlib.import_module(f"fastvideo.models.dits.pan2_fusions.{name}"), name)
    arguments = op_arguments(name, grid)
    expected = launching(*arguments)
    times: dict[str, float] = {}
    for launch in candidate_launches(name):
        if worst_error(launching(*arguments, launch=launch), expected) > 1e-3:
            report.failures.append(f"{name}: {launch} gives another result")
        times[str(launch)] = queued_ms(lambda launch=launch: launching(*arguments, launch=launch))
    report.launches[name] = dict(sorted(times.items(), key=lambda item: item[1]))
    speed = bytes_moved(name, arguments) / 1e9 / report.copy_tbs
    for launch, ms in report.launches[name].items():
        say(f"  {name:<28} {launch:<55} {ms:6.4f} ms, {speed / ms:4.0%} of copy")


# Transformer


def make_transformer(layers: int) -> nn.Module:
    """The released model with random weights that keep the streams' scale, made on the GPU."""
    from fastvideo.configs.models.dits.pan2 import PAN2Config
    from fastvideo.distributed import maybe_init_distributed_environment_and_model_parallel
    from fastvideo.models.dits.pan2 import PAN2Transformer3DModel

    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    maybe_init_distributed_environment_and_model_parallel(1, 1, f"file://{rendezvous}")
    config = PAN2Config()
    config.arch_config.num_layers = layers
    default = torch.get_default_dtype()
    # FastVideo chooses the attention backend by the default type.
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = PAN2Transformer3DModel(config, hf_config={})
    finally:
        torch.set_default_dtype(default)
    model.to_empty(device="cuda").requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.1 if parameter.dim() == 1 else parameter[0].numel() ** -0.5)
    return model


def block_inputs(grid: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    from fastvideo.configs.models.dits.pan2 import PAN2Config
    from fastvideo.models.dits.pan2 import rotary_table

    config, tokens = PAN2Config(), grid[0] * grid[1] * grid[2]
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16().to(dtype)

    return {
        "video": random(1, tokens, WIDTH),
        "text": random(1, TEXT_TOKENS, WIDTH),
        "activated_time": F.silu(random(1, WIDTH)),
        "rope": rotary_table(grid, config.rope_axes_dim, config.rope_theta, config.rope_temporal_scale, "cuda"),
        "video_tokens": tokens,
    }


def run(module: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    from fastvideo.forward_context import set_forward_context

    with set_forward_context(current_timestep=0, attn_metadata=None):
        return module(**inputs)


def once_ms(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure_block(model: nn.Module, grid: tuple[int, int, int], report: Report) -> None:
    from fastvideo.models.dits.pan2_fusions import set_fused_kernels

    block, result = model.transformer_blocks[0], report.block
    check_block(model, (4, *grid[1:]), report)
    inputs = block_inputs(grid, torch.bfloat16)
    torch._dynamo.reset()
    variants = {"eager": block, "compiled": torch.compile(block, dynamic=False), "fused": block}
    for name, module in variants.items():
        set_fused_kernels(model, name == "fused")
        result[f"{name}_ms"] = queued_ms(lambda module=module: run(module, inputs), repeats=5, warmup=2)
        say(f"block, {name:<9} {result[f'{name}_ms']:8.2f} ms")

    # The GPU time of the fused block by kind of kernel.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(block, inputs)
        torch.cuda.synchronize()
    kinds = dict.fromkeys(("attention", "matmul", "fused kernels", "other"), 0.0)
    others = []
    for event in profile.key_averages():
        ms = event.self_device_time_total / 1e3
        kind = kind_of(event.key)
        kinds[kind] += ms
        if kind == "other" and ms:
            others.append((ms, event.count, event.key[:100]))
    result["kernels_ms"] = kinds
    shares = {kind: ms / (sum(kinds.values()) or 1) for kind, ms in kinds.items()}
    result["shares"] = shares
    say("fused block: " + ", ".join(f"{kind} {ms:.2f} ms ({shares[kind]:.1%})" for kind, ms in kinds.items()))
    if not shares["fused kernels"]:
        report.failures.append("block: the profiler saw no fused kernel")
    for ms, count, kernel in sorted(others, reverse=True)[:6]:
        say(f"  other: {ms:6.2f} ms in {count} x {kernel}")
    measure_packing(block, inputs, result)


def kind_of(kernel: str) -> str:
    kernel = kernel.lower()
    for kind, parts in (
        ("fused kernels", OUR_KERNELS),
        ("attention", ATTENTION_KERNELS),
        ("matmul", MATMUL_KERNELS),
    ):
        if any(part in kernel for part in parts):
            return kind
    return "other"


def check_block(model: nn.Module, grid: tuple[int, int, int], report: Report) -> None:
    """Errors of one block against the same block in fp32, on a few frames."""
    from fastvideo.models.dits.pan2_fusions import set_fused_kernels

    block, errors = model.transformer_blocks[0], {}
    exact_block = type(block)(model.config, "exact").to("cuda").requires_grad_(False)
    exact_block.load_state_dict(block.state_dict())
    exact = run(exact_block, block_inputs(grid, torch.float32))
    del exact_block
    inputs = block_inputs(grid, torch.bfloat16)
    for name in ("eager", "fused"):
        set_fused_kernels(model, name == "fused")
        errors[name] = worst_error(run(block, inputs), exact)
    report.block["error"] = errors
    say(f"block against fp32: eager {errors['eager']:.2e}, fused {errors['fused']:.2e}")
    if not errors["fused"] < BLOCK_ERROR_RATIO * errors["eager"]:
        report.failures.append("block: fused is further from fp32 than eager")


def measure_packing(block: nn.Module, inputs: dict[str, Any], result: dict[str, Any]) -> None:
    """Projections, norm and rotation of the video's q and k, v included: three projections, or one packed."""
    from fastvideo.models.dits.pan2_fusions import FUSED_OPS

    attn, x, rope = block.attn, inputs["video"], inputs["rope"]
    projections = (attn.to_q, attn.to_k, attn.to_v)
    weight = torch.cat([projection.weight for projection in projections])
    bias = torch.cat([projection.bias for projection in projections])
    gains = attn.norm_q.weight, attn.norm_k.weight

    def separate() -> tuple[Tensor, ...]:
        q, k, v = (projection(x)[0].unflatten(-1, (HEADS, HEAD_DIM)) for projection in projections)
        return *FUSED_OPS.qk_norm_rope(q, k, *gains, EPS, rope), v

    def packed() -> tuple[Tensor, ...]:
        q, k, v = F.linear(x, weight, bias).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return *FUSED_OPS.qk_norm_rope(q, k, *gains, EPS, rope), v

    result["projections_ms"] = {call.__name__: queued_ms(call) for call in (separate, packed, separate, packed)}
    say("q/k/v projections with norm and rotation: " + str(result["projections_ms"]))


def measure_forward(model: nn.Module, grid: tuple[int, int, int], rounds: int, report: Report) -> None:
    """One evaluation: unfused, unfused with each block compiled, and fused; in turns, the first turn warms up."""
    from fastvideo.models.dits.pan2_fusions import set_fused_kernels

    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    frames, rows, columns = grid
    inputs = {
        "hidden_states": torch.randn(1, 97, frames, 2 * rows, 2 * columns, dtype=torch.bfloat16, device="cuda"),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 4096, dtype=torch.bfloat16, device="cuda"),
        "timestep": torch.tensor([500.0], device="cuda"),
    }
    blocks = model.transformer_blocks
    compiled = nn.ModuleList(torch.compile(block, dynamic=False) for block in blocks)
    variants = {"eager": (blocks, False), "compiled": (compiled, False), "fused": (blocks, True)}
    times: dict[str, list[float]] = {name: [] for name in variants}
    outputs: dict[str, Tensor] = {}
    for turn in range(rounds + 1):
        for name, (modules, fused) in variants.items():
            model.transformer_blocks = modules
            set_fused_kernels(model, fused)
            ms = once_ms(lambda name=name: outputs.update({name: run(model, inputs)}))
            if turn:
                times[name].append(ms)
            say(f"forward, {name:<9} {ms:9.1f} ms" + ("" if turn else " (warm-up)"))
    model.transformer_blocks = blocks
    medians = {name: statistics.median(values) for name, values in times.items()}
    differences = {name: relative_error(outputs[name], outputs["eager"]) for name in ("compiled", "fused")}
    result = report.forward
    result |= {"ms": times, "median_ms": medians, "relative_difference": differences}
    result["text_tokens"] = TEXT_TOKENS
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["fused_over_compiled"] = medians["compiled"] / medians["fused"]
    bars = {"faster than torch.compile": medians["fused"] < medians["compiled"]}
    if report.ops:
        # Two norms with their sums, one rotation and one last sum in each block; the output norm.
        each = {row.name: row.fused_ms for row in report.ops}
        elementwise = report.layers * sum(each.values()) + each["norm_modulate"]
        result["elementwise_share"] = elementwise / medians["fused"]
        bars[f"elementwise <= {BAR_ELEMENTWISE_SHARE:.0%}"] = result["elementwise_share"] <= BAR_ELEMENTWISE_SHARE
        say(f"elementwise groups: {elementwise:.1f} ms, {result['elementwise_share']:.2%} of a fused forward")
    result["bars"] = bars
    say(
        f"forward: eager {medians['eager']:.0f}, compiled {medians['compiled']:.0f}, fused {medians['fused']:.0f} ms "
        f"({result['fused_over_compiled']:.3f} x compiled), peak {result['peak_gib']:.0f} GiB, difference from eager: "
        f"fused {differences['fused']:.1e}, compiled {differences['compiled']:.1e}; "
        + ", ".join(f"{bar}: {'met' if met else 'NOT met'}" for bar, met in bars.items())
    )
    if not differences["fused"] < FORWARD_DIFFERENCE_RATIO * differences["compiled"]:
        report.failures.append("forward: fused differs from eager more than torch.compile does")


def plot(report: Report, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 1))
    kinds = (("eager", "#9aa5b1"), ("compiled", "#5b8def"), ("fused", "#1b7f4b"))
    for offset, (kind, colour) in enumerate(kinds):
        values = [getattr(row, f"{kind}_ms") for row in report.ops]
        places = [place + 0.27 * (offset - 1) for place in range(len(values))]
        bars = left.bar(places, values, 0.26, label={"compiled": "torch.compile"}.get(kind, kind), color=colour)
        left.bar_label(bars, fmt="%.2f", fontsize=8)
    for place, row in enumerate(report.ops):
        floor = row.gigabytes / report.copy_tbs
        label = "bytes at copy speed" if place == 0 else None
        left.plot([place - 0.42, place + 0.42], [floor, floor], color="black", linewidth=1, label=label)
    left.set_xticks(range(len(report.ops)), [row.name for row in report.ops], fontsize=8)
    left.set_yscale("log")
    left.set_ylabel("ms")
    left.set_title(f"{report.tokens:,} tokens x {WIDTH}, bf16, {report.device}", fontsize=10)
    left.legend(fontsize=8)
    seconds = [report.forward["median_ms"][kind] / 1e3 for kind, _ in kinds]
    bars = right.bar([kind for kind, _ in kinds], seconds, color=[colour for _, colour in kinds])
    right.bar_label(bars, fmt="%.2f", fontsize=8)
    right.set_ylabel("s")
    right.set_title(f"One forward, {report.layers} blocks", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 latent frames and 2 blocks instead of 79 and 44")
    parser.add_argument("--tune", action="store_true", help="also time every launch the kernels could choose from")
    parser.add_argument("--only", choices=("ops", "block", "forward"), nargs="+", help="parts to run (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="timed forwards of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("benchmarks/pan2_fusions.py needs an NVIDIA GPU", file=sys.stderr)
        return 2
    grid, layers = ((20, 22, 39), 2) if arguments.quick else ((79, 22, 39), 44)
    parts = arguments.only or ["ops", "block", "forward"]
    torch.manual_seed(0)
    report = Report(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        device=torch.cuda.get_device_name(),
        torch=f"{torch.__version__}, Python {platform.python_version()}",
        triton=triton_version(),
        tokens=grid[0] * grid[1] * grid[2],
        layers=layers,
    )
    report.copy_tbs = copy_speed(report.tokens)
    say(f"{report.device}, torch {report.torch}, Triton {report.triton}: copy {report.copy_tbs:.2f} TB/s")
    for name in NAMES:
        if arguments.tune:
            tune(name, grid, report)
        if "ops" in parts:
            report.ops.append(measure_op(name, grid, report))
    if {"block", "forward"} & set(parts):
        model = make_transformer(layers)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        say(f"transformer of {parameters / 1e9:.1f} B parameters")
        if "block" in parts:
            measure_block(model, grid, report)
        if "forward" in parts:
            measure_forward(model, grid, arguments.rounds, report)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / ("pan2_fusions_quick.json" if arguments.quick else "pan2_fusions.json")
    file.write_text(json.dumps(asdict(report), indent=1) + "\n")
    if report.ops and report.forward:
        plot(report, file.with_suffix(".png"))
    for failure in report.failures:
        say(f"FAILED {failure}")
    say(f"{file}: " + (f"{len(report.failures)} checks FAILED" if report.failures else "all checks passed"))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
