# SPDX-License-Identifier: Apache-2.0
"""The Wan2.2 decoder as a graph over named ops, in the order of its architecture table.

    stage              channels      resolution   frames per latent frame
    post_quant_conv    z    -> z     1            1
    conv_in            z    -> 4c    1            1
    mid block          4c            1            1      resnet 0, attention, resnet 1
    up block 0         4c   -> 4c    1            1      3 resnets, time x2, space x2, + DupUp3D shortcut
    up block 1         4c   -> 4c    2            2      the same
    up block 2         4c   -> 2c    4            4      3 resnets, space x2, + DupUp3D shortcut
    up block 3         2c   -> c     8            4      3 resnets
    head               c    -> 12    8            4      norm, SiLU, conv_out, clamp, un-patchify

A pass takes any number of latent frames. What a causal conv must remember of a pass is in ``History`` under the
layer's name, so the video does not depend on where passes begin. The video's first frame bypasses the time convs,
whose own history begins with the second frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from wan22_vae_decode import layers
from wan22_vae_decode.backends import base
from wan22_vae_decode.geometry import UpBlockShape, video_frames


class History:
    """The last two inputs of every causal conv, by layer name: all that a pass leaves to the next."""

    prune = 0
    """Leading frames to drop after each conv: none, because the history makes all of them valid."""

    def __init__(self) -> None:
        self._layers: dict[str, base.History] = {}

    def take(self, layer: str) -> base.History | None:
        return self._layers.get(layer)

    def keep(self, layer: str, history: base.History) -> None:
        self._layers[layer] = history


class Window:
    """No history: the input brings its own context, and each conv costs its first two frames.

    Args:
        whole: the window begins with the clip, so that zeros are the true history and nothing is lost.
    """

    def __init__(self, whole: bool) -> None:
        self.prune = 0 if whole else 2

    def take(self, layer: str) -> None:
        return None

    def keep(self, layer: str, history: base.History) -> None:
        pass


class RowExchange(Protocol):
    """Fetches the neighbouring rows of a band; implemented by ``parallel``."""

    def halo(self, ops: base.Backend, x: Tensor, layer: str, rows: int) -> base.Halo: ...


class Stream:
    """The residual stream. Layers replace ``value`` in place, so that no caller's variable keeps a dead tensor
    alive.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Graph:
    """One decoder: ops, prepared weights, and the neighbours if the rows are split.

    Args:
        ops: the backend.
        weights: what ``weights.prepare`` made for it.
        blocks: the shapes of the up blocks.
        neighbours: exchanges halo rows; None where the rows are whole.
        first_row: of the band, in latents.
    """

    def __init__(
        self,
        ops: base.Backend,
        weights: layers.DecoderWeights,
        blocks: tuple[UpBlockShape, ...],
        neighbours: RowExchange | None = None,
        first_row: int = 0,
    ) -> None:
        self.ops = ops
        self.weights = weights
        self.blocks = blocks
        self.neighbours = neighbours
        self.first_row = first_row

    # The two halves of a pass. Between them, ranks turn frames into row bands.

    def prefix(self, latents: Tensor, history: History | Window, nonfinite: Tensor) -> Tensor:
        """post_quant_conv to the mid block's attention: [B, T, H, W, z] -> [B, T', H, W, 4c] on whole frames.

        T' is T, or T - 6 for a window that does not begin with the clip.
        """
        with record_function("wan.post_quant_conv"):
            x = self.ops.pointwise_conv(latents, self.weights.post_quant_conv)
        with record_function("wan.conv_in"):
            conv = self.weights.conv_in
            padded, kept = self.ops.causal_pad(x, history.take("conv_in"), None, conv)
            history.keep("conv_in", kept)
            stream = Stream(self._pruned(self.ops.causal_conv3d(padded, conv), history))
            del x, padded
        self._resnet("mid_block.resnets.0", self.weights.mid_resnets[0], stream, history, whole_rows=True)
        with record_function("wan.mid_block.attention"):
            return self.ops.attention(stream.value, self.weights.mid_attention, nonfinite)

    def tail(
        self, x: Tensor, history: History, first: bool, out: Tensor, nonfinite: Tensor, frames_per_slab: int
    ) -> None:
        """The mid block's resnet 1, the up blocks and the head, on whole rows or a band of them.

        Args:
            x: [B, T, H, W, 4c].
            history: of this pass.
            first: the pass begins with the video's first frame.
            out: [B, 3, F, 16H, 16W], where the pass's pixels go.
            nonfinite: the flag that the head sets.
            frames_per_slab: latent frames that go through up blocks 2 and 3 and the head at a time. One frame fills
                a GPU there, while the lower levels want several; the result does not depend on it.
        """
        frames = x.shape[1]
        stream = Stream(x)
        del x
        self._resnet("mid_block.resnets.1", self.weights.mid_resnets[1], stream, history)
        self._up_block(0, stream, history, first)
        self._up_block(1, stream, history, first)
        for slab, pixels, is_first in _slabs(stream, out, frames, first, frames_per_slab):
            self._up_block(2, slab, history, is_first)
            self._up_block(3, slab, history, is_first)
            self._head(slab, history, pixels, nonfinite)

    # The layers

    def _up_block(self, index: int, stream: Stream, history: History, first: bool) -> None:
        """Three resnets, then the doublings in time and space, onto which DupUp3D adds the block's input."""
        name, shape, block = f"up_blocks.{index}", self.blocks[index], self.weights.up_blocks[index]
        block_input = stream.value if block.upsampler else None
        for number, resnet in enumerate(block.resnets):
            self._resnet(f"{name}.resnets.{number}", resnet, stream, history, preserve=block_input)
        if block.upsampler is None or block_input is None:
            return
        if block.upsampler.time is not None:
            with record_function(f"wan.{name}.time_double"):
                self._double_time(f"{name}.time_conv", block.upsampler.time, stream, history, first)
        with record_function(f"wan.{name}.upsample"):
            surplus = 1 if first and shape.doubles_time else 0
            conv = block.upsampler.spatial
            halo = self._halo(stream.value, f"{name}.upsample", conv.halo_rows)
            if halo is not None:
                halo = halo._replace(first_row=self.first_row << shape.level)
            stream.value = self.ops.upsample_conv2x(stream.value, conv, block_input, surplus, halo)

    def _resnet(
        self,
        name: str,
        resnet: layers.Resnet,
        stream: Stream,
        history: History | Window,
        preserve: Tensor | None = None,
        whole_rows: bool = False,
    ) -> None:
        """Norm, SiLU, conv, twice, plus the input or its 1x1x1 shortcut.

        ``preserve`` is a tensor that somebody reads later; any other residual is overwritten by the sum.
        """
        with record_function(f"wan.{name}"):
            skip = stream.value
            h = self._norm_silu_pad(f"{name}.conv1", skip, resnet.norm1, resnet.conv1, history, whole_rows)
            if resnet.shortcut is not None:
                stream.value = skip = self.ops.pointwise_conv(skip, resnet.shortcut)
            h = self._pruned(self._conv3d(h, resnet.conv1), history)
            h = self._norm_silu_pad(f"{name}.conv2", h, resnet.norm2, resnet.conv2, history, whole_rows)
            skip = self._pruned(skip, history)
            h = self._conv3d(h, resnet.conv2, residual=skip, out=None if skip is preserve else skip)
            stream.value = self._pruned(h, history)

    def _double_time(self, name: str, conv: layers.Conv, stream: Stream, history: History, first: bool) -> None:
        """Every frame becomes two, except the video's first, which stays as it is."""
        x = stream.value
        single = 1 if first else 0
        batch, frames, *rest = x.shape
        out = x.new_empty(batch, 2 * frames - single, *rest)
        out[:, :single] = x[:, :single]
        if frames > single:
            padded, kept = self.ops.causal_pad(x[:, single:].contiguous(), history.take(name), None, conv)
            history.keep(name, kept)
            stream.value = out
            del x
            self.ops.time_double(padded, conv, out[:, single:])
        stream.value = out

    def _head(self, stream: Stream, history: History, out: Tensor, nonfinite: Tensor) -> None:
        """norm_out, SiLU, conv_out, clamp, un-patchify."""
        with record_function("wan.head"):
            head = self.weights.head
            padded = self._norm_silu_pad("head", stream.value, head.norm, head, history)
            self.ops.output_head(padded, head, out, nonfinite)

    # Their parts

    def _norm_silu_pad(
        self,
        name: str,
        x: Tensor,
        norm: Tensor,
        conv: layers.Conv | layers.WinogradConv | layers.Head,
        history: History | Window,
        whole_rows: bool = False,
    ) -> base.ConvInput:
        halo = None if whole_rows else self._halo(x, name)
        padded, kept = self.ops.norm_silu_pad(x, norm, history.take(name), halo, conv)
        history.keep(name, kept)
        return padded

    def _conv3d(
        self,
        x: base.ConvInput,
        conv: layers.Conv | layers.WinogradConv,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(conv, layers.WinogradConv):
            return self.ops.winograd_conv3d(x, conv, residual, out)
        return self.ops.causal_conv3d(x, conv, residual, out)

    def _halo(self, x: Tensor, layer: str, rows: int = 1) -> base.Halo | None:
        return None if self.neighbours is None else self.neighbours.halo(self.ops, x, layer, rows)

    def _pruned(self, x: Tensor, history: History | Window) -> Tensor:
        return x[:, history.prune :].contiguous() if history.prune else x


def _slabs(
    stream: Stream, out: Tensor, frames: int, first: bool, frames_per_slab: int
) -> Iterator[tuple[Stream, Tensor, bool]]:
    """Cuts a pass's features and pixels after up block 1 into slabs of latent frames."""
    if frames_per_slab >= frames:
        # The stream itself, so that nothing here keeps its first value alive.
        yield stream, out, first
        return
    offset = 0 if first else 1
    origin = video_frames(offset, offset + frames)[0]
    cuts = []
    for start in range(0, frames, frames_per_slab):
        stop = min(start + frames_per_slab, frames)
        cuts.append(tuple(frame - origin for frame in video_frames(offset + start, offset + stop)))
    # Copies, so that a slab's part is free once it has been read, before the slab is largest.
    parts = [stream.value[:, begin:end].clone(memory_format=torch.contiguous_format) for begin, end in cuts]
    stream.value = parts[0].new_empty(0)
    for index, (begin, end) in enumerate(cuts):
        yield Stream(parts.pop(0)), out[:, :, begin:end], first and index == 0


def channels_last(latents: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, z, T, H, W] of any strides -> [B, T, H, W, z], contiguous, in the compute type."""
    return latents.permute(0, 2, 3, 4, 1).to(dtype).contiguous()
