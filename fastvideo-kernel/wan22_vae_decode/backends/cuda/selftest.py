# SPDX-License-Identifier: Apache-2.0
"""Compares every CUDA op with its torch counterpart on random cases: the guard on cards that we never ran on.

`require` runs the small cases once a build, card and driver and remembers the answer beside the build. The same
comparison, on other shapes, serves the GPU tests and the benchmark.
"""

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wan22_vae_decode import layers, weights, winograd
from wan22_vae_decode.backends.base import Backend, Halo
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.errors import BackendUnavailableError
from wan22_vae_decode.jit.toolchain import driver_version
from wan22_vae_decode.log import logger

# Largest ||result - oracle|| / ||oracle|| of one output: some roundings to the type, far below any wrong index.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WINOGRAD_TOLERANCE = {torch.float16: 6e-3, torch.bfloat16: 4.8e-2}
UINT8_STEPS = {torch.float16: 1, torch.bfloat16: 4}


@dataclass(frozen=True)
class Case:
    """Sizes for one op. `history`: a later pass, otherwise the video's first. `halo`: rows of neighbours are given."""

    op: str
    batch: int = 1
    frames: int = 3
    rows: int = 5
    cols: int = 7
    c_in: int = 64
    c_out: int = 64
    history: bool = False
    halo: bool = False


CASES = (
    Case("causal_conv3d", rows=9, cols=11, c_in=48, c_out=264),
    Case("causal_conv3d", frames=2, c_out=72, history=True, halo=True),
    Case("winograd_conv3d", rows=14, history=True),
    Case("winograd_conv3d", frames=1, rows=4, cols=18, c_in=256, c_out=72, halo=True),
    Case("winograd_conv3d", frames=1, cols=3, c_in=264, c_out=32, history=True, halo=True),
    Case("winograd_conv3d", frames=1, rows=3, cols=9, c_in=1024, c_out=16),
    Case("pointwise_conv", c_in=72, c_out=320),
    Case("attention", frames=2),
    Case("time_double", history=True),
    Case("upsample_conv2x", c_in=64, c_out=64),
    Case("upsample_conv2x", c_in=128, c_out=64, history=True, halo=True),
    Case("upsample_winograd"),
    Case("upsample_winograd", cols=12, c_in=128, c_out=64, history=True, halo=True),
    Case("output_head"),
    Case("output_head", history=True, halo=True),
    Case("row_movement", batch=2),
    # More GEMM tiles than a card has SMs, so that an SM goes from one to the next; partial ones along every axis.
    Case("causal_conv3d", rows=40, cols=64, c_in=8, c_out=520),
    Case("winograd_conv3d", frames=2, rows=13, cols=15, c_out=520),
    Case("pointwise_conv", frames=9, rows=24, cols=40, c_in=136, c_out=520),
)


def require(backend: CudaBackend, folder: Path) -> None:
    """As ``check``, unless its good result for this card and driver lies in `folder`."""
    card = torch.cuda.get_device_name(backend.device)
    subject = f"{card} driver {driver_version()} torch {torch.__version__}"
    record = folder / f"selftest-{re.sub('[^A-Za-z0-9.]+', '-', subject)}.json"
    if record.exists():
        return
    check(backend)
    logger.info("the CUDA kernels agree with the torch ops on %s", subject)
    partial = record.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps({"subject": subject, "cases": len(CASES)}))
        partial.replace(record)
    except OSError:
        logger.info("the self-test's result cannot be kept in %s and will be found again", folder)


def check(backend: CudaBackend) -> None:
    """Runs CASES in every compute type, because a decode in float16 may have to go on in bfloat16.

    Raises BackendUnavailableError with the first op that differs.
    """
    for dtype, columns in itertools.product(TOLERANCE, backend.kernels.target.tile_cost):
        variant = backend.with_dtype(dtype).with_tile(columns)
        for number, case in enumerate(CASES):
            error = compare(variant, case, seed=number)
            limit = tolerance(case, dtype)
            if not error <= limit:
                raise BackendUnavailableError(
                    f"The CUDA kernels disagree with the torch ops on this card ({case}, {dtype}, tile {columns}: "
                    f"relative error {error:.2e}, allowed {limit:.0e}), so they are not used."
                )


def tolerance(case: Case, dtype: torch.dtype) -> float:
    """The largest relative error that `compare` may return."""
    return (WINOGRAD_TOLERANCE if case.op == "winograd_conv3d" else TOLERANCE)[dtype]


def compare(backend: Backend, case: Case, seed: int = 0) -> float:
    """Largest relative error of the op's outputs against the torch ops in float32 on the CPU; inf where one is NaN."""
    random = _Random(backend.dtype, seed)
    oracle = TorchBackend(torch.device("cpu"), torch.float32)
    run = _OPS[case.op](case, random)
    expected = run(oracle, lambda tensor: tensor.float())
    actual = run(backend, lambda tensor: tensor.to(backend.device))
    errors = []
    for result, reference in zip(actual, expected, strict=True):
        if result.dtype == torch.uint8:
            steps = (result.cpu().int() - reference.int()).abs().max()
            errors.append(0.0 if steps <= UINT8_STEPS[backend.dtype] else math.inf)
        else:
            errors.append(relative_error(result.cpu(), reference))
    return max(errors)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference|| in float64; inf if the result has NaN or another shape."""
    if result.shape != reference.shape:
        return math.inf
    reference = reference.double()
    error = float(torch.linalg.vector_norm(result.double() - reference))
    scale = float(torch.linalg.vector_norm(reference))
    return error / max(scale, 1e-30) if math.isfinite(error) else math.inf


class _Random:
    """Random tensors on the CPU, in the compute type where a backend would have them in it."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.fp32(*shape, scale=scale).to(self._dtype)

    def fp32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self._generator) * scale

    def weight(self, *shape: int) -> Tensor:
        """Scaled so that a conv keeps its input's variance: channels are last, outputs first."""
        return self(*shape, scale=math.prod(shape[1:]) ** -0.5)


Move = Callable[[Tensor], Tensor]
Run = Callable[[Backend, Move], Sequence[Tensor]]


def _move_all(value, move: Move):
    """Moves a tensor, a Halo, a layer (a dataclass of tensors, numbers and forms) or None."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, Halo):
        return Halo(move(value.above), move(value.below), value.first_row)
    return type(value)(**{name: _move_all(part, move) for name, part in vars(value).items()})


def _activation(case: Case, random: _Random) -> Tensor:
    return random(case.batch, case.frames, case.rows, case.cols, case.c_in)


def _history(case: Case, random: _Random, halo: bool) -> Tensor | None:
    rows = case.rows + 2 * halo
    return random(case.batch, 2, rows, case.cols, case.c_in) if case.history else None


def _halo(case: Case, random: _Random, channels: int) -> Halo | None:
    if not case.halo:
        return None
    edge = (case.batch, case.frames, 1, case.cols, channels)
    return Halo(random(*edge), random(*edge))


def _causal_conv3d(case: Case, random: _Random) -> Run:
    inputs = (
        _activation(case, random),
        1 + 0.1 * random.fp32(case.c_in),
        _history(case, random, case.halo),
        _halo(case, random, case.c_in),
        layers.Conv(random.weight(case.c_out, 3, 3, 3, case.c_in), random.fp32(case.c_out)),
        random(case.batch, case.frames, case.rows, case.cols, case.c_out),
    )

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        x, norm, history, halo, conv, residual = (_move_all(value, move) for value in inputs)
        padded, kept = ops.norm_silu_pad(x, norm, history, halo, conv)
        plain = ops.causal_conv3d(padded, conv)
        padded, _ = ops.causal_pad(x, history, halo, conv)
        return plain, ops.causal_conv3d(padded, conv, residual, out=residual), kept

    return run


def _winograd_conv3d(case: Case, random: _Random) -> Run:
    weight, bias = random.weight(case.c_out, 3, 3, 3, case.c_in), random.fp32(case.c_out)
    convs = [
        layers.WinogradConv(
            winograd.transform_weight(weight, columns).to(weight.dtype),
            bias,
            layers.WinogradForm(columns, float_products),
        )
        for columns, float_products in itertools.product(winograd.POINTS, (False, True))
    ]
    inputs = (
        _activation(case, random),
        1 + 0.1 * random.fp32(case.c_in),
        _history(case, random, case.halo),
        _halo(case, random, case.c_in),
        random(case.batch, case.frames, case.rows, case.cols, case.c_out),
    )

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        x, norm, history, halo, residual = (_move_all(value, move) for value in inputs)
        results = []
        for prepared in convs:
            conv, sum_ = _move_all(prepared, move), residual.clone()
            source, kept = ops.norm_silu_pad(x, norm, history, halo, conv)
            plain = ops.winograd_conv3d(source, conv)
            source, raw = ops.causal_pad(x, history, halo, conv)
            results += [plain, ops.winograd_conv3d(source, conv, sum_, out=sum_), kept, raw]
        return results

    return run


def _pointwise_conv(case: Case, random: _Random) -> Run:
    x = _activation(case, random)
    convs = [layers.Pointwise(random.weight(case.c_out, case.c_in), bias) for bias in (random.fp32(case.c_out), None)]

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        return [ops.pointwise_conv(move(x), _move_all(conv, move)) for conv in convs]

    return run


def _attention(case: Case, random: _Random) -> Run:
    x, c = _activation(case, random), case.c_in
    weights = layers.Attention(
        1 + 0.1 * random.fp32(c),
        layers.Pointwise(random.weight(3 * c, c), random.fp32(3 * c)),
        layers.Pointwise(random.weight(c, c), random.fp32(c)),
    )

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        layer = layers.Attention(*(_move_all(part, move) for part in vars(weights).values()))
        flag = ops.nonfinite_flag()
        y = ops.attention(move(x), layer, flag)
        return y, 1 - flag

    return run


def _time_double(case: Case, random: _Random) -> Run:
    x, c = _activation(case, random), case.c_in
    history = _history(case, random, halo=False)
    conv = layers.Conv(random.weight(2 * c, 3, 1, 1, c), random.fp32(2 * c))

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        layer = _move_all(conv, move)
        padded, kept = ops.causal_pad(move(x), _move_all(history, move), None, layer)
        # One frame more in front, as in the pass with the video's first frame.
        out = move(x).new_zeros(case.batch, 2 * case.frames + 1, case.rows, case.cols, c)
        ops.time_double(padded, layer, out[:, 1:])
        return out, kept

    return run


def _upsample_conv2x(case: Case, random: _Random, winograd_form: bool = False) -> Run:
    # Shapes of the released decoder: C -> C after a time doubling, 2C -> C without.
    factor = 2 if case.c_in == case.c_out else 1
    skip = factor - 1 if not case.history else 0
    x = _activation(case, random)
    weight, bias = random.weight(case.c_out, case.c_in, 3, 3), random.fp32(case.c_out)
    rewrite = weights.upsample_components if winograd_form else weights.upsample_phases
    taps = rewrite(weight.double()).to(weight.dtype).contiguous()
    up = layers.UpsampleConv(None, taps, bias) if winograd_form else layers.UpsampleConv(taps, None, bias)
    frames = (case.frames + skip) // factor
    x = x[:, : frames * factor - skip].contiguous()
    shortcut = random(case.batch, frames, case.rows, case.cols, case.c_in)
    edge = (*x.shape[:2], up.halo_rows, *x.shape[3:])
    # A band behind one of as many rows.
    halo = Halo(random(*edge), random(*edge), first_row=case.rows) if case.halo else None

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        source, layer, short, rim = (_move_all(value, move) for value in (x, up, shortcut, halo))
        return (ops.upsample_conv2x(source, layer, short, skip, rim),)

    return run


def _output_head(case: Case, random: _Random) -> Run:
    x, history, halo = _activation(case, random), _history(case, random, case.halo), _halo(case, random, case.c_in)
    weight = random.weight(112, 3, 1, 1, case.c_in) * 0.2
    weight[108:] = 0
    head = layers.Head(1 + 0.1 * random.fp32(case.c_in), weight, 0.1 * random.fp32(12))

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        layer = _move_all(head, move)
        padded, _ = ops.norm_silu_pad(move(x), layer.norm, _move_all(history, move), _move_all(halo, move), layer)
        flag = ops.nonfinite_flag()
        results = []
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8):
            shape = (case.batch, 3, case.frames + 1, 2 * case.rows, 2 * case.cols)
            video = torch.zeros(shape, dtype=dtype, device=ops.device)
            ops.output_head(padded, layer, video[:, :, 1:], flag)
            results.append(video)
        return [*results, 1 - flag]

    return run


def _row_movement(case: Case, random: _Random) -> Run:
    x = _activation(case, random)
    bands = ((0, 2), (2, 2), (2, case.rows))
    counts = (1, 0, case.frames - 1)

    def run(ops: Backend, move: Move) -> Sequence[Tensor]:
        moved = move(x)
        joined = ops.join_frames(moved.flatten(), counts, case.batch, case.rows, case.cols, case.c_in)
        edges = [edge for rows in (1, 2) for edge in ops.edge_rows(moved, rows)]
        return [*edges, ops.split_rows(moved, bands), joined]

    return run


_OPS: dict[str, Callable[[Case, _Random], Run]] = {
    "causal_conv3d": _causal_conv3d,
    "winograd_conv3d": _winograd_conv3d,
    "pointwise_conv": _pointwise_conv,
    "attention": _attention,
    "time_double": _time_double,
    "upsample_conv2x": _upsample_conv2x,
    "upsample_winograd": functools.partial(_upsample_conv2x, winograd_form=True),
    "output_head": _output_head,
    "row_movement": _row_movement,
}
