# SPDX-License-Identifier: Apache-2.0
"""The decoder's ops on our own CUDA kernels: which kernels an op launches, on which views, with which scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan22_vae_decode import winograd
from wan22_vae_decode.backends import create
from wan22_vae_decode.backends.base import Backend, Halo, OpShape
from wan22_vae_decode.backends.cuda import heuristics
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.errors import BackendUnavailableError, OutOfMemoryError
from wan22_vae_decode.layers import (
    Attention,
    Conv,
    DecoderWeights,
    Head,
    Pointwise,
    UpsampleConv,
    WinogradConv,
    WinogradForm,
)
from wan22_vae_decode.weights import HEAD_CHANNELS, version


class Padded(NamedTuple):
    """A causal conv's input: [B, 2 + T, rows, W, C]; ``row_halo`` says whether the rows include the neighbours'."""

    tensor: Tensor
    row_halo: bool


class Deferred(NamedTuple):
    """A Winograd conv's input before its transform, which works through it band by band: what `winograd_input` reads.

    The conv also writes ``next_history``, in plain form: as components it would take 2.25 times as much. ``version`` is
    torch's count of writes to ``x`` at the time, so that a later write is noticed.
    """

    x: Tensor
    norm: Tensor | None
    history: Tensor | None
    halo: Halo | None
    next_history: Tensor
    version: int


class CudaBackend(Backend):
    """Ops on one GPU, in float16 or bfloat16 with fp32 accumulation.

    Args:
        device: a CUDA device with an index.
        dtype: float16 or bfloat16.
        kernels: of the device's architecture.
    """

    name = "cuda"

    def __init__(self, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(device, dtype)
        self.kernels = kernels
        self._granted = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaBackend:
        return self  # decoders on a device share it

    def __reduce__(self) -> tuple[Callable[..., Backend], tuple[str, torch.device, torch.dtype]]:
        # Loaded kernels cannot be carried; where the copy is made, they are loaded or built.
        return create, (self.name, self.device, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> CudaBackend:
        return CudaBackend(self.device, dtype, self.kernels)

    def with_tile(self, columns: int) -> CudaBackend:
        """The same ops on GEMM tiles of one fixed width, so that tests reach each width at any size."""
        return CudaBackend(self.device, self.dtype, self.kernels.with_tile(columns))

    # Choices and resources

    def winograd_form(self, level: int, c_in: int, c_out: int, split_rows: bool) -> WinogradForm | None:
        return heuristics.winograd_form(level, c_in, split_rows)

    def upsample_method(self, level: int, c_in: int, c_out: int) -> str:
        return heuristics.upsample_method(self.dtype, level)

    def input_bytes(self, shape: OpShape) -> int:
        return 0 if shape.winograd else super().input_bytes(shape)

    def input_holds_x(self, shape: OpShape) -> bool:
        return shape.winograd is not None

    def adopt(self, weights: DecoderWeights) -> DecoderWeights:
        widths = (weights.post_quant_conv.weight.shape[0], *(b.resnets[-1].norm2.shape[0] for b in weights.up_blocks))
        if any(width % 8 for width in widths):
            raise BackendUnavailableError(f"the CUDA kernels need multiples of 8 channels, this decoder has {widths}")
        return weights

    def workspace_bytes(self, op: str, shape: OpShape) -> int:
        pixels = shape.rows * shape.cols
        size = self.dtype.itemsize
        halo_pixels = (shape.rows + 2 * shape.row_halo) * shape.cols
        if op == "upsample_conv2x" and shape.upsample_method == "winograd":
            *_, nbytes = heuristics.upsample_slab(
                shape.frames, shape.rows, shape.cols, shape.row_halo, shape.c_in, shape.c_out, size
            )
            return nbytes
        if op == "upsample_conv2x":
            padded = shape.batch * shape.frames * halo_pixels * shape.c_in * size if shape.row_halo else 0
            frame = 4 * pixels * shape.c_out * size
            return padded + frame * heuristics.frames_per_slab(shape.frames, frame)
        if op == "output_head":
            frame = halo_pixels * HEAD_CHANNELS * size
            return frame * heuristics.frames_per_slab(shape.frames, frame)
        if op == "attention":
            frames = shape.batch * shape.frames
            scores = min(frames, heuristics.ATTENTION_FRAMES) * pixels * (2 * pixels + shape.c_in)
            return (frames * pixels * 5 * shape.c_in + scores) * size
        if op == "winograd_conv3d" and shape.winograd is not None:
            down, _ = winograd.tiles(shape.rows, shape.cols, shape.winograd.columns)
            tile_row = heuristics.tile_row_bytes(
                shape.winograd, shape.cols, shape.frames, shape.c_in, shape.c_out, self.dtype
            )
            return heuristics.tile_rows_per_band(down, shape.frames, tile_row) * tile_row
        return 0

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def reserve(self, nbytes: int) -> None:
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        # In later passes of a decode the histories occupy part of what its first pass was granted; asking for one
        # whole block again would double the pool.
        if cached >= nbytes or (nbytes <= self._granted and 2 * cached >= nbytes):
            return
        try:
            # torch keeps the block and cuts the pass's tensors out of it.
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"a pass needs {nbytes / 2**30:.2f} GiB, which {self.device} cannot give") from error
        self._granted = nbytes

    # Inputs of causal convs

    def norm_silu_pad(
        self, x: Tensor, norm: Tensor, history: Tensor | None, halo: Halo | None, conv: Conv | WinogradConv | Head
    ) -> tuple[Padded | Deferred, Tensor]:
        return self._conv_input(x, norm, history, halo, conv)

    def causal_pad(
        self, x: Tensor, history: Tensor | None, halo: Halo | None, conv: Conv | WinogradConv
    ) -> tuple[Padded | Deferred, Tensor]:
        return self._conv_input(x, None, history, halo, conv)

    def _conv_input(
        self,
        x: Tensor,
        norm: Tensor | None,
        history: Tensor | None,
        halo: Halo | None,
        conv: Conv | WinogradConv | Head,
    ) -> tuple[Padded | Deferred, Tensor]:
        if not isinstance(conv, WinogradConv):
            return self._padded(x, norm, history, halo)
        batch, _, rows, cols, channels = x.shape
        kept = x.new_empty(batch, 2, rows + (2 if halo else 0), cols, channels)
        return Deferred(x, norm, history, halo, kept, version(x)), kept

    def _padded(
        self, x: Tensor, norm: Tensor | None, history: Tensor | None, halo: Halo | None
    ) -> tuple[Padded, Tensor]:
        batch, frames, rows, cols, channels = x.shape
        rows += 2 if halo else 0
        out = x.new_empty(batch, 2 + frames, rows, cols, channels)
        kept = x.new_empty(batch, 2, rows, cols, channels)
        for item in range(batch):
            self.kernels.pad(
                x[item],
                norm,
                silu=True,
                out=out[item],
                history_frames=2,
                history=None if history is None else history[item],
                halo=_halo_of(halo, item),
                next_history=kept[item],
            )
        return Padded(out, halo is not None), kept

    # Convolutions

    def causal_conv3d(self, x: Padded, conv: Conv, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        batch, frames, rows, cols, _ = x.tensor.shape
        rows -= 2 if x.row_halo else 0
        if out is None:
            out = x.tensor.new_empty(batch, frames - 2, rows, cols, conv.bias.shape[0])
        edge = (0, 0) if x.row_halo else (1, 1)
        self.kernels.conv3d(x.tensor, conv.weight, conv.bias, residual, out, pad_rows=edge, pad_cols=(1, 1))
        _count_write(out)
        return out

    def winograd_conv3d(
        self, x: Deferred, conv: WinogradConv, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        source = x.x
        if version(source) != x.version:
            raise ValueError("the input of a Winograd conv was written before the conv read it")
        if out is not None and out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            raise ValueError("a Winograd conv cannot write into its own input")
        batch, frames, rows, cols, c_in = source.shape
        c_out = conv.bias.shape[0]
        if out is None:
            out = source.new_empty(batch, frames, rows, cols, c_out)
        count, (down, across) = len(conv.weight), winograd.tiles(rows, cols, conv.form.columns)
        tile_row = heuristics.tile_row_bytes(conv.form, cols, frames, c_in, c_out, source.dtype)
        band = heuristics.tile_rows_per_band(down, frames, tile_row)
        component_scratch = source.new_empty(count * (frames + 2) * band * across * c_in)
        product_type = heuristics.product_type(conv.form, source.dtype)
        product_scratch = source.new_empty(count * frames * band * across * c_out, dtype=product_type)
        for item in range(batch):
            history = None if x.history is None else x.history[item]
            for first in range(0, down, band):
                tile_rows = min(band, down - first)
                tiles = tile_rows * across
                components = _leading(component_scratch, count, frames + 2, tile_rows, across, c_in)
                products = _leading(product_scratch, count, frames, tile_rows, across, c_out)
                self.kernels.winograd_input(
                    source[item], x.norm, history, _halo_of(x.halo, item), first, components, x.next_history[item]
                )
                # Windows of three frames: tiles of all frames are adjacent, a tap is a frame away.
                windows = components.as_strided(
                    (count, frames * tiles, 3, c_in), (components.stride(0), c_in, tiles * c_in, 1)
                )
                self.kernels.tap_gemm(windows, conv.weight, None, None, products.flatten(1, 3))
                rest = None if residual is None else residual[item]
                self.kernels.winograd_output(products, conv.bias, rest, first, out[item])
        _count_write(out)
        return out

    def pointwise_conv(self, x: Tensor, conv: Pointwise) -> Tensor:
        return self._pointwise(x, conv, None)

    def _pointwise(self, x: Tensor, conv: Pointwise, residual: Tensor | None) -> Tensor:
        c_out, c_in = conv.weight.shape
        out = x.new_empty(*x.shape[:-1], c_out)
        pixels = x.numel() // c_in
        self.kernels.tap_gemm(
            x.view(1, pixels, 1, c_in),
            conv.weight.view(1, c_out, 1, c_in),
            conv.bias,
            residual,
            out.view(1, pixels, c_out),
        )
        return out

    def attention(self, x: Tensor, weights: Attention, nonfinite: Tensor) -> Tensor:
        normed = torch.empty_like(x)
        self.kernels.pad(x.flatten(0, 1), weights.norm, silu=False, out=normed.flatten(0, 1))
        qkv = self.pointwise_conv(normed, weights.qkv).flatten(2, 3).flatten(0, 1)
        # One pass: minimum and maximum are NaN if anything is.
        bounds = torch.stack(torch.aminmax(qkv))
        nonfinite.logical_or_(~torch.isfinite(bounds).all())
        scale = x.shape[-1] ** -0.5
        mixed = normed.view(qkv.shape[0], qkv.shape[1], -1)
        for q, k, v, target in zip(
            *(part.split(heuristics.ATTENTION_FRAMES) for part in (*qkv.chunk(3, dim=-1), mixed)), strict=True
        ):
            scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=scale)
            torch.bmm(scores.softmax(-1), v, out=target)
        return self._pointwise(normed, weights.proj, residual=x)

    def time_double(self, x: Padded, conv: Conv, out: Tensor) -> None:
        batch, frames, rows, cols, c_in = x.tensor.shape
        frames -= 2
        c_out = conv.bias.shape[0] // 2
        pixels = rows * cols
        for item in range(batch):
            # Windows of three frames: [T, pixels, taps, C_in].
            windows = x.tensor[item].view(-1, pixels, c_in).unfold(0, 3, 1).transpose(2, 3)
            for half in range(2):
                channels = slice(half * c_out, (half + 1) * c_out)
                weight = conv.weight[channels].view(1, c_out, 3, c_in).expand(frames, -1, -1, -1)
                target = out[item].view(frames, 2, pixels, c_out)[:, half]
                self.kernels.tap_gemm(windows, weight, conv.bias[channels], None, target)

    def upsample_conv2x(
        self, x: Tensor, up: UpsampleConv, shortcut: Tensor, skip_frames: int, halo: Halo | None
    ) -> Tensor:
        batch, frames, rows, cols, _ = x.shape
        out = x.new_empty(batch, frames, 2 * rows, 2 * cols, up.bias.shape[0])
        if up.phases is None:
            self._upsample_winograd(x, up, shortcut, skip_frames, halo, out)
        else:
            self._upsample_phases(x, up, up.phases, shortcut, skip_frames, halo, out)
        return out

    def _upsample_phases(
        self,
        x: Tensor,
        up: UpsampleConv,
        weights: Tensor,
        shortcut: Tensor,
        skip_frames: int,
        halo: Halo | None,
        out: Tensor,
    ) -> None:
        """Four 2x2 convs at the low resolution, then their interleaving."""
        batch, frames, rows, cols, c_in = x.shape
        c_out = out.shape[-1]
        factor = (frames + skip_frames) // shortcut.shape[1]
        if halo is not None:
            padded = x.new_empty(batch, frames, rows + 2, cols, c_in)
            for item in range(batch):
                self.kernels.pad(x[item], None, silu=False, out=padded[item], halo=_halo_of(halo, item))
            x = padded
        slab = heuristics.frames_per_slab(frames, 4 * rows * cols * c_out * x.element_size())
        scratch = x.new_empty(4 * slab * rows * cols * c_out)
        for item in range(batch):
            for start in range(0, frames, slab):
                count = min(slab, frames - start)
                phases = _leading(scratch, 2, 2, count, rows, cols, c_out)
                for row in range(2):
                    for col in range(2):
                        # Phase 0 looks at the source pixel and the one before it, phase 1 at the one behind it.
                        source = x[item : item + 1, start : start + count]
                        if halo is not None:
                            source = source[:, :, row : row + rows + 1]
                        self.kernels.conv3d(
                            source,
                            weights[row, col].unsqueeze(1),
                            None,
                            None,
                            phases[row, col].unsqueeze(0),
                            pad_rows=(0, 0) if halo is not None else (1 - row, row),
                            pad_cols=(1 - col, col),
                        )
                self.kernels.upsample_combine(
                    phases, up.bias, shortcut[item], skip_frames + start, factor, out[item, start : start + count]
                )

    def _upsample_winograd(
        self, x: Tensor, up: UpsampleConv, shortcut: Tensor, skip_frames: int, halo: Halo | None, out: Tensor
    ) -> None:
        """F(3x3, 2x2) of all phases at once, in slabs of frames and bands of tile rows."""
        assert up.components is not None
        batch, frames, rows, cols, c_in = x.shape
        c_out, count = out.shape[-1], winograd.UPSAMPLE_COMPONENTS
        factor = (frames + skip_frames) // shortcut.shape[1]
        first_row = 0 if halo is None else halo.first_row
        down, across = winograd.upsample_tiles(rows, first_row), len(winograd.upsample_tiles(cols))
        slab, band, _ = heuristics.upsample_slab(frames, rows, cols, halo is not None, c_in, c_out, x.element_size())
        weights = up.components.view(count, 4 * c_out, 1, c_in)
        component_scratch = x.new_empty(count * slab * band * across * c_in)
        product_scratch = x.new_empty(count * slab * band * across * 4 * c_out)
        for item in range(batch):
            for start in range(0, frames, slab):
                interval = slice(start, min(start + slab, frames))
                source, target = x[item, interval], out[item, interval]
                rim = None if halo is None else Halo(halo.above[item, interval], halo.below[item, interval], first_row)
                for first in down[::band]:
                    extent = (source.shape[0], min(band, down.stop - first), across)
                    tiles = math.prod(extent)
                    components = _leading(component_scratch, count, *extent, c_in)
                    products = _leading(product_scratch, count, *extent, 2, 2, c_out)
                    self.kernels.upsample_input(source, rim, first, components)
                    self.kernels.tap_gemm(
                        components.view(count, tiles, 1, c_in), weights, None, None, products.view(count, tiles, -1)
                    )
                    self.kernels.upsample_output(
                        products, up.bias, shortcut[item], skip_frames + start, factor, first_row, first, target
                    )

    def output_head(self, x: Padded, head: Head, out: Tensor, nonfinite: Tensor) -> None:
        if out.dtype == torch.float64:
            # The kernel writes no doubles; its fp32 sums lose nothing on the way.
            video = torch.empty_like(out, dtype=torch.float32)
            self.output_head(x, head, video, nonfinite)
            out.copy_(video)
            return
        batch, frames, rows, cols, channels = x.tensor.shape
        frames -= 2
        pixels = rows * cols
        slab = heuristics.frames_per_slab(frames, pixels * HEAD_CHANNELS * x.tensor.element_size())
        scratch = x.tensor.new_empty(slab * pixels, HEAD_CHANNELS)
        weight = head.weight.view(1, HEAD_CHANNELS, 3, channels)
        for item in range(batch):
            for start in range(0, frames, slab):
                count = min(slab, frames - start)
                # Frames are adjacent, so the windows of all their pixels are one strided view.
                windows = x.tensor[item, start:].as_strided(
                    (1, count * pixels, 3, channels), (count * pixels * channels, channels, pixels * channels, 1)
                )
                part = scratch[: count * pixels]
                self.kernels.tap_gemm(windows, weight, None, None, part.unsqueeze(0))
                video = out[item, :, start : start + count]
                self.kernels.output_head(
                    part.view(count, rows, cols, HEAD_CHANNELS), head.bias, x.row_halo, video, nonfinite
                )

    # Data movement between ranks

    def edge_rows(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        batch, frames, _, cols, channels = x.shape
        images = x.flatten(0, 1)
        first, last = (x.new_empty(batch, frames, rows, cols, channels) for _ in range(2))
        for source, target in ((images[:, :rows], first), (images[:, -rows:], last)):
            self.kernels.copy_rows(source, target.flatten(0, 1))
        return first, last

    def split_rows(self, x: Tensor, bands: Sequence[tuple[int, int]]) -> Tensor:
        batch, frames, _, cols, channels = x.shape
        sizes = [batch * frames * (stop - start) * cols * channels for start, stop in bands]
        flat = x.new_empty(sum(sizes))
        for (start, stop), piece in zip(bands, flat.split(sizes), strict=True):
            if stop > start:
                target = piece.view(batch * frames, stop - start, cols, channels)
                self.kernels.copy_rows(x.flatten(0, 1)[:, start:stop], target)
        return flat

    def join_frames(
        self, flat: Tensor, frames: Sequence[int], batch: int, rows: int, cols: int, channels: int
    ) -> Tensor:
        out = flat.new_empty(batch, sum(frames), rows, cols, channels)
        sizes = [batch * count * rows * cols * channels for count in frames]
        start = 0
        for count, piece in zip(frames, flat.split(sizes), strict=True):
            if count:
                # A batch item's frames are one dense piece on both sides.
                source = piece.view(batch, count * rows, cols, channels)
                self.kernels.copy_rows(source, out[:, start : start + count].flatten(1, 2))
            start += count
        return out


def _halo_of(halo: Halo | None, item: int) -> Halo | None:
    return None if halo is None else Halo(halo.above[item], halo.below[item], halo.first_row)


def _leading(scratch: Tensor, *shape: int) -> Tensor:
    """The first elements of a flat tensor, in a shape."""
    return scratch[: math.prod(shape)].view(shape)


def _count_write(x: Tensor) -> None:
    """Tells torch of a write that it did not make itself."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
