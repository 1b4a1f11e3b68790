# SPDX-License-Identifier: Apache-2.0
"""The wheel adds files to the installed fastvideo, replaces none, and does nothing until it is imported."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from fastvideo.pipelines.pan2 import upstream

ROOT = Path(__file__).parents[2]


def owned(distribution: str) -> set[str]:
    return {str(file) for file in metadata.distribution(distribution).files if str(file).startswith("fastvideo/")}


def test_wheel_holds_exactly_the_files_of_the_repository():
    tracked = subprocess.run(["git", "ls-files", "fastvideo"], cwd=ROOT, capture_output=True, text=True, check=True)
    installed = {file for file in owned("fastvideo-pan2") if not file.endswith(".pyc")}
    assert installed == set(tracked.stdout.split())


def test_installed_files_are_the_repository_s_own():
    for file in metadata.distribution("fastvideo-pan2").files:
        if str(file).startswith("fastvideo/") and str(file).endswith(".py"):
            assert Path(file.locate()).read_bytes() == (ROOT / file).read_bytes(), file


def test_wheel_replaces_no_file_of_fastvideo():
    assert owned("fastvideo"), "fastvideo's RECORD is empty"
    assert not owned("fastvideo-pan2") & owned("fastvideo")


def test_folders_of_fastvideo_get_no_init_from_us():
    for file in owned("fastvideo"):
        assert not (ROOT / file).exists(), file


class Distribution:
    version = "9.9"

    def __init__(self, *files: str) -> None:
        self.files = files


def test_fastvideo_that_owns_a_file_of_ours_is_refused(monkeypatch):
    ours = Distribution("fastvideo/models/dits/pan2.py", "fastvideo/pipelines/pan2/__init__.py")
    theirs = Distribution("fastvideo/__init__.py", "fastvideo/models/dits/pan2.py")
    monkeypatch.setattr(metadata, "distribution", {"fastvideo-pan2": ours, "fastvideo": theirs}.__getitem__)
    with pytest.raises(
        ImportError, match=r"fastvideo 9\.9 owns 1 file\(s\) of fastvideo-pan2 \(fastvideo/models/dits/pan2\.py"
    ):
        upstream.check_ownership()


def test_missing_metadata_is_refused(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(ImportError, match="fastvideo-pan2 is not installed as a package"):
        upstream.check_ownership()


def test_upstream_name_that_moved_is_refused(monkeypatch):
    monkeypatch.setitem(upstream.RELIED_ON, "fastvideo.registry", ("register_configs", "a_name_that_moved"))
    with pytest.raises(ImportError, match=r"does not have: fastvideo\.registry\.a_name_that_moved"):
        upstream.check_names()
