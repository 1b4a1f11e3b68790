# SPDX-License-Identifier: Apache-2.0
"""Where the error of a float16 decode comes from, and what other forms of its convs would cost in accuracy.

    python benchmarks/rounding.py

Needs no GPU: decodes with torch in float32, rounded to float16 wherever the CUDA kernels round. Each rounding is left
out in turn; then come forms that the kernels do not have. PSNR is against the same decode without any rounding, with
both weight sets of ``decode_weights``. Writes JSON to benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import decode
import decode_weights
import torch
import torch.nn.functional as F
from torch import Tensor

from wan22_vae_decode import graph, layers, weights, winograd
from wan22_vae_decode.accuracy import distance
from wan22_vae_decode.backends.base import Halo
from wan22_vae_decode.backends.cuda import heuristics
from wan22_vae_decode.backends.torch import Padded, TorchBackend
from wan22_vae_decode.geometry import Architecture, video_frames
from wan22_vae_decode.layers import WinogradForm

SOURCES = {
    "stream": "residual stream",
    "sums": "residual stream, from one resnet to the next only",
    "branch": "output of a resnet's first conv",
    "direct": "input of direct convs and the head",
    "weights": "weights",
    "components": "Winograd components of inputs",
    "products": "Winograd products",
    "upsample": "upsampling convs' components and products, or phases",
    "taps": "taps of the head",
}
"""Every rounding by name, and what it rounds."""

F23 = (0.0, 1.0, -1.0)
"""Finite points of F(2, 3)."""


@dataclass(frozen=True)
class Case:
    """One decode: the Winograd form of each level, the roundings that are left out, and the levels whose taps in time
    run as F(2, 3).
    """

    name: str
    forms: Mapping[int, layers.WinogradForm] = field(default_factory=lambda: heuristics.WINOGRAD_FORMS)
    upsample: tuple[int, ...] = heuristics.UPSAMPLE_WINOGRAD_LEVELS
    exact: frozenset[str] = frozenset()
    temporal: tuple[int, ...] = ()


def cases() -> list[Case]:
    """All rows of the table."""
    others = {level: form for level, form in heuristics.WINOGRAD_FORMS.items() if level > 1}
    found = [Case("as decoded")]
    found += [Case(f"exact: {text}", exact=frozenset([name])) for name, text in SOURCES.items()]
    found.append(Case("all convs direct", {}, ()))
    for columns in (0, 3, 2):
        for levels in ((), (0,), (1,), (0, 1)):
            name = f"level 0 in 4x{columns}" if columns else "level 0 direct"
            forms = {1: WinogradForm(3, 1 in levels), **others}
            if columns:
                forms[0] = WinogradForm(columns, 0 in levels)
            elif 0 in levels:
                continue
            name += f", products float32 at {' and '.join(map(str, levels))}" if levels else ""
            found.append(Case(name, forms))
    found += [Case(f"F(2, 3) in time at {', '.join(map(str, t))}", temporal=t) for t in ((1,), (1, 2), (1, 2, 3))]
    return found


class RoundingBackend(TorchBackend):
    """The torch ops in float32, rounded to float16 where the CUDA kernels store something, but for a case's exact
    parts. For a first pass, on whole images.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(torch.device("cpu"), torch.float32, case.forms, case.upsample)
        self._exact = case.exact

    def _rounded(self, x: Tensor, source: str) -> Tensor:
        return x if source in self._exact else x.half().float()

    def _stored(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """A conv's result. Sums that are kept exact are rounded by their readers."""
        if residual is None:
            return self._rounded(y, "branch").contiguous()
        return y + residual if "sums" in self._exact else self._rounded(y + residual, "stream")

    def norm_silu_pad(self, x: Tensor, norm: Tensor, *rest: Any) -> tuple[Padded, Tensor]:
        padded, history = super().norm_silu_pad(self._rounded(x, "stream"), norm, *rest)
        if not isinstance(rest[-1], layers.WinogradConv):
            padded.tensor.copy_(self._rounded(padded.tensor, "direct"))
        return padded, history

    def causal_pad(self, x: Tensor, *rest: Any) -> tuple[Padded, Tensor]:
        return super().causal_pad(self._rounded(x, "stream"), *rest)

    def causal_conv3d(
        self, x: Padded, conv: layers.Conv, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self._stored(super().causal_conv3d(x, conv), residual)

    def winograd_conv3d(
        self, x: Padded, conv: layers.WinogradConv, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        down, across = winograd.tile_transforms(conv.form.columns)
        rows, cols = x.tensor.shape[2:4]
        frames = x.tensor.shape[1] - 2
        temporal = conv.weight.shape[2] == 4
        columns = conv.form.columns
        below, right = -rows % winograd.TILE_ROWS, -cols % columns
        padded = F.pad(x.tensor, (0, 0, 1, 1 + right, 1, 1 + below, 0, frames % 2 if temporal else 0))
        # [B, T, tile rows, tiles, C, rows, columns of a tile], and of as many frames as enter an output.
        tiles = padded.unfold(2, winograd.TILE_ROWS + 2, winograd.TILE_ROWS).unfold(3, columns + 2, columns)
        components = torch.einsum("im,jn,btyxcmn->ijbtyxc", down.input.float(), across.input.float(), tiles)
        if temporal:
            time = winograd.transforms(F23)
            components = torch.einsum("kf,ijbtyxcf->kijbtyxc", time.input.float(), components.unfold(3, 4, 2))
            components = self._rounded(components, "components")
            products = torch.einsum("pibtyxc,iopc->pibtyxo", components.flatten(1, 2), conv.weight)
            products = self._rounded(products, "products")
            products = torch.einsum("sp,pibtyxo->ibtsyxo", time.output.float(), products).flatten(2, 3)[:, :, :frames]
        else:
            components = self._rounded(components, "components")
            windows = torch.cat([components[:, :, :, tap : tap + frames] for tap in range(3)], dim=-1).flatten(0, 1)
            products = windows.flatten(1, -2) @ conv.weight.flatten(2).transpose(1, 2)
            products = products.view(*windows.shape[:-1], -1)
            products = products if conv.form.float_products else self._rounded(products, "products")
        products = products.unflatten(0, (winograd.TILE_ROWS + 2, columns + 2))
        y = torch.einsum("pi,qj,ijbtyxo->btypxqo", down.output.float(), across.output.float(), products)
        return self._stored(y.flatten(4, 5).flatten(2, 3)[:, :, :rows, :cols] + conv.bias, residual)

    def pointwise_conv(self, x: Tensor, conv: layers.Pointwise) -> Tensor:
        return self._rounded(super().pointwise_conv(self._rounded(x, "stream"), conv), "stream")

    def attention(self, x: Tensor, weight: layers.Attention, nonfinite: Tensor) -> Tensor:
        return self._rounded(super().attention(self._rounded(x, "stream"), weight, nonfinite), "stream")

    def time_double(self, x: Padded, conv: layers.Conv, out: Tensor) -> None:
        super().time_double(x, conv, out)
        out.copy_(self._rounded(out, "stream"))

    def upsample_conv2x(
        self, x: Tensor, up: layers.UpsampleConv, shortcut: Tensor, skip_frames: int, halo: Halo | None
    ) -> Tensor:
        x, shortcut = self._rounded(x, "stream"), self._rounded(shortcut, "stream")
        return self._rounded(super().upsample_conv2x(x, up, shortcut, skip_frames, halo), "stream")

    def _direct_phases(self, x: Tensor, up: layers.UpsampleConv, halo: Halo | None) -> Any:
        for row, col, y in super()._direct_phases(x, up, halo):
            yield row, col, self._rounded(y, "upsample")

    def _winograd_phases(self, x: Tensor, up: layers.UpsampleConv, halo: Halo | None) -> Any:
        assert up.components is not None
        size, matrices = winograd.UPSAMPLE_TILE, winograd.upsample_transforms()
        rows, cols = x.shape[2:4]
        down, across = len(winograd.upsample_tiles(rows)), len(winograd.upsample_tiles(cols))
        padded = F.pad(x, (0, 0, 1, size * across - cols, 1, size * down - rows)).flatten(0, 1)
        tiles = padded.unfold(1, size + 1, size).unfold(2, size + 1, size)
        b, a = matrices.input.float(), matrices.output.float()
        components = self._rounded(torch.einsum("im,jn,tyxcmn->ijtyxc", b, b, tiles), "upsample")
        products = self._rounded(
            torch.einsum("ijtyxc,ijkloc->klijtyxo", components, by_tile(up.components)), "upsample"
        )
        for row in range(2):
            for col in range(2):
                y = torch.einsum("pi,qj,ijtyxo->typxqo", a, a, products[row, col]).flatten(3, 4).flatten(1, 2)
                yield row, col, y[:, row : row + rows, col : col + cols] + up.bias

    def _conv3d(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int, int]) -> Tensor:
        y = super()._conv3d(x, weight, bias, padding)
        # Only the head adds its bias later.
        return self._rounded(y, "taps") if bias is None else y


def by_tile(components: Tensor) -> Tensor:
    """[16, ...] -> [4, 4, ...]."""
    return components.unflatten(0, (4, 4))


class Weights:
    """Prepared weights of a state dict in float32: exact, or as a float16 decoder rounds them."""

    def __init__(self, state: dict[str, Tensor], arch: Architecture) -> None:
        self._state, self._arch = state, arch
        self._kept: dict[Any, layers.DecoderWeights] = {}

    def of(self, case: Case) -> layers.DecoderWeights:
        """What a case decodes with."""
        if "weights" in case.exact:
            return self._prepared(case, torch.float32)
        rounded = self._prepared(case, torch.float16)
        if not case.temporal:
            return rounded
        wide, blocks = self._prepared(case, torch.float32), list(rounded.up_blocks)
        for level in case.temporal:
            resnets = tuple(_in_time(resnet) for resnet in wide.up_blocks[level].resnets)
            blocks[level] = replace(blocks[level], resnets=resnets)
        return replace(rounded, up_blocks=tuple(blocks))

    def _prepared(self, case: Case, dtype: torch.dtype) -> layers.DecoderWeights:
        key = dtype, tuple(case.forms.items()), case.upsample
        if key not in self._kept:
            # Up to 10 GB each: the last and this one.
            for old in list(self._kept)[:-1]:
                del self._kept[old]
            backend = TorchBackend(torch.device("cpu"), dtype, case.forms, case.upsample)
            self._kept[key] = _widened(weights.prepare(self._state, self._arch, backend))
        return self._kept[key]


def _in_time(resnet: layers.Resnet) -> layers.Resnet:
    """Its convs, and its shortcut, with taps in time as the components of F(2, 3), rounded."""
    g = winograd.transforms(F23).weight.float()

    def conv(one: Any) -> layers.WinogradConv:
        return replace(one, weight=torch.einsum("pf,iofc->iopc", g, one.weight).half().float())

    shortcut = resnet.shortcut and replace(resnet.shortcut, weight=resnet.shortcut.weight.half().float())
    return replace(resnet, conv1=conv(resnet.conv1), conv2=conv(resnet.conv2), shortcut=shortcut)


def _widened(value: Any) -> Any:
    """Every tensor of prepared weights in float32."""
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, tuple):
        return tuple(_widened(part) for part in value)
    if is_dataclass(value):
        return replace(value, **{part.name: _widened(getattr(value, part.name)) for part in fields(value)})  # type: ignore[type-var]
    return value


def decoded(latents: Tensor, prepared: layers.DecoderWeights, arch: Architecture, backend: TorchBackend) -> Tensor:
    """A video [1, 3, F, 16H, 16W] of latents [1, z, T, H, W] in one pass."""
    frames, rows, cols = latents.shape[2:]
    decoder, history, nonfinite = graph.Graph(backend, prepared, arch.up_blocks), graph.History(), torch.zeros(1)
    out = torch.empty(1, 3, video_frames(0, frames)[1], 16 * rows, 16 * cols)
    # Latents come as float32 and are rounded first of all.
    x = decoder.prefix(graph.channels_last(latents, torch.float32), history, nonfinite.bool())
    decoder.tail(x, history, True, out, nonfinite.bool(), frames)
    return out


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Decodes every case and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", type=int, nargs=3, default=(2, 4, 8), metavar=("T", "H", "W"), help="their size")
    parser.add_argument("--width", type=int, default=256, help="channels of the decoder's last level (default: 256)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the result")
    arguments = parser.parse_args(argv)
    state = decode_weights.random_vae("branches", torch.device("cpu"), width=arguments.width).state_dict()
    state = {name: tensor for name, tensor in state.items() if name.startswith(("decoder.", "post_quant_conv."))}
    arch = weights.check(state)
    prepared = Weights(state, arch)
    latents = torch.randn(1, 48, *arguments.latents, generator=torch.Generator().manual_seed(1))
    plain = TorchBackend(torch.device("cpu"), torch.float32)
    reference = decoded(latents, weights.prepare(state, arch, plain), arch, plain)
    rows = []
    # F(2, 3) across a tile, which no kernel has.
    with mock.patch.dict(winograd.POINTS, {2: F23}):
        for case in cases():
            video = decoded(latents, prepared.of(case), arch, RoundingBackend(case))
            rows.append({"name": case.name, "psnr_db": distance(video, reference).psnr_db})
            print(f"{rows[-1]['psnr_db']:7.2f} dB  {case.name}", flush=True)
    decode.write_report(arguments.out / "rounding.json", "CPU", latents=list(arguments.latents), rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
