# SPDX-License-Identifier: Apache-2.0
"""The script of the figures runs, and writes the files that are committed."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MOST_BYTES = 300_000


def test_script_writes_the_committed_figures_the_same_every_time(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        subprocess.run([sys.executable, DOCS / "figures.py", "--out", folder], check=True, timeout=120)
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second
    assert set(first) == {file.name for file in (DOCS / "figures").iterdir()}
    for name, content in first.items():
        assert content.startswith(b"<?xml"), name
        assert len(content) < MOST_BYTES, name
        assert (DOCS / "figures" / name).stat().st_size < MOST_BYTES, name


def test_every_figure_is_on_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    for file in (DOCS / "figures").iterdir():
        assert f"(figures/{file.name})" in pages
