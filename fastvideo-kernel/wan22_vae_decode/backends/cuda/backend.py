# SPDX-License-Identifier: Apache-2.0
"""The decoder's ops on our own CUDA kernels: which kernels an op launches, on which views, with which scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wan22_vae_decode import winograd
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
)

HEAD_CHANNELS = 112


class Padded(NamedTuple):
    """A causal conv's input: [B, 2 + T, rows, W, C]; ``row_halo`` says whether the rows include the neighbours'."""

    tensor: Tensor
    row_halo: bool


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

    def with_dtype(self, dtype: torch.dtype) -> CudaBackend:
        return CudaBackend(self.device, dtype, self.kernels)

    def with_tile(self, columns: int) -> CudaBackend:
        """The same ops on GEMM tiles of one fixed width, so that tests reach each width at any size."""
        return CudaBackend(self.device, self.dtype, self.kernels.with_tile(columns))

    # Choices and resources

    def adopt(self, weights: DecoderWeights) -> DecoderWeights:
        widths = (weights.post_quant_conv.weight.shape[0], *(b.resnets[-1].norm2.shape[0] for b in weights.up_blocks))
        if any(width % 8 for width in widths):
            raise BackendUnavailableError(f"the CUDA kernels need multiples of 8 channels, this decoder has {widths}")
        return weights

    def workspace_bytes(self, op: str, shape: OpShape) -> int:
        pixels = shape.rows * shape.cols
        size = self.dtype.itemsize
        halo_pixels = (shape.rows + 2 * shape.row_halo) * shape.cols
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
        if op == "winograd_conv3d":
            tiles = -(-shape.rows // winograd.TILE) * -(-shape.cols // winograd.TILE)
            components = (winograd.TILE + 2) ** 2 * shape.batch * tiles
            # Input and output transforms hold one fp32 copy of the components each.
            return components * ((shape.frames + 2) * shape.c_in + shape.frames * shape.c_out) * (size + 4)
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
    ) -> tuple[Padded, Tensor]:
        return self._padded(x, norm, history, halo)

    def causal_pad(
        self, x: Tensor, history: Tensor | None, halo: Halo | None, conv: Conv | WinogradConv
    ) -> tuple[Padded, Tensor]:
        return self._padded(x, None, history, halo)

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
        return out

    def winograd_conv3d(
        self, x: Padded, conv: WinogradConv, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        padded, step, tile = x.tensor, winograd.TILE, winograd.TILE + 2
        matrices = winograd.transforms()
        b, a = (matrix.to(padded.device, torch.float32) for matrix in (matrices.input, matrices.output))
        batch, frames, rows, cols, channels = padded.shape
        rows -= 2 if x.row_halo else 0
        edge = 0 if x.row_halo else 1
        padded = torch.nn.functional.pad(padded, (0, 0, 1, 1 + -cols % step, edge, edge + -rows % step))
        tiles = padded.unfold(2, tile, step).unfold(3, tile, step).float()
        down, across = tiles.shape[2:4]
        c_out = conv.bias.shape[0]
        y = padded.new_empty(batch, frames - 2, rows, cols, c_out)
        for item in range(batch):
            components = torch.einsum("im,jn,tyxcmn->ijtyxc", b, b, tiles[item]).to(padded.dtype).contiguous()
            products = padded.new_empty(tile * tile, (frames - 2) * down * across, c_out)
            per_frame = down * across * channels
            windows = components.as_strided(
                (tile * tile, products.shape[1], 3, channels), (frames * per_frame, channels, per_frame, 1)
            )
            self.kernels.tap_gemm(windows, conv.weight, None, None, products)
            parts = products.view(tile, tile, frames - 2, down, across, c_out).float()
            whole = torch.einsum("pi,qj,ijtyxo->typxqo", a, a, parts).flatten(3, 4).flatten(1, 2)
            y[item] = whole[:, :rows, :cols] + conv.bias
        if residual is not None:
            y += residual
        return y if out is None else out.copy_(y)

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
        if up.phases is None:
            raise ValueError("these upsample weights are in the product form, which the CUDA backend does not ask for")
        batch, frames, rows, cols, c_in = x.shape
        c_out = up.bias.shape[0]
        factor = (frames + skip_frames) // shortcut.shape[1]
        out = x.new_empty(batch, frames, 2 * rows, 2 * cols, c_out)
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
                phases = scratch[: 4 * count * rows * cols * c_out].view(2, 2, count, rows, cols, c_out)
                for row in range(2):
                    for col in range(2):
                        # Phase 0 looks at the source pixel and the one before it, phase 1 at the one behind it.
                        source = x[item : item + 1, start : start + count]
                        if halo is not None:
                            source = source[:, :, row : row + rows + 1]
                        self.kernels.conv3d(
                            source,
                            up.phases[row, col].unsqueeze(1),
                            None,
                            None,
                            phases[row, col].unsqueeze(0),
                            pad_rows=(0, 0) if halo is not None else (1 - row, row),
                            pad_cols=(1 - col, col),
                        )
                self.kernels.upsample_combine(
                    phases, up.bias, shortcut[item], skip_frames + start, factor, out[item, start : start + count]
                )
        return out

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

    def edge_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, frames, rows, cols, channels = x.shape
        above, below = (x.new_empty(batch, frames, 1, cols, channels) for _ in range(2))
        for row, target in ((0, above), (rows - 1, below)):
            self.kernels.copy_rows(x.flatten(0, 1)[:, row : row + 1], target.flatten(0, 1))
        return above, below

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
    return None if halo is None else Halo(halo.above[item], halo.below[item])
