# SPDX-License-Identifier: Apache-2.0
"""The wrapped VideoGenerator: checks in the caller's process, and a video under its name only when it is complete."""

from __future__ import annotations

from types import SimpleNamespace

import imageio
import numpy as np
import pytest
from fastvideo.api.sampling_param import SamplingParam
from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.configs.pipelines.wan import WanT2V480PConfig
from fastvideo.entrypoints.video_generator import VideoGenerator
from fastvideo.pipelines.pan2 import generator
from fastvideo.pipelines.pan2.in_process_executor import InProcessExecutor, launched_by_torchrun

FRAMES = [np.random.default_rng(0).integers(0, 255, (32, 64, 3), np.uint8) for _ in range(5)]


def write(path, frames=FRAMES):
    imageio.mimsave(path, frames, fps=24, format="mp4")
    return {"video_path": path}


def generate(monkeypatch, path, upstream, config=None, executor=None, **sampling):
    """Calls the wrapper around ``upstream(output_path)``."""
    wrapped = generator._wrap_generation(lambda self, prompt, sampling, args, **kwargs: upstream(kwargs["output_path"]))
    arguments = SimpleNamespace(pipeline_config=config or PAN2PipelineConfig(), output_type="pt")
    parameters = SamplingParam()
    for name, value in ({"height": 32, "width": 64, "num_frames": 5} | sampling).items():
        setattr(parameters, name, value)
    owner = SimpleNamespace(fastvideo_args=arguments, executor=executor)
    return wrapped(owner, "a prompt", parameters, arguments, output_path=str(path)), parameters


def test_complete_video_appears_under_its_name(monkeypatch, tmp_path):
    result, _ = generate(monkeypatch, tmp_path / "video.mp4", write)
    assert result["video_path"] == str(tmp_path / "video.mp4")
    assert [file.name for file in tmp_path.iterdir()] == ["video.mp4"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_failure_while_writing_leaves_nothing(monkeypatch, tmp_path, error):
    def fail(path):
        write(path, FRAMES[:2])
        raise error

    with pytest.raises(type(error)):
        generate(monkeypatch, tmp_path / "video.mp4", fail)
    assert not list(tmp_path.iterdir())


def test_encoder_that_stopped_early_leaves_nothing(monkeypatch, tmp_path):
    with pytest.raises(OSError, match=r"Only 3 of 5 frames could be written .* is the disk full\?"):
        generate(monkeypatch, tmp_path / "video.mp4", lambda path: write(path, FRAMES[:3]))
    assert not list(tmp_path.iterdir())


def test_file_that_is_no_video_leaves_nothing(monkeypatch, tmp_path):
    def truncate(path):
        with open(path, "wb") as file:
            file.write(b"\0" * 40)

    with pytest.raises(OSError, match="Only 0 of 5 frames"):
        generate(monkeypatch, tmp_path / "video.mp4", truncate)
    assert not list(tmp_path.iterdir())


def test_earlier_video_survives_a_failure(monkeypatch, tmp_path):
    write(tmp_path / "video.mp4")
    before = (tmp_path / "video.mp4").read_bytes()
    with pytest.raises(OSError, match="Only 3 of 5"):
        generate(monkeypatch, tmp_path / "video.mp4", lambda path: write(path, FRAMES[:3]))
    assert (tmp_path / "video.mp4").read_bytes() == before


def test_bad_request_never_reaches_the_workers(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="height is 100"):
        generate(monkeypatch, tmp_path / "video.mp4", pytest.fail, height=100)


def test_other_families_are_not_touched(monkeypatch, tmp_path):
    seen = []
    generate(monkeypatch, tmp_path / "video.mp4", seen.append, config=WanT2V480PConfig(), height=100)
    assert seen == [str(tmp_path / "video.mp4")]


@pytest.mark.parametrize("writer", [True, False])
def test_only_the_writer_s_rank_saves_and_returns(monkeypatch, tmp_path, writer):
    executor = object.__new__(InProcessExecutor)
    executor.is_writer = writer
    executor.gather = lambda value: [value]
    _, parameters = generate(monkeypatch, tmp_path / "video.mp4", write, executor=executor)
    assert parameters.save_video is writer
    assert parameters.return_frames is writer


def test_install_wraps_once():
    before = VideoGenerator._generate_single_video
    generator.install()
    assert VideoGenerator._generate_single_video is before


def test_launcher_is_recognised_by_its_rendezvous(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not launched_by_torchrun()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    assert not launched_by_torchrun()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launched_by_torchrun()


def test_in_process_executor_calls_its_worker():
    executor = object.__new__(InProcessExecutor)
    executor.worker = SimpleNamespace(
        double=lambda value: 2 * value,
        set_lora_adapter=lambda *_, **__: {"status": "failed: pipeline is not a LoRAPipeline"},
    )
    assert executor.collective_rpc("double", args=(3,)) == [6]
    assert executor.collective_rpc(lambda worker, value: worker.double(value), kwargs={"value": 4}) == [8]
    with pytest.raises(RuntimeError, match="pipeline is not a LoRAPipeline"):
        executor.set_lora_adapter("style", "folder")
