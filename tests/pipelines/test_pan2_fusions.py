# SPDX-License-Identifier: Apache-2.0
"""The switch of the fused kernels, what they refuse, and their own tests in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import fastvideo.pipelines.pan2  # noqa: F401  (on a CPU: the device, the attention backend)
import pytest
import torch
from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.models.dits import pan2_fusions, pan2_ops
from fastvideo.models.dits.pan2_fusions import FUSED_OPS, eligibility, ops, set_fused_kernels, why_unavailable
from fastvideo.models.dits.pan2_fusions.eligibility import why_not_heads, why_not_streams
from fastvideo.models.dits.pan2_ops import TORCH_OPS, RotaryTable
from fastvideo.pipelines.composed_pipeline_base import ComposedPipelineBase
from fastvideo.pipelines.pan2 import pipeline as pan2_pipeline

HERE = Path(__file__).parent
EPS = 1e-6


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed on this platform")
def test_kernels_in_the_interpreter(run_python):
    """On a CPU; with a GPU the same tests run on it directly as well."""
    done = run_python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        HERE / "test_pan2_fusions_kernels.py",
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > 150


# The switch


class Model:
    """Stands in for the transformer: remembers its ops."""

    ops = None

    def set_ops(self, ops) -> None:
        self.ops = ops


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the package logs."""
    lines: list[str] = []

    def record(message: str, *values) -> None:
        lines.append(message % values)

    for module in (pan2_fusions, ops):
        monkeypatch.setattr(module.logger, "info", record)
    ops._say_once.cache_clear()
    return lines


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Triton and a new enough GPU, as far as the availability check asks."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_switch_flips_the_ops(capable, messages):
    model = Model()
    assert set_fused_kernels(model, True)
    assert model.ops is FUSED_OPS
    assert not set_fused_kernels(model, False)
    assert model.ops is TORCH_OPS
    assert messages == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(importlib.util, "find_spec", lambda name: None), "Triton is not installed"),
        (lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False), "there is no CUDA device"),
        (
            lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5)),
            "the GPU is older than compute capability 8.0",
        ),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(capable, messages, monkeypatch, change, reason):
    change(monkeypatch)
    model = Model()
    assert why_unavailable() == reason
    assert not set_fused_kernels(model, True)
    assert model.ops is TORCH_OPS
    assert messages == [f"PAN2's fused kernels stay off: {reason}. The torch ops compute the same."]


def test_import_needs_no_triton(run_python):
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from fastvideo.models.dits.pan2_fusions import why_unavailable\n"
        "print(why_unavailable())"
    )
    assert run_python("-c", program).stdout.splitlines()[-1] == "Triton is not installed"


def test_pipeline_applies_the_configs_switch(capable, monkeypatch):
    monkeypatch.setattr(pan2_pipeline, "check_checkpoint", lambda *given, **named: None)
    monkeypatch.setattr(pan2_pipeline.PAN2Pipeline, "_load_config", lambda self, path: {})
    monkeypatch.setattr(ComposedPipelineBase, "load_modules", lambda self, args, given: {"transformer": Model()})
    pipeline = object.__new__(pan2_pipeline.PAN2Pipeline)
    pipeline.model_path = ""

    class Args:
        sp_size = 1

    for config, expected in (
        (PAN2PipelineConfig(), FUSED_OPS),
        (PAN2PipelineConfig(dit_fused_kernels=False), TORCH_OPS),
    ):
        args = Args()
        args.pipeline_config = config
        assert pipeline.load_modules(args)["transformer"].ops is expected


def test_switch_can_be_set_by_name():
    config = PAN2PipelineConfig()
    assert config.dit_fused_kernels
    config.update_pipeline_config({"dit_fused_kernels": False})
    assert not config.dit_fused_kernels


# What the kernels refuse


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "INTERPRETED", True)


def stream(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(
    ("streams", "vectors", "reason"),
    [
        ((stream(2, 5, 24),), (stream(2, 1, 24), stream(1, 1, 24)), None),
        ((stream(1, 10, 24)[:, ::2],), (stream(6 * 24).unflatten(0, (6, 1, 1, -1))[3],), None),
        ((stream(2, 5, 24, dtype=torch.bfloat16),), (stream(1, 1, 24),), None),
        ((stream(2, 1, 32)[:, :, 4:28],), (stream(1, 1, 24),), None),
        ((stream(5, 24),), (stream(1, 1, 24),), "not [B, tokens, width] of one size"),
        ((stream(2, 5, 24), stream(1, 5, 24)), (stream(1, 1, 24),), "not [B, tokens, width] of one size"),
        ((stream(2, 5, 20),), (stream(1, 1, 20),), "not a multiple of 8"),
        ((stream(1, 1, 16392),), (stream(1, 1, 16392),), "up to 16384"),
        ((stream(1, 1, 8).expand(65536, 1, 8),), (stream(1, 1, 8),), "larger than 65535"),
        ((stream(2, 5, 24),), (stream(24),), "not [B or 1, 1, width]"),
        ((stream(2, 5, 24),), (stream(2, 5, 24),), "not [B or 1, 1, width]"),
        ((stream(2, 5, 24),), (stream(2, 1, 24).double(),), "not bf16, fp16 or fp32"),
        ((stream(2, 5, 48)[..., ::2],), (stream(1, 1, 24),), "rows are not contiguous"),
        ((stream(2, 5, 28)[..., :24],), (stream(1, 1, 24),), "8 elements apart"),
        ((stream(2, 5, 24),), (stream(1, 1, 24).to("meta"),), "different devices"),
        ((stream(2, 5, 24).requires_grad_(),), (stream(1, 1, 24),), "gradients are recorded"),
        ((stream(2, 5, 24),), (stream(1, 1, 24).requires_grad_(),), "gradients are recorded"),
    ],
)
def test_streams_that_kernels_refuse(as_if_on_a_gpu, streams, vectors, reason):
    answer = why_not_streams(streams, vectors)
    assert answer is None if reason is None else reason in answer
    if reason == "gradients are recorded":
        with torch.no_grad():
            assert why_not_streams(streams, vectors) is None


Q = stream(2, 3, 4, 64)
GAIN = stream(64)
ROPE = RotaryTable(stream(3, 32), stream(3, 32))


@pytest.mark.parametrize(
    ("q", "k", "gain", "rope", "reason"),
    [
        (Q, Q, GAIN, ROPE, None),
        (Q, Q, GAIN, None, None),
        (*stream(2, 3, 2, 4, 64).unbind(2), GAIN, ROPE, None),
        (Q.flatten(2), Q.flatten(2), GAIN, ROPE, "of one size"),
        (Q, Q[:, :, :2], GAIN, ROPE, "of one size"),
        (Q[..., :32], Q[..., :32], GAIN[:32], None, "head_dim is not one of (64, 128)"),
        (Q, Q, GAIN[:1], ROPE, "a gain is not [head_dim]"),
        (Q, Q, GAIN, RotaryTable(ROPE.cos[:2], ROPE.sin[:2]), "not [tokens, head_dim / 2]"),
        (Q, Q, GAIN, RotaryTable(ROPE.cos, ROPE.sin[:1]), "not [tokens, head_dim / 2]"),
        (Q, Q, GAIN, RotaryTable(ROPE.cos.double(), ROPE.sin), "not bf16, fp16 or fp32"),
        (Q, Q, GAIN, RotaryTable(ROPE.cos.T.contiguous().T, ROPE.sin), "rows are not contiguous"),
        (Q, stream(2, 3, 4, 68)[..., :64], GAIN, ROPE, "8 elements apart"),
        (stream(1, 1, 1, 64).expand(65536, 1, 1, 64),) * 2 + (GAIN, None, "larger than 65535"),
        (Q, Q, GAIN.clone().requires_grad_(), ROPE, "gradients are recorded"),
    ],
)
def test_heads_that_kernels_refuse(as_if_on_a_gpu, q, k, gain, rope, reason):
    answer = why_not_heads(q, k, gain, gain, rope)
    assert answer is None if reason is None else reason in answer


@pytest.mark.skipif(eligibility.INTERPRETED, reason="Triton's interpreter takes tensors on a CPU")
def test_refused_calls_give_the_torch_ops_result_and_one_line(messages):
    x, y, vector = stream(2, 5, 20), stream(2, 5, 20), stream(2, 1, 20)
    for _ in range(2):
        assert torch.equal(
            FUSED_OPS.norm_modulate(x, vector, vector, EPS), TORCH_OPS.norm_modulate(x, vector, vector, EPS)
        )
        assert torch.equal(FUSED_OPS.gate_residual(x, y, vector), TORCH_OPS.gate_residual(x, y, vector))
        ours = FUSED_OPS.gate_residual_norm_modulate(x, y, vector, vector, vector, EPS)
        theirs = TORCH_OPS.gate_residual_norm_modulate(x, y, vector, vector, vector, EPS)
        ours += FUSED_OPS.qk_norm_rope(Q, Q, GAIN, GAIN, EPS, ROPE)
        theirs += TORCH_OPS.qk_norm_rope(Q, Q, GAIN, GAIN, EPS, ROPE)
        assert all(map(torch.equal, ours, theirs))
    width = "the width is not a multiple of 8 up to 16384"
    assert messages == [
        f"PAN2's norm_modulate runs as a torch op where {width}.",
        f"PAN2's gate_residual runs as a torch op where {width}.",
        f"PAN2's gate_residual_norm_modulate runs as a torch op where {width}.",
        "PAN2's qk_norm_rope runs as a torch op where the tensors are not on a CUDA device.",
    ]


def test_every_group_has_a_fused_op():
    for name in pan2_ops.PAN2Ops.__dataclass_fields__:
        assert getattr(FUSED_OPS, name) is getattr(ops, name)
        assert getattr(FUSED_OPS, name) is not getattr(TORCH_OPS, name)
