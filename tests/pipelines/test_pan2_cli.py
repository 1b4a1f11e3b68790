# SPDX-License-Identifier: Apache-2.0
"""The command lines: ``fastvideo-pan2`` (FastVideo's own, with PAN2 registered) and the demo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import imageio.v3
from PIL import Image

FASTVIDEO_PAN2 = Path(sys.executable).parent / "fastvideo-pan2"


def test_generate_with_a_run_config(tmp_path, run_python, tiny_checkpoint):
    config = {
        "generator": {"model_path": str(tiny_checkpoint), "engine": {"num_gpus": 1}},
        "request": {
            "prompt": "waves",
            "sampling": {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 1},
            "output": {"output_path": str(tmp_path / "video.mp4")},
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    decode = "--generator.pipeline.experimental.pipeline_config.vae_config.decode_frames_per_pass"
    run_python(FASTVIDEO_PAN2, "generate", "--config", tmp_path / "run.json", decode, "2")
    assert imageio.v3.imread(tmp_path / "video.mp4").shape == (5, 32, 64, 3)


def test_bad_request_ends_with_its_sentence(tmp_path, run_python, tiny_checkpoint):
    config = {
        "generator": {"model_path": str(tiny_checkpoint)},
        "request": {"prompt": "waves", "sampling": {"height": 33, "width": 64, "num_frames": 5}},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    done = run_python(FASTVIDEO_PAN2, "generate", "--config", tmp_path / "run.json", check=False)
    assert done.returncode == 2
    assert "error: height is 33: PAN2 needs a positive multiple of 32, for example 32." in done.stderr


def test_demo_writes_two_videos_two_sheets_and_a_table(tmp_path, run_python, photograph):
    size = ("--height", "32", "--width", "64", "--frames", "9", "--steps", "2")
    done = run_python("-m", "fastvideo.pipelines.pan2.demo", "--out", tmp_path, "--image", photograph, *size)
    for name in ("pan2_t2v", "pan2_i2v"):
        assert imageio.v3.imread(tmp_path / f"{name}.mp4").shape == (9, 32, 64, 3)
        assert Image.open(tmp_path / f"{name}.png").size == (4 * 64, 2 * 32)
        assert name in done.stdout
    assert "decoding_stage" in done.stdout
    assert "decode path" in done.stdout
    assert "Denoising" in done.stderr


def test_demo_with_an_unreadable_image_ends_with_one_sentence(tmp_path, run_python):
    (tmp_path / "notes.png").write_text("not an image")
    command = ("-m", "fastvideo.pipelines.pan2.demo", "--out", tmp_path / "out", "--image", tmp_path / "notes.png")
    done = run_python(*command, check=False)
    assert done.returncode == 2
    assert "error: image_path" in done.stderr
    assert "cannot be read as an image" in done.stderr
    assert not (tmp_path / "out").exists()
