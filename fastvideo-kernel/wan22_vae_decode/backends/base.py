# SPDX-License-Identifier: Apache-2.0
"""The ops that the decoder graph calls by name, and what every backend promises about them.

Layout. Activations are ``[B, T, H, W, C]``, contiguous, in the compute type. Latents arrive as ``[B, T, H, W, z]``;
the video leaves as ``[B, 3, F, 16 H, 16 W]``. Weights are the dataclasses of ``layers``. T, H, W and B may be any
number from 1.

Causality. A causal conv with three temporal taps sees two earlier frames. They come from ``history``, which the op
that builds the conv's input also returns anew; None stands for two frames of zeros (the start of the video). A
history is the backend's own object: the graph keeps it under the layer's name and never looks inside. It must not
share memory with the conv input, whose memory it would keep alive.

Row halos. With several ranks each holds a band of rows. ``halo`` then carries one raw (not normalised) row of each
neighbour (``UpsampleConv.halo_rows`` for an upsampling conv), zeros at the edges of the image; None means that the band
is the whole image and the conv pads with zeros itself. A zero vector stays zero through norm and SiLU, so edges need no
further care.

Conv inputs. ``norm_silu_pad`` and ``causal_pad`` return an opaque conv input that only the conv of the same backend
reads, immediately afterwards. The reference form is a tensor ``[B, 2 + T, H + 2, W, C]`` (``H`` rows without a
halo); a backend may instead return transformed components, or a deferred description, where that saves a pass over
memory.

Streams. Ops enqueue on the current stream of their tensors' device and never wait for the host. ``reserve`` is
called before a pass with the bytes that ``memory`` predicts; a pass must be able to run without new memory from
the driver.

Errors. Ops raise on misuse (wrong channel counts) only in ways that are bugs of the caller; all checks of user
input happen before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

ConvInput = Any
History = Any


class Halo(NamedTuple):
    """The rows next to a band: ``above`` and ``below``, each [B, T, rows, W, C] contiguous, in the image's order, zeros
    at its edge. ``first_row`` is the band's first row in the image, where an op depends on it.
    """

    above: Tensor
    below: Tensor
    first_row: int = 0


@dataclass(frozen=True)
class OpShape:
    """Sizes of one op, for the memory prediction: ``frames`` without history, ``rows`` without halo, the form of a
    ``winograd`` conv, ``upsample_method`` of an upsampling conv.
    """

    batch: int
    frames: int
    rows: int
    cols: int
    c_in: int
    c_out: int
    row_halo: bool
    winograd: WinogradForm | None = None
    upsample_method: str = "phases"


class Backend(ABC):
    """One implementation of the decoder's ops, bound to a device and a compute type.

    Attributes:
        name: what ``Decoder(backend=...)`` calls it.
        device: where its tensors live.
        dtype: the type of activations and weights.
    """

    name: str
    device: torch.device
    dtype: torch.dtype

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    # Choices and resources

    def winograd_form(self, level: int, c_in: int, c_out: int, split_rows: bool) -> WinogradForm | None:
        """The Winograd form of a level's 3x3x3 convs (level 0 is the latents' resolution); None: direct convs.

        With ``split_rows`` the decoder runs on row bands, whose edges are multiples of four rows only from level 1
        on (with at least two latent rows a rank): Winograd at level 0 would place its tiles differently from one
        device.
        """
        return None

    def upsample_method(self, level: int, c_in: int, c_out: int) -> str:
        """``"phases"`` or ``"winograd"`` (see ``UpsampleConv``) for the upsampler that leaves ``level``.

        Not ``"winograd"`` at level 0 of a decoder on row bands: a band may have one row there, and its neighbours need
        two.
        """
        return "phases"

    def adopt(self, weights: DecoderWeights) -> DecoderWeights:
        """Called once with the prepared weights; may return them repacked (padded channels, blocked layouts)."""
        return weights

    def input_bytes(self, shape: OpShape) -> int:
        """Bytes that the conv input of a 3x3x3 causal conv holds, by default the padded tensor."""
        rows = shape.rows + 2 * shape.row_halo
        return shape.batch * (shape.frames + 2) * rows * shape.cols * shape.c_in * self.dtype.itemsize

    def input_holds_x(self, shape: OpShape) -> bool:
        """Whether that conv input refers to the op's ``x``, which then lives (and may not change) until the conv."""
        return False

    def with_dtype(self, dtype: torch.dtype) -> Backend:
        """The same backend in another compute type, for the passes that fp16 cannot hold."""
        return type(self)(self.device, dtype)

    @abstractmethod
    def workspace_bytes(self, op: str, shape: OpShape) -> int:
        """The most temporary bytes that ``op`` (a method's name) holds beside its arguments and its result.

        A conv that is given ``out`` counts like one that is not.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Memory that a pass could still obtain, in bytes; None where that cannot be known."""

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Makes sure that a pass can draw ``nbytes`` without asking the driver; raises ``OutOfMemoryError`` if not."""

    def nonfinite_flag(self) -> Tensor:
        """A zeroed int32 tensor [1]; ops set it to 1 when they meet NaN or infinity; it is read once a pass."""
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def history_bytes(self, shape: OpShape) -> int:
        """Bytes of the history that a 3x3x3 conv (or a time conv, without halo) leaves behind."""
        rows = shape.rows + 2 * shape.row_halo
        return shape.batch * 2 * rows * shape.cols * shape.c_in * self.dtype.itemsize

    # Inputs of causal convs

    @abstractmethod
    def norm_silu_pad(
        self, x: Tensor, norm: Tensor, history: History | None, halo: Halo | None, conv: Conv | WinogradConv | Head
    ) -> tuple[ConvInput, History]:
        """RMS norm, SiLU and causal padding in one pass.

        Args:
            x: [B, T, H, W, C].
            norm: [C] float32, gamma * sqrt(C). The norm is x / max(L2 norm over C, 1e-12) * norm with statistics in
                fp32.
            history: what the previous call of this layer returned, or None at the start of the video.
            halo: the neighbours' raw rows, or None.
            conv: the weights that will read the result, so that a backend can prepare exactly what they need.

        Returns:
            The conv input, and the next history (its last two frames, halo rows included, in memory of their own).
        """

    @abstractmethod
    def causal_pad(
        self, x: Tensor, history: History | None, halo: Halo | None, conv: Conv | WinogradConv
    ) -> tuple[ConvInput, History]:
        """As ``norm_silu_pad``, for inputs that are not normalised: conv_in's and the time convs' (without halo)."""

    # Convolutions

    @abstractmethod
    def causal_conv3d(
        self, x: ConvInput, conv: Conv, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """3x3x3 convolution of a conv input, plus bias, plus ``residual`` [B, T, H, W, C_out] if given.

        Columns are padded with zeros by one; rows too unless the input has halo rows. fp32 accumulation, rounded once.
        ``out``, if given, receives the result; it may be ``residual`` itself.

        Returns:
            [B, T, H, W, C_out].
        """

    @abstractmethod
    def winograd_conv3d(
        self, x: ConvInput, conv: WinogradConv, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The same convolution as F(4x4, 3x3) over rows and columns; tiles start at the band's first row and column."""

    @abstractmethod
    def pointwise_conv(self, x: Tensor, conv: Pointwise) -> Tensor:
        """1x1x1 convolution: [B, T, H, W, C_in] -> [B, T, H, W, C_out], with bias if the layer has one."""

    @abstractmethod
    def attention(self, x: Tensor, weights: Attention, nonfinite: Tensor) -> Tensor:
        """x + proj(attention(qkv(RMS norm of x))) over the H * W pixels of each frame, one head of C channels.

        Softmax hides an infinity in its input, so non-finite q, k or v set ``nonfinite``.
        """

    @abstractmethod
    def time_double(self, x: ConvInput, conv: Conv, out: Tensor) -> None:
        """3x1x1 causal conv to 2C whose two halves become consecutive frames.

        Args:
            x: conv input made by ``causal_pad`` from [B, T, H, W, C].
            conv: weight [2C, 3, 1, 1, C]; the first C outputs are the earlier frame.
            out: [B, 2T, H, W, C], contiguous within a batch item (it may be a slice of a longer tensor's frames).
        """

    @abstractmethod
    def upsample_conv2x(
        self, x: Tensor, up: UpsampleConv, shortcut: Tensor, skip_frames: int, halo: Halo | None
    ) -> Tensor:
        """Nearest x2 in rows and columns, 3x3 conv, bias, plus the DupUp3D shortcut, written once.

        Args:
            x: [B, F, H, W, C_in].
            up: the conv's weights, C_out outputs.
            shortcut: [B, T, H, W, C_s], the up block's input; F = f * T - skip_frames with f = 1 or 2.
            skip_frames: leading frames that the shortcut's enlargement drops (f - 1 in the pass with the video's
                first frame).
            halo: the neighbours' rows of ``x``, ``up.halo_rows`` each, and the band's first row; or None. Tiles lie as
                on the whole image, so that the result does not depend on the bands.

        Returns:
            [B, F, 2H, 2W, C_out], whose pixel (frame j, row 2y + r, column 2x + c, channel o) adds shortcut channel
            (o * 4f + 4t + 2r + c) // (C_out * 4f // C_s) of frame (j + skip_frames) // f, where
            t = (j + skip_frames) % f.
        """

    @abstractmethod
    def output_head(self, x: ConvInput, head: Head, out: Tensor, nonfinite: Tensor) -> None:
        """conv_out, finiteness test, clamp to [-1, 1], un-patchify, straight into the video.

        Args:
            x: conv input made by ``norm_silu_pad`` from [B, T, H, W, C].
            head: a 3x1x1 conv to 112 channels, whose first 108 are summed by a 3x3 stencil into 12; then the bias.
            out: [B, 3, T, 2H, 2W], a view of the video of any strides whose columns are adjacent; float64, float32,
                float16, bfloat16 or uint8. Channel c, row 2y + q, column 2x + r is conv channel 4c + 2r + q. uint8
                is (v / 2 + 0.5) * 255 in float32, truncated (FastVideo's rule); NaN becomes 0.
            nonfinite: set to 1 if any value before the clamp is NaN or infinite.
        """

    # Data movement between ranks

    def edge_rows(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The first and the last ``rows`` rows of [B, T, H, W, C], each packed as [B, T, rows, W, C]: the neighbours'
        halos.
        """
        return x[:, :, :rows].contiguous(), x[:, :, -rows:].contiguous()

    def split_rows(self, x: Tensor, bands: Sequence[tuple[int, int]]) -> Tensor:
        """[B, T, H, W, C] as one flat tensor of consecutive row bands, the send buffer of the prefix transpose."""
        return torch.cat([x[:, :, start:stop].reshape(-1) for start, stop in bands])

    def join_frames(
        self, flat: Tensor, frames: Sequence[int], batch: int, rows: int, cols: int, channels: int
    ) -> Tensor:
        """The inverse on the receiving side: pieces of ``frames[i]`` frames each -> [B, sum(frames), rows, cols, C]."""
        sizes = [batch * n * rows * cols * channels for n in frames]
        pieces = [
            piece.view(batch, n, rows, cols, channels) for piece, n in zip(flat.split(sizes), frames, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
