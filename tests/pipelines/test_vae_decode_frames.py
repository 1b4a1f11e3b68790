# SPDX-License-Identifier: Apache-2.0
"""A video that is only to be written to a file: quantised by the decoder, in host memory, the same bytes as before."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import imageio.v3
import numpy as np
import pytest
import torch
from fastvideo.models.vaes.wan22_host_frames import collect
from fastvideo.pipelines.pan2.stages import decoding
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch

KERNEL = {"decode_kernel": True, "decode_backend": "torch"}


def written(video: torch.Tensor) -> torch.Tensor:
    """What FastVideo 0.2.1 writes of a video in [0, 1] (``VideoGenerator``)."""
    return (video * 255).clamp_(0, 255).to(torch.uint8)


def test_every_byte_survives_its_float():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 16, 16)
    video = collect(iter([pixels, pixels.flip(3).repeat(1, 1, 4, 1, 1)]), (1, 1, 5, 16, 16))
    assert video.dtype == torch.float32
    assert video.min() == 0
    assert video.max() == 1
    assert torch.equal(written(video), torch.cat([pixels, *[pixels.flip(3)] * 4], dim=2))


def test_failure_of_a_pass_is_the_caller_s():
    def passes() -> Iterator[torch.Tensor]:
        yield torch.zeros(1, 3, 1, 16, 16, dtype=torch.uint8)
        raise ValueError("the second pass")

    with pytest.raises(ValueError, match="the second pass"):
        collect(passes(), (1, 3, 5, 16, 16))


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_frames_are_the_writer_s_bytes_of_the_video(batch, tiny):
    vae, z = tiny.tiny_vae(**KERNEL, decode_frames_per_pass=2), tiny.tiny_latents(frames=5, batch=batch)
    frames = vae.frames_on_first_rank(z, is_writer=True)
    assert vae.decode_report()["decode_path"] == "wan22_vae_decode, torch, float32, uint8 to the host"
    assert torch.equal(written(frames), written((vae.decode(z) / 2 + 0.5).clamp(0, 1)))
    assert vae.frames_on_first_rank(z, is_writer=False) is None


@torch.no_grad()
def test_upstream_s_decode_keeps_its_floats(tiny):
    vae, z = tiny.tiny_vae(), tiny.tiny_latents()
    frames = vae.frames_on_first_rank(z, is_writer=True)
    assert torch.equal(frames, (vae.decode(z) / 2 + 0.5).clamp(0, 1))


@torch.no_grad()
def test_lack_of_memory_in_the_middle_is_upstream_s_decode(tiny, monkeypatch):
    from wan22_vae_decode.backends.torch import TorchBackend

    heads = []
    head = TorchBackend.output_head

    def second_fails(self, *arguments):
        heads.append(1)
        if len(heads) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        head(self, *arguments)

    monkeypatch.setattr(TorchBackend, "output_head", second_fails)
    vae, z = tiny.tiny_vae(**KERNEL, decode_frames_per_pass=1), tiny.tiny_latents()
    frames = vae.frames_on_first_rank(z, is_writer=True)
    assert vae.decode_report()["decode_path"] == "FastVideo"
    assert torch.equal(frames, (tiny.tiny_vae().decode(z) / 2 + 0.5).clamp(0, 1))


# The stage


@pytest.fixture
def run_stage(tiny, monkeypatch) -> Any:
    """Runs the PAN2 stage on a tiny VAE; returns the batch and the VAE's report."""
    monkeypatch.setattr(decoding, "get_local_torch_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(decoding, "get_world_group", lambda: SimpleNamespace(is_first_rank=True))
    vae = tiny.tiny_vae(**KERNEL)
    config = SimpleNamespace(vae_decode_precision=None, vae_precision="fp32", vae_tiling=False, vae_config=vae.config)
    arguments = SimpleNamespace(
        pipeline_config=config,
        disable_autocast=False,
        output_type="pil",
        vae_cpu_offload=False,
        model_loaded={"vae": True},
    )

    def run(**fields: Any) -> tuple[torch.Tensor, str]:
        batch = ForwardBatch(data_type="video", latents=tiny.tiny_latents(), **fields)
        stage = decoding.PAN2DecodingStage(vae)
        stage._pipeline_stage_name = "decoding"  # as the pipeline that adds a stage does
        return stage.forward(batch, arguments).output, vae.decode_report()["decode_path"]

    return run


def test_stage_hands_a_file_s_video_over_in_bytes(run_stage):
    video, path = run_stage(return_frames=True, save_video=True)
    assert path == "wan22_vae_decode, torch, float32"
    frames, path = run_stage(return_frames=False, save_video=True)
    assert path == "wan22_vae_decode, torch, float32, uint8 to the host"
    assert frames.dtype == torch.float32
    assert not torch.equal(frames, video)
    assert torch.equal(written(frames), written(video))


def test_stage_of_a_worker_without_shared_memory_keeps_the_video_on_its_device(run_stage, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    video, path = run_stage(return_frames=False, save_video=True)
    assert path.endswith("uint8 to the host")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    said: list[str] = []
    monkeypatch.setattr(decoding.logger, "warning_once", said.append)
    kept, path = run_stage(return_frames=False, save_video=True)
    assert path == "wan22_vae_decode, torch, float32"
    assert torch.equal(written(kept), written(video))
    assert said == [
        "The video stays on the GPU until it is written: /dev/shm has no room for its 0 MiB "
        "(docker run --shm-size gives it more)."
    ]


# Whole generations


@pytest.mark.parametrize("ranks", [0, 2], ids=["spawned worker", "2 ranks of torchrun"])
def test_file_is_the_same_whether_its_frames_are_asked_for_or_not(
    ranks, run_python, run_ranks, scripts, tiny_checkpoint, tmp_path
):
    requests = {
        name: {"output": {"output_path": str(tmp_path / f"{name}.mp4"), "save_video": True, "return_frames": asked}}
        for name, asked in {"frames": True, "file": False}.items()
    }
    options = {"pipeline_config": {"dit_precision": "fp32", "vae_config": {"decode_backend": "torch"}}}
    command = (scripts / "generate.py", tiny_checkpoint, tmp_path, json.dumps(options), json.dumps(requests))
    run = (lambda *rest, **also: run_ranks(ranks, *rest, **also)) if ranks else run_python
    run(*command, FASTVIDEO_STAGE_LOGGING="1")
    paths = []
    for name in requests:
        stages = json.loads((tmp_path / f"{name}.rank0.json").read_text())["stages"]
        paths += [stage["decode_path"] for stage in stages.values() if "decode_path" in stage]
    assert [path.endswith(", uint8 to the host") for path in paths] == [False, True]
    frames, file = (imageio.v3.imread(tmp_path / f"{name}.mp4") for name in requests)
    assert frames.std() > 10
    assert np.array_equal(frames, file)
