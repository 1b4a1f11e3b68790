# SPDX-License-Identifier: Apache-2.0
"""`bench`: its rows, its files, and what it refuses."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

SMALL = ("--channels", 8, "--size", "32x16x5", "--device", "cpu", "--repeats", 2)


def test_table_has_a_row_for_each_type(cli):
    ended = cli("bench", *SMALL)
    assert ended.status == 0
    title, heads, *rows = ended.out.splitlines()
    assert title.startswith("32x16x5 (rows x columns x frames) on ")
    assert heads.split() == ["backend", "dtype", "seconds", "spread", "frames/s", "peak", "GiB"]
    assert [row.split()[:2] for row in rows] == [["torch", "float32"], ["torch", "bfloat16"]]
    assert "timing torch float32 ..." in ended.err


def test_json_and_files_hold_the_same_report(cli, tmp_path, vae_folder):
    name = tmp_path / "times.of.mine"
    ended = cli("bench", *SMALL, "--vae", vae_folder, "--only", "torch:float32", "--json", "--out", name)
    assert ended.status == 0
    report = json.loads(ended.out)
    assert report["weights"] == str(vae_folder)
    (row,) = report["rows"]
    assert row["frames_per_s"] == pytest.approx(5 / row["seconds"])
    assert row["spread_s"] >= 0
    assert row["peak_gib"] is None
    assert json.loads((tmp_path / "times.of.mine.json").read_text()) == report
    assert (tmp_path / "times.of.mine.png").read_bytes().startswith(b"\x89PNG")
    assert ended.err.endswith(f"{name}.json, {name}.png\n")


def test_without_matplotlib_the_json_is_written_and_the_plot_is_told_missing(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    ended = cli("bench", *SMALL, "--only", "torch:float32", "--out", tmp_path / "times")
    assert ended.status == 0
    assert "the plot needs matplotlib: pip install 'wan22-vae-decode[cli]'\n" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]


def test_row_that_cannot_run_is_status_1_beside_those_that_do(cli):
    ended = cli("bench", *SMALL, "--only", "cuda:float16", "torch:float32")
    assert ended.status == 1
    first, second = ended.out.splitlines()[2:]
    assert first.split()[:3] == ["cuda", "float16", "-"]
    assert first.endswith("the CUDA kernels need a CUDA device, not cpu")
    assert float(second.split()[2]) >= 0


@pytest.mark.parametrize("name", ["", ".", "..", "/"])
def test_names_that_name_no_file_are_refused_before_anything_is_timed(name, cli):
    ended = cli("bench", *SMALL, "--out", name)
    assert ended == (2, "", f"error: --out {name or '.'} names a folder; give the files a name in it\n")


def test_refusals(cli, tmp_path):
    ended = cli("bench", *SMALL, "--out", tmp_path / "absent" / "times")
    assert ended == (2, "", f"error: there is no folder {tmp_path / 'absent'} for --out\n")
    ended = cli("bench", *SMALL, "--vae", tmp_path)
    assert ended == (2, "", f"error: {tmp_path} holds no *.safetensors, nor does a folder vae in it\n")
    (tmp_path / "times.json").mkdir()
    ended = cli("bench", *SMALL, "--only", "torch:float32", "--out", tmp_path / "times")
    assert ended.status == 2
    assert ended.err.endswith(f"error: --out {tmp_path / 'times'} cannot be written: Is a directory\n")


def test_folder_of_other_weights_is_status_2(cli, tmp_path):
    save_file({"encoder.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    ended = cli("bench", "--vae", tmp_path, "--device", "cpu")
    assert ended.status == 2
    assert "post_quant_conv.weight" in ended.err
