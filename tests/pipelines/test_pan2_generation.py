# SPDX-License-Identifier: Apache-2.0
"""Whole generations through FastVideo's own VideoGenerator: workers, torchrun, ranks, seeds, guidance, images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import imageio.v3
import numpy as np
import pytest

# bf16 products over fewer tokens round differently, by more than a pixel's step; float32 keeps ranks comparable.
OPTIONS = {"pipeline_config": {"dit_precision": "fp32"}}
REQUESTS = {
    "plain": {},
    "again": {},
    "seed4": {"sampling": {"seed": 4}},
    "two": {"sampling": {"num_videos_per_prompt": 2}},
    "negative": {"negative_prompt": "blurred"},
    "unguided": {"sampling": {"guidance_scale": 1.0}},
    "unguided_negative": {"sampling": {"guidance_scale": 1.0}, "negative_prompt": "blurred"},
    "empty_prompt": {"prompt": ""},
    "no_negative": {"negative_prompt": None},
    # 3 latent frames of 3 x 5 tokens: 45 tokens, which neither 2 nor 4 ranks divide.
    "odd": {"sampling": {"height": 96, "width": 160, "num_frames": 9, "num_inference_steps": 1}},
}


def load(folder: Path, name: str, rank: int = 0) -> np.ndarray:
    return np.load(folder / f"{name}.rank{rank}.npy")


def assert_same_frames(one: np.ndarray, other: np.ndarray) -> None:
    """Equal up to the last step: a product over fewer tokens may round differently and tip a pixel over."""
    difference = np.abs(one.astype(int) - other)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.02


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory, run_python, scripts, tiny_checkpoint, photograph) -> Path:
    """What one spawned worker makes of every request."""
    out = tmp_path_factory.mktemp("one_worker")
    requests = REQUESTS | {
        "image": {"inputs": {"image_path": str(photograph)}},
        "saved": {"output": {"output_path": str(out / "video.mp4"), "save_video": True, "return_frames": True}},
    }
    environment = {"FASTVIDEO_STAGE_LOGGING": "1"}
    command = (scripts / "generate.py", tiny_checkpoint, out, json.dumps(OPTIONS), json.dumps(requests))
    run_python(*command, **environment)
    return out


def test_generation_repeats_with_its_seed(one_worker):
    assert np.array_equal(load(one_worker, "plain"), load(one_worker, "again"))
    assert not np.array_equal(load(one_worker, "plain"), load(one_worker, "seed4"))


def test_generation_gives_frames_that_are_not_flat(one_worker):
    frames = load(one_worker, "plain")
    assert frames.shape == (5, 32, 64, 3)
    assert frames.std() > 10


def test_several_videos_equal_the_single_ones_of_the_next_seeds(one_worker):
    # FastVideo returns several videos as one grid, 2 pixels apart.
    grid = load(one_worker, "two").astype(int)
    assert grid.shape == (5, 36, 134, 3)
    for index, name in enumerate(("plain", "seed4")):
        left = 2 + index * 66
        assert np.abs(grid[:, 2:34, left : left + 64] - load(one_worker, name)).max() <= 1


def test_guidance_uses_the_negative_prompt_only_above_one(one_worker):
    assert not np.array_equal(load(one_worker, "plain"), load(one_worker, "negative"))
    assert not np.array_equal(load(one_worker, "plain"), load(one_worker, "unguided"))
    assert np.array_equal(load(one_worker, "unguided"), load(one_worker, "unguided_negative"))


def test_absent_negative_prompt_is_an_empty_one(one_worker):
    assert np.array_equal(load(one_worker, "plain"), load(one_worker, "no_negative"))


def test_prompt_and_image_change_the_video(one_worker):
    assert not np.array_equal(load(one_worker, "plain"), load(one_worker, "empty_prompt"))
    assert not np.array_equal(load(one_worker, "plain"), load(one_worker, "image"))


def test_saved_video_plays(one_worker):
    record = json.loads((one_worker / "saved.rank0.json").read_text())
    assert record["video_path"] == str(one_worker / "video.mp4")
    assert imageio.v3.imread(record["video_path"]).shape == (5, 32, 64, 3)
    assert sorted(file.name for file in one_worker.glob("*.mp4")) == ["video.mp4"]


def test_stage_log_tells_the_seconds_and_the_decode_path(one_worker):
    stages = json.loads((one_worker / "plain.rank0.json").read_text())["stages"]
    assert list(stages)[:2] == ["input_validation_stage", "prompt_encoding_stage"]
    assert all(stage["execution_time"] >= 0 for name, stage in stages.items() if name.endswith("_stage"))
    assert stages["decoding_stage"]["decode_path"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun_gives_the_frames_of_one_worker(ranks, one_worker, tmp_path, run_ranks, scripts, tiny_checkpoint):
    requests = {name: REQUESTS[name] for name in ("plain", "odd")} | {
        "saved": {"output": {"output_path": str(tmp_path / "video.mp4"), "save_video": True, "return_frames": True}}
    }
    command = (scripts / "generate.py", tiny_checkpoint, tmp_path, json.dumps(OPTIONS), json.dumps(requests))
    run_ranks(ranks, *command)
    for name in ("plain", "odd"):
        assert_same_frames(load(tmp_path, name), load(one_worker, name))
    assert not list(tmp_path.glob("*.rank[1-9].npy")), "only the writer's rank returns pixels"
    assert [file.name for file in tmp_path.glob("*.mp4")] == ["video.mp4"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_spawned_workers_give_the_frames_of_one(ranks, one_worker, tmp_path, run_python, scripts, tiny_checkpoint):
    requests = {name: REQUESTS[name] for name in ("plain", "odd")}
    options = json.dumps(OPTIONS | {"num_gpus": ranks})
    run_python(scripts / "generate.py", tiny_checkpoint, tmp_path, options, json.dumps(requests))
    for name in requests:
        assert_same_frames(load(tmp_path, name), load(one_worker, name))


def test_request_that_one_rank_cannot_save_is_refused_on_all(one_worker, tmp_path, run_ranks, scripts, tiny_checkpoint):
    unwritable = {"output_path": str(tmp_path / "file.mp4"), "save_video": True, "return_frames": True}
    requests = {"unwritable": {"output": unwritable}, "plain": {}}
    command = (scripts / "generate.py", tiny_checkpoint, tmp_path, json.dumps(OPTIONS), json.dumps(requests))
    run_ranks(2, *command, PAN2_TEST_UNWRITABLE="1")
    for rank in range(2):
        assert "is not writable" in json.loads((tmp_path / f"unwritable.rank{rank}.json").read_text())["error"]
    assert_same_frames(load(tmp_path, "plain"), load(one_worker, "plain"))


def test_torchrun_refuses_another_number_of_gpus(tmp_path, run_ranks, scripts, tiny_checkpoint):
    options = json.dumps({"num_gpus": 4})
    done = run_ranks(2, scripts / "generate.py", tiny_checkpoint, tmp_path, options, "{}", check=False)
    assert done.returncode
    assert "num_gpus is 4 but torchrun started 2 processes" in done.stderr


def test_ranks_that_do_not_divide_the_heads_are_refused_before_loading(tmp_path, run_python, scripts, tiny_checkpoint):
    options = json.dumps({"num_gpus": 3})
    done = run_python(scripts / "generate.py", tiny_checkpoint, tmp_path, options, "{}", check=False)
    assert done.returncode
    assert "ValueError: PAN2's 4 attention heads cannot be shared by 3" in done.stderr
    assert "Loading" not in done.stdout


def test_script_of_the_readme_needs_no_file_of_the_reader_s(run_python, tiny_checkpoint, tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "tiny").symlink_to(tiny_checkpoint)
    run_python("script.py", cwd=tmp_path)
    storm, photo = (imageio.v3.imread(tmp_path / f"{name}.mp4") for name in ("storm", "photo"))
    assert storm.shape == photo.shape == (9, 64, 96, 3)
    assert not np.array_equal(storm, photo)
