# SPDX-License-Identifier: Apache-2.0
"""`bench`: its rows, its files, and what it refuses."""

import errno
import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file

from wan22_vae_decode.cli import bench

GIVEN = ("--size", "32x16x5", "--device", "cpu", "--repeats", 2)
SMALL = ("--channels", 8, *GIVEN)


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
    ended = cli("bench", *GIVEN, "--vae", vae_folder, "--only", "torch:float32", "--json", "--out", name)
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
    assert "the plot needs matplotlib: pip install matplotlib\n" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]


def test_row_that_cannot_run_is_status_1_beside_those_that_do(cli):
    ended = cli("bench", *SMALL, "--only", "cuda:float16", "torch:float32")
    assert ended.status == 1
    first, second = ended.out.splitlines()[2:]
    assert first.split()[:3] == ["cuda", "float16", "-"]
    assert first.endswith("the CUDA kernels need a CUDA device, not cpu")
    assert float(second.split()[2]) >= 0


@pytest.mark.parametrize("name", [".", "..", "/", "{}", "{}/", "{}/absent/", "{}/times/."])
def test_names_of_folders_are_refused_before_anything_is_timed(name, cli, tmp_path):
    name = name.format(tmp_path)
    ended = cli("bench", *SMALL, "--out", name)
    assert ended == (2, "", f"error: --out {name} names a folder; give the files a name in it\n")


@pytest.mark.parametrize("kind", ["json", "png"])
def test_files_that_cannot_be_written_are_refused_before_anything_is_timed(kind, cli, tmp_path, monkeypatch):
    def refusal(name):
        ended = cli("bench", *SMALL, "--out", name)
        assert ended.status == 2
        assert not ended.out
        return ended.err.replace(str(name), "NAME")

    (tmp_path / f"times.{kind}").mkdir()
    assert refusal(tmp_path / "times") == f"error: --out: NAME.{kind} cannot be written: Is a directory\n"
    (tmp_path / f"loop.{kind}").symlink_to(f"loop.{kind}")
    assert "Too many levels of symbolic links" in refusal(tmp_path / "loop")
    # In a folder where nobody, not even root, can make a file.
    assert refusal("/proc/times") == "error: --out: NAME.json cannot be written: No such file or directory\n"
    assert refusal(tmp_path / ("n" * 252)) == "error: --out: NAME.json cannot be written: File name too long\n"
    assert {path.stem for path in tmp_path.iterdir()} == {"times", "loop"}


def test_older_files_stay_until_there_are_new_ones(cli, tmp_path):
    for file, target in ((tmp_path / "times.json", "older.json"), (tmp_path / "times.png", "not yet")):
        file.symlink_to(target)
    (tmp_path / "older.json").write_text("older")
    assert bench._files(str(tmp_path / "times")) == (tmp_path / "times.json", tmp_path / "times.png")
    assert (tmp_path / "older.json").read_text() == "older"
    assert {path.name for path in tmp_path.iterdir()} == {"times.json", "times.png", "older.json"}


def test_links_stay_and_what_they_name_is_written(cli, tmp_path):
    for kind in ("json", "png"):
        (tmp_path / f"times.{kind}").symlink_to(f"no {kind} by its name")
    assert cli("bench", *SMALL, "--only", "torch:float32", "--out", tmp_path / "times").status == 0
    assert all(path.is_symlink() for path in tmp_path.glob("times.*"))
    assert json.loads((tmp_path / "no json by its name").read_text())["rows"]
    assert (tmp_path / "no png by its name").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 4


def test_failed_write_leaves_the_older_files(cli, tmp_path, monkeypatch):
    def full(pyplot, report, rows, file):
        file.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for kind in ("json", "png"):
        (tmp_path / f"times.{kind}").write_text("older")
    monkeypatch.setattr(bench, "_plot", full)
    ended = cli("bench", *SMALL, "--only", "torch:float32", "--out", tmp_path / "times")
    assert ended.status == 2
    assert ended.err.endswith("times.png cannot be written: No space left on device\n")
    assert (tmp_path / "times.png").read_text() == "older"
    assert json.loads((tmp_path / "times.json").read_text())["rows"]
    assert {path.name for path in tmp_path.iterdir()} == {"times.json", "times.png"}


def test_refusals(cli, tmp_path):
    ended = cli("bench", *SMALL, "--out", tmp_path / "absent" / "times")
    assert ended == (2, "", f"error: there is no folder {tmp_path / 'absent'} for --out\n")
    ended = cli("bench", *SMALL, "--vae", tmp_path)
    assert ended == (2, "", "error: --channels is the width of random weights; leave it out with --vae\n")
    ended = cli("bench", *GIVEN, "--vae", tmp_path)
    assert ended == (2, "", f"error: {tmp_path} holds no *.safetensors, nor does a folder vae in it\n")


def test_folder_of_other_weights_is_status_2(cli, tmp_path):
    save_file({"encoder.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    ended = cli("bench", "--vae", tmp_path, "--device", "cpu")
    assert ended.status == 2
    assert "post_quant_conv.weight" in ended.err


def test_weights_that_are_not_finite_are_refused_once_before_anything_is_timed(cli, tmp_path, state_dict):
    bias = torch.full_like(state_dict["decoder.conv_in.bias"], torch.nan)
    save_file(state_dict | {"decoder.conv_in.bias": bias}, tmp_path / "vae.safetensors")
    ended = cli("bench", *GIVEN, "--vae", tmp_path)
    sentence = "the weights hold NaN or values beyond float32, in decoder.conv_in.bias; load or copy them again"
    assert ended == (2, "", f"error: {sentence}\n")
