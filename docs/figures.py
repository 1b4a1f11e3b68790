# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of how_it_works.md from the package's own geometry, plan and points, so that they cannot disagree.

    python docs/figures.py [--out docs/figures]

Writes one SVG a figure; the same files every time with the same matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from wan22_vae_decode import winograd
from wan22_vae_decode.geometry import CONTEXT_FRAMES, RESNETS, Architecture, row_bands
from wan22_vae_decode.parallel import frame_intervals, window

ROWS, COLS = 44, 78
"""Latents of 704x1248."""

WORLD, FRAMES_PER_RANK = 4, 4

USUAL_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0)

INK, FAINT, PALE = "#22303c", "#8796a3", "#eef2f5"
LEVELS = ("#dbe9f6", "#b5d4ea", "#8bbbdc", "#5f9fca")
RANKS = ("#4c78a8", "#c97b12", "#4a8f41", "#b5473f")

SVG = {
    # Ids and the date would differ from run to run.
    "svg.hashsalt": "wan22_vae_decode",
    "font.size": 9,
    "axes.titlesize": 10,
    "text.color": INK,
}


def main() -> None:
    """Writes every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures", help="folder of the figures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SVG):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
            pyplot.close(figure)


# The graph


def graph() -> Figure:
    """The decoder: a box a stage, as high as its level, with what runs in it and the tensor that leaves it."""
    arch = Architecture()
    stages: list[tuple[str, int, list[str], str]] = [
        ("post_quant\n_conv", 0, ["1x1x1"], f"{arch.latent}"),
        ("conv_in", 0, ["3x3x3"], f"{arch.inner}"),
        ("mid block", 0, ["resnet", "attention", "resnet"], f"{arch.inner}"),
    ]
    for index, block in enumerate(arch.up_blocks):
        parts = ["resnet"] * RESNETS
        parts += ["time x2"] * block.doubles_time + ["space x2"] * block.doubles_space
        stages.append((f"up block {index}", block.level, parts, f"{block.c_out}"))
    stages.append(("head", arch.up_blocks[-1].level, ["norm, SiLU", "conv_out", "clamp", "un-patchify"], "3"))

    figure, axes = _canvas(11, 4.4, (-1.1, 16.3), (-3.1, 4.9))
    left, edges = 0.0, []
    for number, (name, level, parts, channels) in enumerate(stages):
        width = 1.15 if number < 2 else 1.6
        height = 2.2 + 0.55 * level
        axes.add_patch(Rectangle((left, 0), width, height, facecolor=LEVELS[level], edgecolor=INK, linewidth=0.9))
        axes.text(left + width / 2, height + 0.12, name, ha="center", va="bottom", fontsize=9, weight="bold")
        for line, part in enumerate(parts):
            axes.text(left + width / 2, height - 0.32 - 0.42 * line, part, ha="center", va="center", fontsize=8.5)
        edges.append((left, left + width, height))
        if number + 1 < len(stages):
            _arrow(axes, (left + width, 0.35), (left + width + 0.5, 0.35))
            axes.text(left + width + 0.25, 0.55, channels, ha="center", va="bottom", fontsize=7.5)
        left += width + 0.5
    _arrow(axes, (-0.6, 0.35), (0, 0.35))
    axes.text(-0.35, 0.55, f"{arch.latent}", ha="center", va="bottom", fontsize=7.5)
    axes.text(-0.35, 0.0, "latents", ha="center", va="top", fontsize=8)
    _arrow(axes, (edges[-1][1], 0.35), (edges[-1][1] + 0.6, 0.35))
    axes.text(edges[-1][1] + 0.35, 0.0, "pixels", ha="center", va="top", fontsize=8)

    for index, block in enumerate(arch.up_blocks):
        if block.doubles_space:
            begin, end, height = edges[3 + index]
            top = height + 0.62
            axes.plot([begin, begin, end, end], [height, top, top, height], color=FAINT, linewidth=1, linestyle="--")
            axes.text((begin + end) / 2, top + 0.06, "DupUp3D", ha="center", va="bottom", fontsize=7.5, color=FAINT)

    frames, spans = 1, [(edges[0][0], edges[3][1], 0, 1)]
    for index, block in enumerate(arch.up_blocks[1:], start=1):
        frames *= 2 if arch.up_blocks[index - 1].doubles_time else 1
        last = 4 + index if block == arch.up_blocks[-1] else 3 + index
        spans.append((edges[3 + index][0], edges[last][1], block.level, frames))
    for begin, end, level, count in spans:
        size = f"{ROWS << level} x {COLS << level}, {count} frame{'s' * (count > 1)}"
        if end - begin < 2:
            size = size.replace(", ", "\n")
        _span(axes, begin, end, -0.45, f"level {level}\n{size}")
    _span(axes, edges[0][0], (edges[2][0] + edges[2][1]) / 2 + 0.3, -1.75, "prefix: ranks split latent frames")
    _span(axes, (edges[2][0] + edges[2][1]) / 2 + 0.4, edges[-1][1], -1.75, "tail: ranks split latent rows")
    _span(axes, edges[5][0], edges[-1][1], -2.45, "slab by slab within a pass")
    return figure


# Winograd


def winograd_tile() -> Figure:
    """A tile's way through F(4x4, 3x3), and the interpolation points on their axis."""
    figure, axes = _canvas(11, 5.0, (-0.4, 19.2), (-4.0, 6.4))
    rows = winograd.TILE_ROWS
    size, unit = rows + 2, 0.55

    def grid(left: float, bottom: float, down: int, across: int, inner: tuple[int, int] | None, color: str) -> None:
        for y in range(down):
            for x in range(across):
                hit = inner is None or (1 <= y <= inner[0] and 1 <= x <= inner[1])
                spot = (left + unit * x, bottom + unit * (down - 1 - y))
                axes.add_patch(
                    Rectangle(spot, unit, unit, facecolor=color if hit else PALE, edgecolor="white", linewidth=1)
                )

    bottom = 1.4
    middle = bottom + size * unit / 2
    grid(0, bottom, size, size, (rows, rows), LEVELS[1])
    axes.text(size * unit / 2, bottom + size * unit + 0.15, "input tile d", ha="center", va="bottom", weight="bold")
    axes.text(
        size * unit / 2,
        bottom - 0.15,
        f"{size} x {size} of one frame,\n2 shared with each neighbour",
        ha="center",
        va="top",
    )
    _arrow(axes, (3.5, middle), (4.9, middle))
    axes.text(4.2, middle + 0.15, r"$B^T d\,B$", ha="center", va="bottom")
    axes.text(4.2, middle - 0.15, "norm, SiLU\nbefore it", ha="center", va="top", fontsize=7.5, color=FAINT)

    grid(5.1, bottom, size, size, None, LEVELS[2])
    axes.text(5.1 + size * unit / 2, bottom + size * unit + 0.15, "components", ha="center", va="bottom", weight="bold")
    axes.text(
        5.1 + size * unit / 2,
        bottom - 0.15,
        f"{winograd.components(4)} values, stored\nin the compute type",
        ha="center",
        va="top",
    )
    _arrow(axes, (8.6, middle), (9.4, middle))

    # The GEMM of one component: K runs over three taps and the input channels.
    left, tall, wide = 9.6, 2.6, 0.8
    for tap, label in enumerate(("t-2", "t-1", "t")):
        axes.add_patch(
            Rectangle((left + wide * tap, middle - tall / 2), wide, tall, facecolor=LEVELS[tap], edgecolor="white")
        )
        axes.text(left + wide * (tap + 0.5), middle, label, ha="center", va="center", fontsize=8)
        axes.add_patch(
            Rectangle((left + 2.9, middle + 1.2 - 0.8 * tap - 0.8), 1.2, 0.8, facecolor=LEVELS[tap], edgecolor="white")
        )
        axes.text(left + 3.5, middle + 0.8 - 0.8 * tap, label, ha="center", va="center", fontsize=8)
    axes.text(left + 2.65, middle, "x", ha="center", va="center")
    axes.text(left + 2.05, bottom + size * unit + 0.15, "one GEMM a component", ha="center", va="bottom", weight="bold")
    axes.text(
        left + 2.05,
        bottom - 0.15,
        r"[frames $\cdot$ tiles, 3 $C_{in}$] x [3 $C_{in}$, $C_{out}$]," + "\nthree temporal taps in one fp32 sum",
        ha="center",
        va="top",
    )
    _arrow(axes, (14.0, middle), (15.4, middle))
    axes.text(14.7, middle + 0.15, r"$A^T m\,A$", ha="center", va="bottom")
    axes.text(14.7, middle - 0.15, "+ bias\n+ residual", ha="center", va="top", fontsize=7.5, color=FAINT)
    grid(15.7, middle - rows * unit / 2, rows, rows, None, LEVELS[3])
    axes.text(
        15.7 + rows * unit / 2, bottom + size * unit + 0.15, "output tile", ha="center", va="bottom", weight="bold"
    )
    axes.text(15.7 + rows * unit / 2, bottom - 0.15, f"{rows} x {rows} outputs", ha="center", va="top")
    sentences = []
    for columns in (4, 3):
        outputs, products = rows * columns, 3 * winograd.components(columns)
        sentences.append(
            f"F(4x{columns}, 3x3): {products} products for {outputs} outputs, direct {27 * outputs} "
            f"({27 * outputs / products:g} times as many)"
        )
    axes.text(9.4, 6.1, ".   ".join(sentences), ha="center", va="center")

    def axis(height: float, name: str, points: tuple[float, ...], color: str, filled: bool) -> None:
        centre, scale = 11.0, 2.6
        axes.plot([centre - 2.3 * scale, centre + 2.3 * scale], [height, height], color=FAINT, linewidth=0.8, zorder=1)
        axes.text(centre - 2.45 * scale, height, name, ha="right", va="center")
        axes.text(centre + 2.45 * scale, height, r"and $\infty$", ha="left", va="center")
        for point in points:
            face = color if filled else "white"
            axes.plot(centre + scale * point, height, "o", color=color, markerfacecolor=face, markersize=6, zorder=2)
            axes.text(centre + scale * point, height + 0.22, f"{point:g}", ha="center", va="bottom", fontsize=7.5)

    axis(-1.4, "usual points of F(4, 3)", USUAL_POINTS, FAINT, False)
    axis(-2.4, "rows, and columns of 4", winograd.POINTS[4], RANKS[0], True)
    axis(-3.4, "columns of 3", winograd.POINTS[3], RANKS[1], True)
    return figure


# The parallel plan


def parallel() -> Figure:
    """One pass over four ranks: frames before the all-to-all, row bands behind it."""
    figure, axes = _canvas(11, 4.4, (-2.0, 28.4), (-1.6, 9.4))
    per_pass = WORLD * FRAMES_PER_RANK
    start = per_pass
    intervals = frame_intervals(start, start + per_pass, WORLD)
    assert intervals is not None
    first = window(*intervals[0])[0]
    for rank, (begin, end) in enumerate(intervals):
        bottom, color = 6.6 - 2.1 * rank, RANKS[rank]
        axes.text(-0.3, bottom + 0.7, f"rank {rank}", ha="right", va="center", color=color, weight="bold")
        for frame in range(window(begin, end)[0], end):
            own = frame >= begin
            axes.add_patch(
                Rectangle(
                    (0.5 * (frame - first), bottom),
                    0.5,
                    1.4,
                    facecolor=color if own else "white",
                    edgecolor="white" if own else color,
                    hatch=None if own else "////",
                    linewidth=0.7,
                )
            )
    span = 0.5 * (start + per_pass - first)
    axes.text(span / 2, 8.6, "prefix: whole frames", ha="center", va="bottom", weight="bold")
    axes.text(
        span / 2,
        -0.1,
        f"latent frames {first} to {start + per_pass - 1}; a rank's own {FRAMES_PER_RANK}\nand, hatched, "
        f"{CONTEXT_FRAMES} of context",
        ha="center",
        va="top",
    )

    _arrow(axes, (span + 0.4, 4.5), (span + 3.4, 4.5))
    axes.text(span + 1.9, 4.75, "all-to-all", ha="center", va="bottom", weight="bold")
    axes.text(span + 1.9, 4.25, "one a pass:\nframes become\nrow bands", ha="center", va="top")

    left, width, scale = span + 4.0, 5.2, 8.1 / ROWS
    bands = row_bands(ROWS, WORLD)
    for rank, (top, bottom_row) in enumerate(bands):
        y = 8.3 - scale * bottom_row
        axes.add_patch(
            Rectangle((left, y), width, scale * (bottom_row - top), facecolor=RANKS[rank], edgecolor="white")
        )
        label = f"rank {rank}: rows {top} to {bottom_row - 1}"
        axes.text(left + width / 2, y + scale * (bottom_row - top) / 2, label, ha="center", va="center", color="white")
    axes.text(left + width / 2, 8.6, "tail: row bands of all frames", ha="center", va="bottom", weight="bold")
    axes.text(left + width / 2, -0.1, f"{ROWS} latent rows,\ninner edges on even rows", ha="center", va="top")

    # One band with what it needs of its neighbours.
    halo_left, centre, half = left + width + 1.2, 4.25, 1.2
    axes.plot([left + width, halo_left], [8.3 - scale * bands[1][0], centre + half], color=FAINT, linewidth=0.7)
    axes.plot([left + width, halo_left], [8.3 - scale * bands[1][1], centre - half], color=FAINT, linewidth=0.7)
    axes.add_patch(Rectangle((halo_left, centre - half), 4.4, 2 * half, facecolor=RANKS[1], edgecolor="white"))
    for y, neighbour in ((centre + half, 0), (centre - half - 0.45, 2)):
        axes.add_patch(
            Rectangle((halo_left, y), 4.4, 0.45, facecolor="white", edgecolor=RANKS[neighbour], hatch="////")
        )
        axes.text(halo_left + 4.6, y + 0.22, f"rank {neighbour}", ha="left", va="center", color=RANKS[neighbour])
    axes.text(halo_left + 2.2, centre, "before each\nspatial 3x3", ha="center", va="center", color="white")
    axes.text(halo_left + 2.2, 6.6, "halo: one row\nfrom each neighbour", ha="center", va="bottom", weight="bold")
    axes.text(
        halo_left + 2.2, 1.9, "two for upsampling in\nWinograd form; zeros at\nthe image's edge", ha="center", va="top"
    )
    return figure


# Their parts


def _canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Any]:
    """An empty drawing of so many inches, without axes."""
    figure, axes = pyplot.subplots(figsize=(width, height))
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return figure, axes


def _arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "color": INK, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(begin, end, **style))


def _span(axes: Any, begin: float, end: float, height: float, text: str) -> None:
    """A line under an interval, with its meaning."""
    axes.plot([begin, begin, end, end], [height + 0.12, height, height, height + 0.12], color=FAINT, linewidth=1)
    axes.text((begin + end) / 2, height - 0.08, text, ha="center", va="top", fontsize=8.5)


FIGURES: dict[str, Callable[[], Figure]] = {"graph": graph, "winograd": winograd_tile, "parallel": parallel}


if __name__ == "__main__":
    main()
