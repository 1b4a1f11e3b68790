# SPDX-License-Identifier: Apache-2.0
"""Whole generations, by stock Wan2.2 TI2V-5B and by PAN2, with the fast decoder on, off, and over ranks."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="frames are compared as a CPU makes them")

KERNEL = {"decode_kernel": True, "decode_backend": "torch"}
PARALLEL = KERNEL | {"decode_kernel_parallel": True}
OURS = "fastvideo.configs.pipelines.wan22_decode.Wan2_2_TI2V_5B_Config"


@pytest.fixture(scope="module")
def wan_checkpoint(tmp_path_factory, scripts, tiny_checkpoint) -> Path:
    """FastVideo knows a local TI2V-5B by its folder's name."""
    folder = tmp_path_factory.mktemp("wan") / "Wan2.2-TI2V-5B-Diffusers"
    runpy.run_path(str(scripts / "tiny_wan.py"))["write_tiny_wan"](folder, tiny_checkpoint / "vae")
    return folder


class Seen:
    """What the runs of one ``vae_generate.py`` gave."""

    def __init__(self, out: Path, log: str) -> None:
        self.out = out
        self.log = dict(part.split(":", 1) for part in log.split("\nRun ")[1:])

    def frames(self, name: str, rank: int = 0) -> np.ndarray:
        return np.load(self.out / f"{name}.{rank}.npy").astype(int)

    def record(self, name: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.out / f"{name}.{rank}.json").read_text())

    def path(self, name: str, rank: int = 0) -> str:
        return self.record(name, rank)["report"]["decode_path"]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory, run_python, scripts, wan_checkpoint) -> Seen:
    """A worker in a process of its own."""
    out = tmp_path_factory.mktemp("spawned")
    options = {"pipeline_config": {"vae_config": KERNEL, "vae_decode_precision": "fp32"}}
    runs = {"wan": {"checkpoint": str(wan_checkpoint), "options": options}}
    return Seen(out, run_python(scripts / "vae_generate.py", json.dumps(runs), out).stdout)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, run_ranks, scripts, wan_checkpoint, tiny_checkpoint) -> Seen:
    """Two sequence-parallel ranks under torchrun."""
    out = tmp_path_factory.mktemp("two_ranks")

    def wan(**options):
        return {"checkpoint": str(wan_checkpoint), "options": options}

    def pan2(**switches):
        options = {"pipeline_config": {"vae_config": {"decode_backend": "torch"}}}
        return {"checkpoint": str(tiny_checkpoint), "options": options, "switches": switches}

    runs = {
        "wan": wan(),
        "wan, float32": wan(pipeline_config={"vae_decode_precision": "fp32"}),
        "wan, kernel": wan(pipeline_config={"vae_config": KERNEL}),
        "wan, parallel": wan(**{f"vae_config.{name}": value for name, value in PARALLEL.items()}),
        "wan, auto": wan(pipeline_config={"vae_config": {"decode_kernel": True}}),
        "pan2": pan2(),
        "pan2, each alone": pan2(decode_kernel_parallel=False),
        "pan2, off": pan2(decode_kernel=False),
    }
    done = run_ranks(2, scripts / "vae_generate.py", json.dumps(runs), out)
    return Seen(out, done.stdout)


def assert_same_frames(one: np.ndarray, other: np.ndarray) -> None:
    """Equal but for pixels that rounding tips over."""
    assert one.shape == other.shape == (9, 64, 96, 3)
    assert one.std() > 10
    difference = np.abs(one - other)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-2


def test_stock_wan_decodes_by_the_kernels_in_a_spawned_worker(spawned, two_ranks):
    assert "Decoding with wan22_vae_decode, torch, float32." in spawned.log["wan"]
    assert spawned.record("wan")["config"] == OURS
    # Two ranks round the transformer's bfloat16 differently from one.
    assert np.abs(spawned.frames("wan") - two_ranks.frames("wan, float32")).mean() < 2


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("wan, kernel", "wan22_vae_decode, torch, float32"),
        ("wan, parallel", "wan22_vae_decode, torch, float32, 2 ranks"),
    ],
)
def test_stock_wan_s_frames_are_those_of_its_own_float32_decode(name, path, two_ranks):
    assert two_ranks.path(name) == two_ranks.path(name, rank=1) == path
    assert f"Decoding with {path}." in two_ranks.log[name]
    assert two_ranks.record(name)["config"] == OURS
    assert_same_frames(two_ranks.frames(name), two_ranks.frames("wan, float32"))
    # Wan decodes under bfloat16 autocast, which must not reach the kernels.
    assert np.abs(two_ranks.frames("wan") - two_ranks.frames("wan, float32")).max() > 1


def test_stock_wan_without_the_switch_is_upstream_s(two_ranks):
    assert two_ranks.record("wan")["report"] == {"decode_path": "FastVideo", "decode_reason": "decode_kernel is off"}
    assert "Decoding with" not in two_ranks.log["wan"]


def test_stock_wan_without_kernels_here_is_upstream_s_with_its_reason(two_ranks):
    assert np.array_equal(two_ranks.frames("wan, auto"), two_ranks.frames("wan"))
    for rank in (0, 1):
        assert two_ranks.path("wan, auto", rank) == "FastVideo"
    line = "Decoding with FastVideo's own decode: the CUDA kernels need a CUDA device, not cpu"
    assert line in two_ranks.log["wan, auto"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("pan2", "wan22_vae_decode, torch, float32, 2 ranks"),
        ("pan2, each alone", "wan22_vae_decode, torch, float32"),
        ("pan2, off", "FastVideo"),
    ],
)
def test_pan2_s_frames_do_not_depend_on_the_path(name, path, two_ranks):
    assert two_ranks.path(name) == path
    assert_same_frames(two_ranks.frames(name), two_ranks.frames("pan2, off"))
    assert not (two_ranks.out / f"{name}.1.npy").exists()


def test_pan2_s_second_rank_decodes_only_its_share(two_ranks):
    # Its report is still that of the shared decode before.
    assert {two_ranks.path(name, rank=1) for name in ("pan2", "pan2, each alone", "pan2, off")} == {
        "wan22_vae_decode, torch, float32, 2 ranks"
    }
