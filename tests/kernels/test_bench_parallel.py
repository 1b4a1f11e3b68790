# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the parallel decode: what it measures on CPUs, what it finds wrong, and when it cannot run."""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.geometry import Architecture

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode_parallel.py"
FRAMES = "5"
OPTIONS = ["--device", "cpu", "--decoder-width", "4", "--height", "48", "--width", "32", "--frames", FRAMES]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("decode_parallel")


@pytest.fixture
def run_alone(bench, monkeypatch):
    """Runs the benchmark in this process as a world of one, and returns its exit code."""

    def run(*options, **environment):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | environment
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *OPTIONS, *options])
        return bench.main()

    return run


def launch(ranks, *options):
    """Runs the benchmark under torchrun and returns what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The results' folder of a run over two ranks on the CPU, and what it printed."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, launch(2, *OPTIONS, "--repeats", "2", "--out", str(folder))


def records(folder):
    return list(json.loads((folder / "decode_parallel.json").read_text()).values())


def test_two_ranks_give_one_rank_s_frames_and_their_figures(two_ranks):
    folder, printed = two_ranks
    (record,) = records(folder)
    assert (record["world"], record["size"], record["dtype"]) == (2, "48x32", "float32")
    assert record["communication"] == "wall time of the exchanges over gloo"
    assert record["nccl_nvls_enable"] == os.environ.get("NCCL_NVLS_ENABLE")
    clip = record["clips"][FRAMES]
    assert clip["problems"] == []
    assert clip["max_error"] <= 1e-5
    assert clip["uint8_step"] <= 1
    assert clip["ms"] > 0
    assert clip["one_rank_ms"] > 0
    # Too short a video to split its frames; a halo for each of the tail's 3x3 convs.
    assert clip["exchanges"] == {"halo": 30, "pixels": 1}
    assert clip["sent_bytes"]["pixels"] == [3 * 5 * rows * 32 * 4 for rows in (32, 16)]
    for exchange, waited, whole in zip(clip["exchange_ms"], clip["waited_ms"], clip["profiled_ms"], strict=True):
        assert 0 <= waited < exchange < whole
    assert "Wan2.2 decode over ranks" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_give_one_gpu_s_frames_and_their_figures(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices, torch sees {torch.cuda.device_count()}")
    launch(ranks, "--height", "192", "--width", "320", "--frames", "17", "--repeats", "1", "--out", str(tmp_path))
    (record,) = records(tmp_path)
    clip = record["clips"]["17"]
    assert clip["problems"] == []
    assert all(0 < peak < 100 for peak in clip["peak_gib"])
    assert all(0 <= waited < exchange for waited, exchange in zip(clip["waited_ms"], clip["exchange_ms"], strict=True))


def test_runs_of_other_world_sizes_join_the_file_and_the_plot(two_ranks, run_alone, tmp_path):
    file = tmp_path / "decode_parallel.json"
    file.write_text((two_ranks[0] / "decode_parallel.json").read_text())
    for _ in range(2):  # the second replaces the first
        assert run_alone("--repeats", "1", "--out", str(tmp_path)) == 0
    assert sorted(record["world"] for record in records(tmp_path)) == [1, 2]
    assert file.with_suffix(".png").stat().st_size > 1000


def test_wrong_frames_end_with_one(bench, run_alone, monkeypatch, tmp_path):
    decode_alone = bench.decode_alone

    def brighter(*arguments):
        alone = decode_alone(*arguments)
        alone.video.add_(0.01)
        return alone

    monkeypatch.setattr(bench, "decode_alone", brighter)
    assert run_alone("--repeats", "1", "--out", str(tmp_path)) == 1
    assert "differs by 1.00e-02 from one rank" in records(tmp_path)[0]["clips"][FRAMES]["problems"][0]


@pytest.mark.parametrize(
    ("dtype", "changes", "digests", "expected"),
    [
        (torch.float32, {}, "aa", None),
        (torch.float32, {"max_error": 2e-5}, "aa", "differs by 2.00e-05 from one rank, more than 1e-5"),
        (torch.float32, {"max_error": float("nan")}, "aa", "differs by nan"),
        (torch.float16, {"max_error": 2e-5}, "aa", None),
        (torch.float16, {"psnr_db": 89.0}, "aa", "is 89.0 dB from one rank, less than 90"),
        (torch.float16, {"uint8_step": 2}, "aa", "differs by 2 steps in uint8"),
        (torch.float16, {}, "ab", "is not the same on every rank"),
    ],
)
def test_frames_are_held_to_their_type_s_tolerance(bench, two_ranks, dtype, changes, digests, expected):
    clip = bench.Clip(**records(two_ranks[0])[0]["clips"][FRAMES] | changes)
    problems = bench.wrong_frames(clip, dtype, list(digests))
    assert len(problems) == (expected is not None)
    assert not problems or problems[0].startswith(expected)


@pytest.mark.parametrize("second_rows", [(), (1, 2)])
def test_halo_bytes_of_the_released_decoder(bench, second_rows):
    # Two frames: 1, 2 and 4 more frames than the first at the three rates; an upsampler in Winograd form has two rows.
    row = (
        (2 + 6) * 1024 * 2
        + 1024 * 3
        + 2 * (6 * 1024 * 3 + 1024 * 5 * (2 if 1 in second_rows else 1))
        + 4 * (1024 + 5 * 512 + 512 * (2 if 2 in second_rows else 1)) * 5
        + 8 * (512 + 6 * 256) * 5
    )
    ops = TorchBackend(torch.device("cpu"), torch.float16, upsample_winograd=second_rows)
    assert bench.halo_bytes(Architecture(), frames=2, cols=78, ops=ops) == 2 * 78 * row


def test_wait_is_what_exceeds_the_quickest_rank(bench):
    assert bench.waits(([3.0, 1.0], [1.0, 2.0])) == [2.0, 1.0]


def test_without_torchrun_it_ends_with_two(bench, monkeypatch, capsys):
    for name in bench.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert bench.main() == 2
    assert capsys.readouterr().err.startswith("Start this benchmark with torchrun --nproc_per_node N")


@pytest.mark.parametrize(
    ("options", "environment", "reason"),
    [
        (["--device", "cuda"], {"LOCAL_WORLD_SIZE": "1000"}, "1000 ranks need as many NVIDIA GPUs, but torch sees"),
        ([], {"WORLD_SIZE": "4"}, "48 pixel rows are 3 latent rows, too few for 4 ranks."),
        (["--width", "40"], {}, "Height and width must be multiples of 16, not 48x40."),
        (["--frames", "9", "12"], {}, "Video lengths must be 4k + 1 frames, not [9, 12]."),
    ],
)
def test_what_cannot_run_ends_with_two_and_one_sentence(run_alone, capsys, options, environment, reason):
    assert run_alone(*options, **environment) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(reason)
    assert printed.count("\n") == 1


def test_other_ranks_do_not_repeat_the_reason(run_alone, capsys):
    assert run_alone("--width", "40", RANK="1") == 2
    assert capsys.readouterr().err == ""
