# SPDX-License-Identifier: Apache-2.0
"""The ops in plain torch: the oracle of every other backend, and a decoder for any device and type.

Nothing here is tuned beyond bounding temporaries: elementwise work in fp32 goes frame by frame.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wan22_vae_decode import winograd
from wan22_vae_decode.backends.base import Backend, Halo, OpShape
from wan22_vae_decode.errors import OutOfMemoryError
from wan22_vae_decode.geometry import OUT_CHANNELS
from wan22_vae_decode.layers import (
    Attention,
    Conv,
    Head,
    Pointwise,
    UpsampleConv,
    WinogradConv,
    WinogradForm,
)
from wan22_vae_decode.weights import HEAD_CHANNELS


class Padded(NamedTuple):
    """A causal conv's input: [B, 2 + T, rows, W, C]; ``row_halo`` says whether the rows include the neighbours'."""

    tensor: Tensor
    row_halo: bool


class TorchBackend(Backend):
    """Reference ops.

    Args:
        device: any torch device.
        dtype: float64, float32, bfloat16 or float16.
        winograd_levels: levels whose 3x3x3 convs run in Winograd form -> that form, to check it in a whole decode.
        upsample_winograd: levels whose upsampling convs run as F(3x3, 2x2), likewise.
    """

    name = "torch"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        winograd_levels: Mapping[int, WinogradForm] | None = None,
        upsample_winograd: Collection[int] = (),
    ) -> None:
        super().__init__(device, dtype)
        self._winograd_levels = dict(winograd_levels or {})
        self._upsample_winograd = frozenset(upsample_winograd)

    @property
    def _accumulator(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    # Choices and resources

    def winograd_form(self, level: int, c_in: int, c_out: int, split_rows: bool) -> WinogradForm | None:
        return None if level == 0 and split_rows else self._winograd_levels.get(level)

    def upsample_method(self, level: int, c_in: int, c_out: int) -> str:
        return "winograd" if level in self._upsample_winograd else "phases"

    def workspace_bytes(self, op: str, shape: OpShape) -> int:
        batch, rows, cols, item = shape.batch, shape.rows + 2 * shape.row_halo, shape.cols, self.dtype.itemsize
        wide = self._accumulator.itemsize
        frame = batch * rows * cols
        result = frame * shape.frames * shape.c_out * item
        if op == "norm_silu_pad":
            return 3 * frame * shape.c_in * wide
        if op == "attention":
            scores = batch * (rows * cols) ** 2
            return frame * shape.c_in * (3 * item + 3 * max(item, wide)) + 3 * scores * wide
        if op == "upsample_conv2x":
            if shape.upsample_method == "winograd":
                return self._upsample_winograd_bytes(shape)
            padded = batch * shape.frames * (rows + 2) * (cols + 2) * shape.c_in * item
            return padded + result + frame * shape.c_out * item
        if op == "output_head":
            taps = batch * shape.frames * (rows + 2) * (cols + 2) * HEAD_CHANNELS * item
            return 2 * taps + 5 * frame * OUT_CHANNELS * wide
        if op == "winograd_conv3d" and shape.winograd is not None:
            return self._winograd_bytes(shape, shape.winograd)
        if op in ("causal_conv3d", "time_double"):
            return result
        return 0

    def _winograd_bytes(self, shape: OpShape, form: WinogradForm) -> int:
        item, wide = self.dtype.itemsize, self._accumulator.itemsize
        columns, count = form.columns, winograd.components(form.columns)
        down, across = winograd.tiles(shape.rows, shape.cols, columns)
        frames, tiles = shape.frames + 2, shape.batch * down * across
        padded = shape.batch * frames * (winograd.TILE_ROWS * down + 2) * (columns * across + 2) * shape.c_in
        components = frames * tiles * count * shape.c_in
        windows = 3 * components // frames * shape.frames
        products = shape.frames * tiles * count * shape.c_out
        image = shape.frames * tiles * winograd.TILE_ROWS * columns * shape.c_out
        # Tiles that are not in the accumulator's type are converted, and live to the end.
        widened = components * wide if item < wide else 0
        transformed = 2 * components * wide
        # So are the operands of products that are to stay in it, for as long as they are multiplied.
        operands = (windows + 3 * count * shape.c_in * shape.c_out) * wide if form.float_products and item < wide else 0
        multiplied = (components + windows) * item + products * wide + max(operands, 3 * image * wide)
        # The matrices of both axes, and their product.
        return padded * item + widened + max(transformed, multiplied) + 2 * count**2 * wide

    def _upsample_winograd_bytes(self, shape: OpShape) -> int:
        item, wide = self.dtype.itemsize, self._accumulator.itemsize
        size, count = winograd.UPSAMPLE_TILE, winograd.UPSAMPLE_COMPONENTS
        images = shape.batch * shape.frames
        down = winograd.upsample_tile_rows(shape.rows, shape.row_halo)
        across = len(winograd.upsample_tiles(shape.cols))
        tiles = images * down * across
        haloed = images * (shape.rows + 4) * shape.cols * shape.c_in * item if shape.row_halo else 0
        padded = images * (size * down + 1) * (size * across + 1) * shape.c_in * item
        components, products = tiles * count * shape.c_in, 4 * tiles * count * shape.c_out
        # Tiles that are not in the accumulator's type are converted, and so are products.
        widened = components * wide if item < wide else 0
        transformed = padded + widened + 2 * components * wide
        multiplied = 2 * components * item + products * (item + (wide if item < wide else 0))
        image = tiles * size**2 * shape.c_out
        summed = products * wide + (products // 4 + 2 * image) * wide
        # The matrices of both axes, and their product.
        return max(haloed + padded, transformed, multiplied, summed) + 2 * count**2 * wide

    def free_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def reserve(self, nbytes: int) -> None:
        """Compares with the free memory; torch's allocator then finds room piece by piece."""
        free = self.free_bytes()
        if free is None and self.device.type == "cpu":
            free = _free_host_bytes()
        if free is not None and nbytes > free:
            raise OutOfMemoryError(
                f"{nbytes / 2**30:.2f} GiB are needed and {self.device} has {free / 2**30:.2f} GiB free"
            )

    def with_dtype(self, dtype: torch.dtype) -> TorchBackend:
        return TorchBackend(self.device, dtype, self._winograd_levels, self._upsample_winograd)

    # Inputs of causal convs

    def norm_silu_pad(
        self, x: Tensor, norm: Tensor, history: Tensor | None, halo: Halo | None, conv: Conv | WinogradConv | Head
    ) -> tuple[Padded, Tensor]:
        padded = self._padded(x, history, halo)
        _fill(padded, x, halo, lambda part: F.silu(self._rms_norm(part, norm)))
        return padded, padded.tensor[:, -2:].clone()

    def causal_pad(
        self, x: Tensor, history: Tensor | None, halo: Halo | None, conv: Conv | WinogradConv
    ) -> tuple[Padded, Tensor]:
        padded = self._padded(x, history, halo)
        _fill(padded, x, halo, lambda part: part)
        return padded, padded.tensor[:, -2:].clone()

    def _padded(self, x: Tensor, history: Tensor | None, halo: Halo | None) -> Padded:
        batch, frames, rows, cols, channels = x.shape
        rows += 2 if halo else 0
        tensor = x.new_empty(batch, 2 + frames, rows, cols, channels)
        if history is None:
            tensor[:, :2].zero_()
        else:
            tensor[:, :2] = history
        return Padded(tensor, halo is not None)

    def _rms_norm(self, x: Tensor, norm: Tensor) -> Tensor:
        """x / max(L2, 1e-12) * norm over the last axis, in the accumulator's type."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self._accumulator)
        return x / length.clamp_min(1e-12) * norm

    # Convolutions

    def causal_conv3d(self, x: Padded, conv: Conv, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y = self._conv3d(x.tensor, conv.weight, conv.bias, padding=(0, 0 if x.row_halo else 1, 1))
        return _finish(y, residual, out)

    def winograd_conv3d(
        self, x: Padded, conv: WinogradConv, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        down, across = winograd.tile_transforms(conv.form.columns)
        b_down, b_across, a_down, a_across = (
            matrix.to(self.device, self._accumulator)
            for matrix in (down.input, across.input, down.output, across.output)
        )
        frames = x.tensor.shape[1] - 2
        rows, cols = x.tensor.shape[2] - (2 if x.row_halo else 0), x.tensor.shape[3]
        columns = conv.form.columns
        below, right = -rows % winograd.TILE_ROWS, -cols % columns
        edge = 0 if x.row_halo else 1
        padded = F.pad(x.tensor, (0, 0, 1, 1 + right, edge, edge + below))
        tiles = padded.unfold(2, winograd.TILE_ROWS + 2, winograd.TILE_ROWS).unfold(3, columns + 2, columns)
        tiles = tiles.to(self._accumulator)
        components = torch.einsum("im,jn,btyxcmn->ijbtyxc", b_down, b_across, tiles).to(self.dtype)
        kept = self._accumulator if conv.form.float_products else self.dtype
        # One product per component over K = (tap, C), as the kernels accumulate it.
        windows = torch.cat([components[:, :, :, tap : tap + frames] for tap in range(3)], dim=-1).flatten(0, 1)
        products = windows.flatten(1, -2).to(kept) @ conv.weight.flatten(2).transpose(1, 2).to(kept)
        products = products.view(*components.shape[:2], *windows.shape[1:-1], -1).to(self._accumulator)
        y = torch.einsum("pi,qj,ijbtyxo->btypxqo", a_down, a_across, products)
        y = y.flatten(4, 5).flatten(2, 3)[:, :, :rows, :cols] + conv.bias
        return _finish(y.to(self.dtype), residual, out)

    def pointwise_conv(self, x: Tensor, conv: Pointwise) -> Tensor:
        return F.linear(x, conv.weight, None if conv.bias is None else conv.bias.to(x.dtype))

    def attention(self, x: Tensor, weights: Attention, nonfinite: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for frame in range(x.shape[1]):
            pixels = x[:, frame].flatten(1, 2)
            qkv = self.pointwise_conv(self._rms_norm(pixels, weights.norm).to(x.dtype), weights.qkv)
            _flag_nonfinite(qkv, nonfinite)
            q, k, v = qkv.unsqueeze(1).chunk(3, dim=-1)
            y = F.scaled_dot_product_attention(q, k, v).squeeze(1)
            out[:, frame] = (pixels + self.pointwise_conv(y, weights.proj)).view_as(out[:, frame])
        return out

    def time_double(self, x: Padded, conv: Conv, out: Tensor) -> None:
        y = self._conv3d(x.tensor, conv.weight, conv.bias, padding=(0, 0, 0))
        out.unflatten(1, (-1, 2)).copy_(y.unflatten(-1, (2, -1)).permute(0, 1, 4, 2, 3, 5))

    def upsample_conv2x(
        self, x: Tensor, up: UpsampleConv, shortcut: Tensor, skip_frames: int, halo: Halo | None
    ) -> Tensor:
        batch, frames, rows, cols, _ = x.shape
        out = x.new_empty(batch, frames, 2 * rows, 2 * cols, up.bias.shape[0])
        phases = self._winograd_phases(x, up, halo) if up.phases is None else self._direct_phases(x, up, halo)
        channel = _shortcut_channels(
            shortcut.shape[-1], out.shape[-1], skip_frames + frames, shortcut.shape[1], out.device
        )
        factor = channel.shape[0]
        for row, col, y in phases:
            target = out[:, :, row::2, col::2]
            target.copy_(y.view(batch, frames, rows, cols, -1))
            for frame in range(frames):
                source, phase = divmod(frame + skip_frames, factor)
                target[:, frame] += shortcut[:, source].index_select(-1, channel[phase, row, col])
        return out

    def _direct_phases(self, x: Tensor, up: UpsampleConv, halo: Halo | None) -> Iterator[tuple[int, int, Tensor]]:
        """Four 2x2 convs at the low resolution, one per output phase."""
        assert up.phases is not None
        rows, cols = x.shape[2:4]
        padded = F.pad(_with_halo(x, halo), (0, 0, 1, 1, 0, 0) if halo else (0, 0, 1, 1, 1, 1)).flatten(0, 1)
        for row in range(2):
            for col in range(2):
                window = padded[:, row : row + rows + 1, col : col + cols + 1]
                weight = up.phases[row, col].permute(0, 3, 1, 2)
                y = F.conv2d(window.permute(0, 3, 1, 2), weight, up.bias.to(padded.dtype))
                yield row, col, y.permute(0, 2, 3, 1)

    def _winograd_phases(self, x: Tensor, up: UpsampleConv, halo: Halo | None) -> Iterator[tuple[int, int, Tensor]]:
        """F(3x3, 2x2) with one transform of the input for all phases, on the tiles of the whole image."""
        assert up.components is not None
        size = winograd.UPSAMPLE_TILE
        matrices = winograd.upsample_transforms()
        b, a = (matrix.to(self.device, self._accumulator) for matrix in (matrices.input, matrices.output))
        (rows, cols), edge = x.shape[2:4], up.halo_rows if halo else 0
        first_row = halo.first_row if halo else 0
        down, across = winograd.upsample_tiles(rows, first_row), winograd.upsample_tiles(cols)
        # From the pixel before the first tile to the one behind the last; a rim that no tile reads is cut off.
        above, below = first_row - size * down.start + 1 - edge, size * down.stop - first_row - rows - edge
        padded = F.pad(_with_halo(x, halo), (0, 0, 1, size * len(across) - cols, above, below)).flatten(0, 1)
        tiles = padded.unfold(1, size + 1, size).unfold(2, size + 1, size).to(self._accumulator)
        components = torch.einsum("im,jn,tyxcmn->ijtyxc", b, b, tiles).to(self.dtype)
        del padded, tiles
        products = components.flatten(2, 4).flatten(0, 1) @ up.components.flatten(1, 3).transpose(1, 2)
        products = products.view(*components.shape[:-1], 2, 2, -1).to(self._accumulator)
        del components
        for row in range(2):
            for col in range(2):
                y = torch.einsum("pi,qj,ijtyxo->typxqo", a, a, products[..., row, col, :])
                # A tile's odd outputs belong to pixels one before those of its even ones.
                top = first_row - size * down.start + row
                y = y.flatten(3, 4).flatten(1, 2)[:, top : top + rows, col : col + cols] + up.bias
                yield row, col, y.to(self.dtype)

    def output_head(self, x: Padded, head: Head, out: Tensor, nonfinite: Tensor) -> None:
        taps = self._conv3d(x.tensor, head.weight, None, padding=(0, 0, 0))
        edge = 0 if x.row_halo else 1
        taps = F.pad(taps, (0, 0, 1, 1, edge, edge))
        rows, cols = out.shape[3] // 2, out.shape[4] // 2
        for frame in range(out.shape[2]):
            y = head.bias.to(self._accumulator)
            for tap in range(9):
                dy, dx = divmod(tap, 3)
                y = y + taps[:, frame, dy : dy + rows, dx : dx + cols, 12 * tap : 12 * tap + 12]
            _flag_nonfinite(y, nonfinite)
            pixels = y.clamp(-1, 1).unflatten(-1, (3, 2, 2)).permute(0, 3, 1, 5, 2, 4)
            target = out[:, :, frame].unflatten(-1, (cols, 2)).unflatten(-3, (rows, 2))
            if out.dtype == torch.uint8:
                pixels = ((pixels.float() / 2 + 0.5) * 255).nan_to_num(0.0)
            target.copy_(pixels)

    def _conv3d(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int, int]) -> Tensor:
        """A conv3d of channels-last operands, seen by torch as channels-first views; any strides may come back."""
        bias = None if bias is None else bias.to(x.dtype)
        y = F.conv3d(x.permute(0, 4, 1, 2, 3), weight.permute(0, 4, 1, 2, 3), bias, padding=padding)
        return y.permute(0, 2, 3, 4, 1)


def _fill(padded: Padded, x: Tensor, halo: Halo | None, transform: Callable[[Tensor], Tensor]) -> None:
    """Writes transform(x), and of the halo rows, behind the two history frames, one frame at a time."""
    for frame in range(x.shape[1]):
        target = padded.tensor[:, 2 + frame]
        if halo is None:
            target.copy_(transform(x[:, frame]))
        else:
            target[:, :1] = transform(halo.above[:, frame])
            target[:, 1:-1] = transform(x[:, frame])
            target[:, -1:] = transform(halo.below[:, frame])


def _finish(y: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """Adds the residual and hands the result over contiguous, in ``out`` if there is one."""
    if out is not None:
        return out.copy_(y) if residual is None else torch.add(y, residual, out=out)
    return y.contiguous() if residual is None else y.add_(residual).contiguous()


def _with_halo(x: Tensor, halo: Halo | None) -> Tensor:
    return x if halo is None else torch.cat([halo.above, x, halo.below], dim=2)


def _flag_nonfinite(x: Tensor, nonfinite: Tensor) -> None:
    """NaN and infinities survive in the extremes; unlike ``isfinite`` of every element these need no temporary."""
    nonfinite.logical_or_(~torch.isfinite(torch.stack(torch.aminmax(x))).all())


def _shortcut_channels(c_in: int, c_out: int, frames: int, frames_in: int, device: torch.device) -> Tensor:
    """[f, 2, 2, C_out]: DupUp3D's input channel for each (frame phase, row phase, column phase, output channel)."""
    factor = frames // frames_in
    index = torch.arange(c_out * factor * 4, device=device) // (c_out * factor * 4 // c_in)
    return index.view(c_out, factor, 2, 2).permute(1, 2, 3, 0)


def _free_host_bytes() -> int | None:
    """Memory that a process may still take without swapping, None where the system does not say (outside Linux)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why torch cannot run on the device, or None: these ops run wherever it does."""
    if device.type == "meta":
        return "tensors on the meta device hold no values to decode"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return f"torch cannot use the device {device}: {str(error).splitlines()[0]}"
    return None


def create(device: torch.device, dtype: torch.dtype) -> TorchBackend:
    """The reference backend for a device and a compute type."""
    return TorchBackend(device, dtype)
