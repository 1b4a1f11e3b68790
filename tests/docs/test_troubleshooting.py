# SPDX-License-Identifier: Apache-2.0
"""Every message that the page quotes is in the sources, and every message of the sources is on the page."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "fastvideo-kernel" / "wan22_vae_decode"
SOURCES = {file: ast.parse(file.read_text()) for root in (PACKAGE, ROOT / "fastvideo") for file in root.rglob("*.py")}

SPOKEN = ("debug", "info", "warning", "error", "once", "warning_once", "memory_for")
"""Functions whose first text is a message."""

REASONS = (
    "backends/__init__.py",
    "backends/cuda/__init__.py",
    "decoder.py",
    "module_decoder.py",
    "integrations/diffusers.py",
    "models/vaes/wan22_decode.py",
)
"""Modules whose functions return messages."""

BUGS = (
    "the input of a Winograd conv was written",
    "a Winograd conv cannot write",
    "interpolation points must be",
    "module … has no attribute",
)
"""Messages of misuse inside the package, which no user's input reaches, and Python's own."""


def message(node):
    """A literal text with … for what is filled in, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d)?[sdf]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


@cache
def entries():
    """The quoted messages: the first cells of the tables."""
    return re.findall(r"^\| `([^|]+)` \|", PAGE, re.MULTILINE)


def matches(entry, text):
    """Whether a quoted message is the beginning of a text, … standing for anything."""
    return re.match(".*".join(map(re.escape, entry.split("…"))), text, re.DOTALL) is not None


def test_every_quoted_message_is_in_the_sources():
    nodes = [(file, node) for file, tree in SOURCES.items() for node in ast.walk(tree)]
    texts = {text for _, node in nodes if (text := message(node)) is not None}
    # Those that are put together from two functions' texts.
    texts |= {text for file, node in nodes for text in said(file, node)}
    assert len(entries()) > 100
    for entry in entries():
        assert any(matches(entry, text) for text in texts), entry


def test_every_message_of_the_sources_is_on_the_page():
    missing = [
        f"{file.name}: {text}"
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        for text in said(file, node)
        if not text.startswith(BUGS) and not any(matches(entry, text) for entry in entries())
    ]
    assert not missing, "\n".join(missing)


def said(file, node):
    """The messages that a statement raises, logs or, where a module returns reasons, returns."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        # argparse names the option itself.
        arguments = [] if "ArgumentTypeError" in ast.unparse(node.exc.func) else node.exc.args[:1]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SPOKEN:
        arguments = node.args[:1]
        if ast.unparse(node.func) == "memory_for":
            return [f"{text} not fit" for text in map(message, arguments) if text is not None]
    elif isinstance(node, ast.Return) and str(file).endswith(REASONS):
        arguments = node.value.elts[:1] if isinstance(node.value, ast.Tuple) else [node.value]
    else:
        return []
    return [text for text in map(message, arguments) if text is not None and " " in text and text.strip("…: ")]


def test_entries_are_told_apart():
    assert len(set(entries())) == len(entries())
