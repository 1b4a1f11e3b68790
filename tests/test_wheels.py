# SPDX-License-Identifier: Apache-2.0
"""Both distributions as a user gets them: built, installed into a fresh environment, imported and run from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

import wan22_vae_decode

ROOT = Path(__file__).parents[1]


CONSUMER = """\
import wan22_vae_decode
reveal_type(wan22_vae_decode.memory.readable(1))
wan22_vae_decode.Decoder.from_state_dict(1)
wan22_vae_decode.Decodr
"""


class Fresh(NamedTuple):
    """A virtual environment of the two wheels, whose other packages are this environment's."""

    sources: Path
    wheels: dict[str, Path]
    bin: Path
    site: Path

    def run(self, *command: str | Path, cwd: Path | None = None, status: int = 0) -> str:
        """The output of one of its programs; fails the test with what it said if that ends otherwise."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=cwd or self.site,
            env=_environment(),
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout


def _environment() -> dict[str, str]:
    """Without a path on which the repository's own files could be found."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=300, env=_environment())


def _sources(folder: Path) -> Path:
    """A copy of the repository's tracked and new files, so that building leaves nothing in it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def _link_fastvideo(site: Path) -> None:
    """FastVideo itself, as links to its files: the overlay has to lie in the same folder."""
    for file in metadata.distribution("fastvideo").files or []:
        if file.parts[0].startswith("fastvideo") and file.suffix != ".pyc":
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).symlink_to(file.locate())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Fresh:
    folder = tmp_path_factory.mktemp("wheels")
    sources, built = _sources(folder / "sources"), folder / "built"
    for project in (sources / "fastvideo-kernel", sources):
        _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", built, project)
    wheels = {path.name.partition("-")[0]: path for path in built.iterdir()}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    _link_fastvideo(site)
    _pip("--python", python, "install", "--no-deps", "--no-index", *wheels.values())
    # Only now, or pip would find the two installed already. A .pth in there, such as an editable installation's, is
    # not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Fresh(sources, wheels, python.parent, site)


def test_wheels_hold_licences_types_and_sources(fresh):
    decoder, overlay = (
        zipfile.ZipFile(fresh.wheels[name]).namelist() for name in ("wan22_vae_decode", "fastvideo_pan2")
    )
    version = wan22_vae_decode.__version__
    assert f"wan22_vae_decode-{version}.dist-info/licenses/LICENSE" in decoder
    assert "wan22_vae_decode/py.typed" in decoder
    assert {f"wan22_vae_decode/csrc/{path.name}" for path in ROOT.glob("fastvideo-kernel/*/csrc/*.cu*")} <= {*decoder}
    assert {f"wan22_vae_decode/{name}/__init__.py" for name in ("cli", "integrations", "jit")} <= {*decoder}
    assert "fastvideo/pipelines/pan2/py.typed" in overlay
    assert any(name.endswith("licenses/LICENSE") for name in overlay)
    for name in decoder + overlay:
        assert not re.search(r"(^|/)(tests|benchmarks)/|\.pyc$", name)


def test_overlay_asks_for_the_decoder_of_its_own_version(fresh):
    shown = zipfile.ZipFile(fresh.wheels["fastvideo_pan2"])
    text = shown.read(next(name for name in shown.namelist() if name.endswith("/METADATA"))).decode()
    assert f"\nVersion: {wan22_vae_decode.__version__}\n" in text
    assert f"\nRequires-Dist: wan22-vae-decode=={wan22_vae_decode.__version__}\n" in text


def test_changelog_tells_of_this_version():
    assert f"\n## {wan22_vae_decode.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_decoder_runs_from_its_wheel(fresh):
    where = fresh.run("python", "-c", "import wan22_vae_decode as w; print(w.__file__, w.__version__)")
    assert where.split() == [str(fresh.site / "wan22_vae_decode" / "__init__.py"), wan22_vae_decode.__version__]
    assert "doctor" in fresh.run("wan22-vae-decode", "--help")
    assert fresh.run("wan22-vae-decode", "--version").strip() == wan22_vae_decode.__version__
    assert fresh.run("wan22-vae-decode", "verify", "--device", "cpu").endswith("ok\n")


def test_overlay_runs_from_its_wheel(fresh):
    program = "import fastvideo.pipelines.pan2 as p, fastvideo.models.vaes.wan22_decode as v; print(p.__file__)"
    where = fresh.run("python", "-W", "ignore", "-c", program).splitlines()[-1]
    assert where == str(fresh.site / "fastvideo" / "pipelines" / "pan2" / "__init__.py")
    assert "generate" in fresh.run("fastvideo-pan2", "--help")


@pytest.mark.parametrize("editable", [False, True])
def test_type_checkers_see_the_decoder_s_types_and_no_others(editable, fresh, tmp_path):
    if editable:
        program = f"from setuptools.build_meta import build_editable; print(build_editable({str(tmp_path)!r}))"
        built = fresh.run("python", "-c", program, cwd=fresh.sources / "fastvideo-kernel").splitlines()[-1]
        install = ("install", "--no-deps", "--no-index", "--force-reinstall", tmp_path / built)
        _pip("--python", fresh.bin / "python", *install)
    (tmp_path / "consumer.py").write_text(CONSUMER)
    options = ("--follow-imports", "silent", "--ignore-missing-imports", "--cache-dir", tmp_path / "cache")
    said = fresh.run("python", "-m", "mypy", *options, "consumer.py", cwd=tmp_path, status=1)
    revealed, call, name, _ = said.splitlines()
    assert 'Revealed type is "str"' in revealed
    assert 'incompatible type "int"; expected "Mapping[str, Tensor]"' in call
    assert 'Module has no attribute "Decodr"' in name
