# SPDX-License-Identifier: Apache-2.0
"""Links of the pages lead to files and headings, and files and tests that they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def anchors(page):
    """Headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), target
        if anchor:
            assert anchor in anchors(file), target


def test_index_has_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_tests_exist(page):
    names = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    package = ROOT / "fastvideo-kernel" / "wan22_vae_decode"
    known = {file.name for root in (ROOT / "tests", package) for file in root.rglob("*.*")}
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in names:
        if re.fullmatch(r"test_\w+", name):
            assert f"def {name}(" in tests, name
        elif re.fullmatch(r"[\w/]+\.(py|cu|cuh)", name):
            paths = [ROOT / name, package / name, package / "backends" / name]
            # The benchmarks' results may name their scripts before those have run.
            assert (
                any(path.is_file() for path in paths)
                or ("/" not in name and name in known)
                or ((ROOT / "benchmarks" / name).is_file())
            ), name
