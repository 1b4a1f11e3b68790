# SPDX-License-Identifier: Apache-2.0
"""The fused kernels against float64 formulas, in custom operators, under torch.compile and in a whole transformer.

Runs on a GPU, and on a CPU through Triton's interpreter (TRITON_INTERPRET=1), where `test_pan2_fusions.py` starts it.
"""

from __future__ import annotations

import importlib
import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no CUDA device; test_pan2_fusions.py runs these in Triton's interpreter", allow_module_level=True)

import fastvideo.pipelines.pan2  # noqa: F401  (on a CPU: the device, the attention backend)
from fastvideo.configs.models.dits.pan2 import PAN2Config
from fastvideo.distributed import cleanup_dist_env_and_memory, maybe_init_distributed_environment_and_model_parallel
from fastvideo.forward_context import set_forward_context
from fastvideo.models.dits import pan2_ops
from fastvideo.models.dits.pan2 import PAN2Transformer3DModel, TransformerBlock, rotary_table
from fastvideo.models.dits.pan2_fusions import FUSED_OPS, set_fused_kernels
from fastvideo.models.dits.pan2_fusions.launch import ROW_TILES, HeadLaunch, RowLaunch, head_launch, row_launch
from fastvideo.models.dits.pan2_ops import TORCH_OPS, RotaryTable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

EPS = 1e-6
# One rounding to nearest. The interpreter cuts bf16 off instead.
ROUNDING = {torch.float32: 4e-7, torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}
# What fp32 leaves where large terms cancel, or moves across a rounding boundary.
CANCELLATION = 4e-6
GUARD = 1024
NAMES = ("norm_modulate", "qk_norm_rope", "gate_residual", "gate_residual_norm_modulate")
KERNELS = {name: importlib.import_module(f"fastvideo.models.dits.pan2_fusions.{name}") for name in NAMES}

Shape = tuple[int, int, int]


def kernel(name: str):
    """The launching function of a kernel."""
    return getattr(KERNELS[name], name)


@pytest.fixture(params=list(ROUNDING), ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seeded_on_the_device():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch):
    """Outputs start as NaN amid NaN, and what surrounds them must stay so."""
    buffers = []

    def empty_like(x: torch.Tensor, **options) -> torch.Tensor:
        assert options == {"memory_format": torch.contiguous_format}
        buffer = torch.full((x.numel() + 2 * GUARD,), math.nan, dtype=x.dtype, device=x.device)
        buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(x.shape)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    yield
    monkeypatch.undo()
    assert buffers
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all()
        assert buffer[-GUARD:].isnan().all()


def streams(shape: Shape, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Strided views: every second token of a wider tensor, with an offset that a norm has to remove."""
    batch, tokens, width = shape
    return [(torch.randn(batch, 2 * tokens, width + 16) + 3).to(dtype)[:, ::2, 8:-8] for _ in range(count)]


def vectors(shape: Shape, dtype: torch.dtype, count: int, shared: bool) -> list[torch.Tensor]:
    """[B or 1, 1, width] each, cut from one tensor as a modulation's linear gives them."""
    batch, _, width = shape
    return list(torch.randn(1 if shared else batch, count, 1, width).to(dtype).unbind(1))


def heads(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [B, tokens, heads, head_dim], as views of a packed projection, head by head, or each on its own."""
    batch, tokens, count, head_dim = shape
    if layout == "packed":
        q, k, _ = torch.randn(batch, tokens, 3, count, head_dim).to(dtype).unbind(2)
    elif layout == "head by head":
        q, k = torch.randn(2, batch, count, tokens, head_dim).to(dtype).transpose(2, 3)
    else:
        q, k = torch.randn(2, *shape).to(dtype)
    return q, k


def rotation(tokens: int, head_dim: int) -> RotaryTable:
    angle = torch.randn(tokens, head_dim // 2)
    return RotaryTable(angle.cos(), angle.sin())


def exact_norm_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x = x.double()
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    return (x - mean) / (variance + EPS).sqrt() * (1 + scale.double()) + shift.double()


def exact_gate_residual(residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return residual.double() + gate.double() * y.double()


def exact_norm_rope(x: torch.Tensor, weight: torch.Tensor, rope: RotaryTable | None) -> torch.Tensor:
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    if rope is None:
        return normed
    turn = torch.complex(rope.cos.double(), rope.sin.double())[:, None]
    return torch.view_as_real(torch.complex(normed[..., 0::2], normed[..., 1::2]) * turn).flatten(-2)


def assert_rounded_once(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=CANCELLATION)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


# Kernels

# Odd token counts, widths that are multiples of 8 and no powers of two, one that fills its tile.
SHAPES = [(1, 1, 8), (2, 7, 24), (3, 33, 40), (2, 3, 1032), (1, 5, 64)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_modulate(poisoned, shape, dtype, shared):
    (x,) = streams(shape, dtype, 1)
    shift, scale = vectors(shape, dtype, 2, shared)
    actual = kernel("norm_modulate")(x, shift, scale, EPS)
    assert_rounded_once(actual, exact_norm_modulate(x, shift, scale), dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_residual(poisoned, shape, dtype, shared):
    residual, y = streams(shape, dtype, 2)
    (gate,) = vectors(shape, dtype, 1, shared)
    actual = kernel("gate_residual")(residual, y, gate)
    assert_rounded_once(actual, exact_gate_residual(residual, y, gate), dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_residual_norm_modulate(poisoned, shape, dtype, shared):
    residual, y = streams(shape, dtype, 2)
    gate, shift, scale = vectors(shape, dtype, 3, shared)
    stream, normed = kernel("gate_residual_norm_modulate")(residual, y, gate, shift, scale, EPS)
    assert_rounded_once(stream, exact_gate_residual(residual, y, gate), dtype)
    # Of the stream as the next block will read it.
    assert_rounded_once(normed, exact_norm_modulate(stream, shift, scale), dtype)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("layout", ["separate", "packed", "head by head"])
@pytest.mark.parametrize(("batch", "tokens", "count", "head_dim"), [(2, 3, 3, 64), (2, 3, 4, 128), (1, 2, 40, 128)])
def test_qk_norm_rope(poisoned, dtype, batch, tokens, count, head_dim, layout, rotated):
    q, k = heads(layout, (batch, tokens, count, head_dim), dtype)
    gains = (torch.rand(2, head_dim) + 0.5).to(dtype)
    rope = rotation(tokens, head_dim) if rotated else None
    actual = kernel("qk_norm_rope")(q, k, *gains, EPS, rope)
    for result, x, gain in zip(actual, (q, k), gains, strict=True):
        assert_rounded_once(result, exact_norm_rope(x, gain, rope), dtype)


def test_streams_and_vectors_may_differ_in_type(poisoned):
    shape = (2, 5, 24)
    (residual,), (y,) = streams(shape, torch.float16, 1), streams(shape, torch.bfloat16, 1)
    gate, shift, scale = vectors(shape, torch.float32, 3, False)
    stream, normed = kernel("gate_residual_norm_modulate")(residual, y, gate, shift, scale, EPS)
    assert_rounded_once(stream, exact_gate_residual(residual, y, gate), torch.float16)
    assert_rounded_once(normed, exact_norm_modulate(stream, shift, scale), torch.float16)


@pytest.mark.parametrize("launch", [RowLaunch(32, 1, 1), RowLaunch(32, 2, 2), RowLaunch(64, 4, 4)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 13])
def test_every_launch_covers_each_row_once(poisoned, launch, tokens):
    shape, dtype = (2, tokens, 24), torch.float32
    residual, y = streams(shape, dtype, 2)
    gate, shift, scale = vectors(shape, dtype, 3, False)
    new = exact_gate_residual(residual, y, gate)
    assert_rounded_once(kernel("gate_residual")(residual, y, gate, launch), new, dtype)
    actual = kernel("norm_modulate")(y, shift, scale, EPS, launch)
    assert_rounded_once(actual, exact_norm_modulate(y, shift, scale), dtype)
    stream, normed = kernel("gate_residual_norm_modulate")(residual, y, gate, shift, scale, EPS, launch)
    assert_rounded_once(stream, new, dtype)
    assert_rounded_once(normed, exact_norm_modulate(stream, shift, scale), dtype)


@pytest.mark.parametrize("launch", [HeadLaunch(1, 1), HeadLaunch(2, 1), HeadLaunch(8, 4)], ids=str)
def test_every_launch_covers_each_head_once(poisoned, launch):
    q, k = heads("packed", (2, 3, 5, 64), torch.float32)
    gains, rope = torch.rand(2, 64) + 0.5, rotation(3, 64)
    actual = kernel("qk_norm_rope")(q, k, *gains, EPS, rope, launch)
    for result, x, gain in zip(actual, (q, k), gains, strict=True):
        assert_rounded_once(result, exact_norm_rope(x, gain, rope), torch.float32)


@pytest.mark.parametrize("name", ROW_TILES)
@pytest.mark.parametrize("width", [8, 24, 128, 3000, 4096, 5120, 16384])
def test_chosen_row_launches_are_valid(name, width):
    launch = row_launch(name, width)
    assert launch.block >= width > launch.block // 2
    for number in (launch.block, launch.rows, launch.warps):
        assert number & (number - 1) == 0
    assert launch.warps <= 32
    assert launch.grid(67782, 2) == (math.ceil(67782 / launch.rows), 2)


@pytest.mark.parametrize(("count", "head_dim"), [(1, 64), (3, 64), (24, 128), (32, 128), (40, 128)])
def test_chosen_head_launches_are_valid(count, head_dim):
    launch = head_launch(count, head_dim)
    for number in (launch.block, launch.warps):
        assert number & (number - 1) == 0
    tokens, blocks, batch = launch.grid(67782, count, 2)
    assert (tokens, batch) == (67782, 2)
    assert blocks * launch.block >= count > (blocks - 1) * launch.block


def test_offsets_are_64_bit():
    """Two rows, and two samples, more than 2**31 elements apart: memory that is reserved but hardly touched."""
    far, width, dtype = 2**31 + 8, 24, torch.float16
    memory = torch.empty(far + 2 * width, dtype=dtype)
    vector = torch.randn(1, 1, width).to(dtype)
    for shape, stride in (((1, 2, width), (8, far, 1)), ((2, 1, width), (far, 8, 1))):
        x = memory.as_strided(shape, stride)
        x.copy_(torch.randn(shape))
        assert_rounded_once(
            kernel("norm_modulate")(x, vector, vector, EPS), exact_norm_modulate(x, vector, vector), dtype
        )
        assert_rounded_once(kernel("gate_residual")(x, x, vector), exact_gate_residual(x, x, vector), dtype)
        stream, _ = kernel("gate_residual_norm_modulate")(x, x, vector, vector, vector, EPS)
        assert_rounded_once(stream, exact_gate_residual(x, x, vector), dtype)
    memory = torch.empty(far + 64, dtype=dtype)
    for axis in range(3):
        shape = [1, 1, 1, 64]
        shape[axis] = 2
        stride = [8, 8, 8, 1]
        stride[axis] = far
        q = memory.as_strided(shape, stride)
        q.copy_(torch.randn(shape))
        gain, rope = torch.ones(64), rotation(shape[1], 64)
        for result in kernel("qk_norm_rope")(q, q, gain, gain, EPS, rope):
            assert_rounded_once(result, exact_norm_rope(q, gain, rope), dtype)


@pytest.mark.parametrize("shape", [(0, 3, 24), (2, 0, 24)], ids=str)
def test_nothing_in_nothing_out(shape):
    x, vector = torch.randn(shape), torch.randn(1, 1, 24)
    assert FUSED_OPS.norm_modulate(x, vector, vector, EPS).shape == shape
    assert FUSED_OPS.gate_residual(x, x, vector).shape == shape
    assert [part.shape for part in FUSED_OPS.gate_residual_norm_modulate(x, x, vector, vector, vector, EPS)] == [
        shape
    ] * 2
    q, gain = torch.randn(*shape[:2], 2, 64), torch.ones(64)
    for rope in (None, rotation(shape[1], 64)):
        assert [part.shape for part in FUSED_OPS.qk_norm_rope(q, q, gain, gain, EPS, rope)] == [q.shape] * 2


def test_large_values_do_not_overflow_the_statistics():
    x = torch.full((1, 1, 64), 3e4, dtype=torch.float16)
    x[..., ::2] = -3e4
    gain, zero = torch.ones(64, dtype=torch.float16), torch.zeros(1, 1, 64, dtype=torch.float16)
    torch.testing.assert_close(kernel("norm_modulate")(x, zero, zero, EPS), x / 3e4)
    q = x.unflatten(-1, (1, 64))
    torch.testing.assert_close(kernel("qk_norm_rope")(q, q, gain, gain, EPS, None)[0], q / 3e4)


@pytest.mark.skipif(INTERPRETED, reason="full size takes a GPU")
def test_full_size(poisoned):
    """67,782 tokens of 32 x 128, a few thousand of them at a time in float64."""
    tokens, width, dtype = 67782, 4096, torch.bfloat16
    residual, y = torch.randn(2, 1, tokens, width, dtype=dtype)
    gate, shift, scale = vectors((1, tokens, width), dtype, 3, True)
    normed = kernel("norm_modulate")(residual, shift, scale, EPS)
    added = kernel("gate_residual")(residual, y, gate)
    stream, normed_stream = kernel("gate_residual_norm_modulate")(residual, y, gate, shift, scale, EPS)
    q, k = residual.unflatten(-1, (32, 128)), y.unflatten(-1, (32, 128))
    gains, rope = torch.rand(2, 128).to(dtype) + 0.5, rotary_table((79, 22, 39), (16, 56, 56), 256.0, 16 / 24, DEVICE)
    new_q, new_k = kernel("qk_norm_rope")(q, k, *gains, EPS, rope)
    for part in (slice(start, start + 4096) for start in range(0, tokens, 4096)):
        here = (slice(None), part)
        expected = exact_gate_residual(residual[here], y[here], gate)
        assert_rounded_once(added[here], expected, dtype)
        assert_rounded_once(stream[here], expected, dtype)
        assert_rounded_once(normed[here], exact_norm_modulate(residual[here], shift, scale), dtype)
        assert_rounded_once(normed_stream[here], exact_norm_modulate(stream[here], shift, scale), dtype)
        turn = RotaryTable(rope.cos[part], rope.sin[part])
        assert_rounded_once(new_q[here], exact_norm_rope(q[here], gains[0], turn), dtype)
        assert_rounded_once(new_k[here], exact_norm_rope(k[here], gains[1], turn), dtype)


# Operators


def arguments_of(name: str, dtype: torch.dtype = torch.float32) -> tuple:
    shape = (2, 3, 24)
    if name == "qk_norm_rope":
        q, k = heads("packed", (2, 3, 2, 64), dtype)
        return q, k, torch.rand(64), torch.rand(64), EPS, rotation(3, 64)
    count = {"norm_modulate": 1, "gate_residual": 2, "gate_residual_norm_modulate": 2}[name]
    eps = () if name == "gate_residual" else (EPS,)
    few = {"norm_modulate": 2, "gate_residual": 1, "gate_residual_norm_modulate": 3}[name]
    return *streams(shape, dtype, count), *vectors(shape, dtype, few, False), *eps


def flat(arguments: tuple) -> tuple:
    """As the custom operators take them: a rotation is two tensors."""
    *plain, last = arguments
    return (*plain, *last) if isinstance(last, RotaryTable) else arguments


@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_torchs_checks(name):
    arguments = flat(arguments_of(name))
    torch.library.opcheck(getattr(torch.ops.fastvideo_pan2, name).default, arguments)
    if name == "qk_norm_rope":
        torch.library.opcheck(torch.ops.fastvideo_pan2.qk_norm_rope.default, (*arguments[:5], None, None))


@pytest.mark.parametrize("name", NAMES)
def test_compiled_calls_use_the_kernel(name, monkeypatch):
    arguments, calls = arguments_of(name), []
    counted = kernel(name)
    monkeypatch.setattr(KERNELS[name], name, lambda *given: calls.append(name) or counted(*given))
    expected = getattr(TORCH_OPS, name)(*arguments)
    compiled = torch.compile(getattr(FUSED_OPS, name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), expected, rtol=1e-5, atol=1e-5)
    assert calls == [name]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_go_through_the_torch_op(name, monkeypatch):
    arguments, calls = arguments_of(name), []
    counted = kernel(name)
    monkeypatch.setattr(KERNELS[name], name, lambda *given: calls.append(name) or counted(*given))

    def gradient(op, *given):
        leaf = given[0].detach().clone().requires_grad_()
        result = op(leaf, *given[1:])
        total = result if isinstance(result, torch.Tensor) else result[0] + 2 * result[1]
        total.square().sum().backward()
        return leaf.grad

    assert torch.equal(gradient(getattr(FUSED_OPS, name), *arguments), gradient(getattr(TORCH_OPS, name), *arguments))
    assert calls == []
    getattr(FUSED_OPS, name)(*arguments)
    assert calls == [name]


# Whole transformer

TINY = {
    "patch_size": [1, 2, 2],
    "in_channels": 5,
    "out_channels": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "context_mlp_ratio": 2.0,
    "refiner_mlp_ratio": 1.0,
    "text_embed_dim": 24,
    "rope_axes_dim": [16, 24, 24],
}
# In the tiny model: two streams in each of two blocks, one refiner block, one output norm.
CALLS = {"norm_modulate": 5, "qk_norm_rope": 5, "gate_residual": 4, "gate_residual_norm_modulate": 4}


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory: pytest.TempPathFactory):
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    maybe_init_distributed_environment_and_model_parallel(1, 1, f"file://{rendezvous}")
    yield
    cleanup_dist_env_and_memory()


def make_model(dtype: torch.dtype = torch.float32) -> PAN2Transformer3DModel:
    """A model whose every tensor matters: no zero gates, no unit gains."""
    config = PAN2Config()
    config.update_model_arch(TINY)
    model = PAN2Transformer3DModel(config, hf_config={})
    for name, tensor in model.state_dict().items():
        tensor.normal_(std=0.3 if tensor.dim() == 1 else tensor[0].numel() ** -0.5)
        if "norm" in name and tensor.dim() == 1 and name.endswith("weight"):
            tensor.add_(1)
    return model.to(dtype).requires_grad_(False)


def make_inputs(batch: int = 2, grid: Shape = (3, 6, 10), tokens: int = 5) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(batch, TINY["in_channels"], *grid),
        "encoder_hidden_states": torch.randn(batch, tokens, TINY["text_embed_dim"]),
        "timestep": torch.tensor([37.5, 912.0])[:batch],
    }


def run(model: torch.nn.Module, **inputs) -> torch.Tensor:
    with torch.no_grad(), set_forward_context(current_timestep=0, attn_metadata=None):
        return model(**inputs)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts the kernels' launches by name."""
    counter: Counter = Counter()

    def count(name):
        launch = kernel(name)

        def counted(*arguments):
            counter[name] += 1
            return launch(*arguments)

        monkeypatch.setattr(KERNELS[name], name, counted)

    for name in NAMES:
        count(name)
    return counter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformer_is_the_same_with_fused_kernels(single_rank, launches, dtype):
    model, inputs = make_model(dtype), make_inputs()
    expected = run(model, **inputs)
    assert not launches
    assert set_fused_kernels(model, True)
    actual = run(model, **inputs)
    assert dict(launches) == CALLS
    assert relative_error(actual, expected) < {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    launches.clear()
    assert not set_fused_kernels(model, False)
    assert torch.equal(run(model, **inputs), expected)
    assert not launches


def test_fused_bf16_is_as_near_to_fp32_as_the_torch_ops(single_rank):
    model, inputs = make_model(), make_inputs()
    rounded = make_model(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    model.load_state_dict(rounded.state_dict())
    inputs = {name: value.bfloat16().float() for name, value in inputs.items()}
    exact = run(model, **inputs)
    unfused = relative_error(run(rounded, **inputs), exact)
    set_fused_kernels(rounded, True)
    fused = relative_error(run(rounded, **inputs), exact)
    assert 1e-4 < unfused < 2e-2
    # Cut-off bf16 costs the interpreter twice the error.
    assert fused < (2.5 if INTERPRETED else 1.1) * unfused


def test_compiled_blocks_use_the_kernels(single_rank, launches):
    model, inputs = make_model(), make_inputs()
    expected = run(model, **inputs)
    set_fused_kernels(model, True)
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.compile(backend="aot_eager")
    torch.testing.assert_close(run(model, **inputs), expected, rtol=1e-4, atol=1e-5)
    assert dict(launches) == CALLS
    # The switch reaches compiled code.
    set_fused_kernels(model, False)
    launches.clear()
    torch.testing.assert_close(run(model, **inputs), expected, rtol=1e-4, atol=1e-5)
    assert not launches


@pytest.mark.skipif(not INTERPRETED, reason="ranks of one host on a CPU: in the interpreter only")
def test_ranks_return_the_output_of_one(single_rank, run_python, scripts: Path, tmp_path: Path):
    """45 tokens, padded for two ranks, and a single one, which leaves the second rank padding alone."""
    model, cases = make_model(), [make_inputs(), make_inputs(batch=1, grid=(1, 2, 2))]
    torch.save({"config": TINY, "weights": model.state_dict(), "cases": cases}, tmp_path / "cases.pt")
    run_python(scripts / "pan2_fusions_ranks.py", tmp_path / "cases.pt", tmp_path / "out", "2", TRITON_INTERPRET="1")
    expected = [run(model, **case) for case in cases]
    for rank in range(2):
        saved = torch.load(tmp_path / f"out.{rank}")
        assert saved["ops"] == "fused"
        for actual, wanted in zip(saved["outputs"], expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="two devices: a CPU and a GPU")
def test_a_model_that_moves_between_devices_keeps_working(single_rank, launches):
    model, inputs = make_model(), make_inputs()
    set_fused_kernels(model, True)
    expected = run(model, **inputs)
    assert dict(launches) == CALLS
    launches.clear()
    model.to("cpu")
    with torch.device("cpu"):
        table = pan2_ops.RotaryTable(torch.ones(3, 32), torch.zeros(3, 32))
        q, gain = torch.randn(1, 3, 2, 64), torch.ones(64)
        for ours, theirs in zip(
            FUSED_OPS.qk_norm_rope(q, q, gain, gain, EPS, table),
            TORCH_OPS.qk_norm_rope(q, q, gain, gain, EPS, table),
            strict=True,
        ):
            assert torch.equal(ours, theirs)
    assert not launches
    model.to("cuda")
    assert torch.equal(run(model, **inputs), expected)
