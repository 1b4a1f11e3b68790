# SPDX-License-Identifier: Apache-2.0
"""Figures that the pages give in words are those of the sources."""

import re
from pathlib import Path

import torch

from wan22_vae_decode import memory, winograd
from wan22_vae_decode.backends.cuda import heuristics, selftest
from wan22_vae_decode.backends.cuda.targets import TARGETS

DOCS = Path(__file__).parents[2] / "docs"


def text(page):
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


def test_how_it_works():
    page = text("how_it_works.md")
    forms = [heuristics.WINOGRAD_FORMS.get(level) for level in range(4)]
    cells = ["direct" if form is None else f"F(4x{form.columns}, 3x3)" for form in forms]
    assert f"| 3x3x3 convs of the `cuda` backend | {' | '.join(cells)} |" in page
    for points in winograd.POINTS.values():
        assert ", ".join("0" if point == 0 else f"±{point:g}" for point in points if point >= 0) in page
    assert f"at most {heuristics.WINOGRAD_BYTES >> 20} MiB" in page
    assert f"{memory.DEFAULT_FRAMES} a GPU by default, at most {memory.MAX_FRAMES} together" in page
    assert memory.DEFAULT_SLAB == 2
    assert "in **slabs** of two latent frames a GPU" in page
    first, second = heuristics.UPSAMPLE_WINOGRAD_LEVELS
    assert f"In float16, levels {first} and {second} (`heuristics.UPSAMPLE_WINOGRAD_LEVELS`)" in page
    assert f"F({winograd.UPSAMPLE_TILE}x{winograd.UPSAMPLE_TILE}, 2x2)" in page


def test_accuracy():
    page = text("accuracy.md")
    half, brain = (selftest.TOLERANCE[dtype] for dtype in (torch.float16, torch.bfloat16))
    numbers = re.search(r"of (\S+) in float16 and (\S+) in bfloat16, three times that for Winograd", page)
    assert (float(numbers[1]), float(numbers[2])) == (half, brain)
    for dtype, most in selftest.TOLERANCE.items():
        assert abs(selftest.WINOGRAD_TOLERANCE[dtype] / most - 3) < 1e-6
    steps = selftest.UINT8_STEPS
    assert f"{steps[torch.float16]} step in `uint8` ({steps[torch.bfloat16]} in bfloat16)" in page


def test_flags_and_pages_name_every_architecture():
    for page in ("flags.md", "blackwell.md"):
        for arch in TARGETS:
            assert arch in text(page)
