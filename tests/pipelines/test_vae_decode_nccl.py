# SPDX-License-Identifier: Apache-2.0
"""PAN2 over several GPUs under torchrun: the full-size VAE gives the same frames over NCCL, alone and as upstream.

What happens when a rank cannot take part is told over a CPU group and is tested in ``test_vae_decode_ranks``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from wan22_vae_decode import why_not

pytestmark = pytest.mark.gpu

SAMPLING = {"height": 192, "width": 320, "num_frames": 17}
SWITCHES = {
    "split": {"decode_kernel": True, "decode_kernel_parallel": True},
    "alone": {"decode_kernel": True, "decode_kernel_parallel": False},
    "upstream": {"decode_kernel": False},
}


@pytest.fixture(scope="module", params=[2, 4], ids="{} GPUs".format)
def gpus(request) -> int:
    """Their number, where there are as many and the kernels can be built for them."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices, torch sees {torch.cuda.device_count()}")
    reason = why_not(device="cuda", backend="cuda")
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def checkpoint(gpus, tmp_path_factory) -> Path:
    """PAN2 with a tiny transformer and the VAE at its real size."""
    from fastvideo.pipelines.pan2.tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("full_vae") / "pan2", full_vae=True)


@pytest.fixture(scope="module")
def out(gpus, checkpoint, tmp_path_factory, run_ranks, scripts) -> Path:
    """Frames and decode reports of a generation with each of SWITCHES."""
    folder = tmp_path_factory.mktemp("frames")
    run = {"checkpoint": str(checkpoint), "options": {}, "sampling": SAMPLING}
    runs = {name: run | {"switches": switches} for name, switches in SWITCHES.items()}
    run_ranks(gpus, scripts / "vae_generate.py", json.dumps(runs), folder, timeout=450)
    return folder


def frames(out: Path, name: str) -> np.ndarray:
    return np.load(out / f"{name}.0.npy").astype(int)


def test_each_switch_takes_its_path(gpus, out):
    paths = {name: json.loads((out / f"{name}.0.json").read_text())["report"]["decode_path"] for name in SWITCHES}
    ours = "wan22_vae_decode, cuda, float16"
    assert paths == {"split": f"{ours}, {gpus} ranks", "alone": ours, "upstream": "FastVideo"}


def test_split_decode_gives_the_frames_of_one_gpu(out):
    split, alone = frames(out, "split"), frames(out, "alone")
    assert split.shape == (17, 192, 320, 3)
    assert split.std() > 10
    assert np.abs(split - alone).max() <= 1


def test_split_decode_gives_upstream_s_frames(out):
    # Upstream's float32 convolutions use TF32, and the kernels float16: steps of a pixel, not more.
    difference = np.abs(frames(out, "split") - frames(out, "upstream"))
    assert difference.mean() < 0.5
    assert difference.max() <= 8
