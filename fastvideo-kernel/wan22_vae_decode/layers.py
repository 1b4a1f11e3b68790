# SPDX-License-Identifier: Apache-2.0
"""Prepared weights, one dataclass a kind of layer, in the layouts that every backend's ops take.

Channels are innermost everywhere. Weights have the decoder's compute type; gammas and biases are float32 (float64 in a
float64 decoder), because they enter fp32 accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

UPSAMPLE_HALO_ROWS = {"phases": 1, "winograd": 2}
"""Form of an upsampling conv -> rows that a band needs from each neighbour. Outputs depend on one row; the tiles across
a band's edge make them from two, with the same rounding on both sides."""


@dataclass(frozen=True)
class Conv:
    """A direct convolution: ``weight`` [C_out, kt, kh, kw, C_in] and ``bias`` [C_out]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class WinogradForm:
    """How a 3x3x3 convolution runs as F(4 x ``columns``, 3x3): tiles have four rows and ``columns`` (3 or 4) columns.

    ``float_products``: the components' products stay in the accumulators' type until the output transform, which takes
    twice the bytes and saves one of three roundings; otherwise they are rounded to the compute type.
    """

    columns: int
    float_products: bool = False


@dataclass(frozen=True)
class WinogradConv:
    """A 3x3x3 convolution in a Winograd ``form``: ``weight`` [components, C_out, 3, C_in], ``bias`` [C_out].

    Component i * (form.columns + 2) + j belongs to row i of the vertical and row j of the horizontal transform; the
    third axis is the temporal tap, oldest first, so that a component's GEMM runs over K = 3 * C_in.
    """

    weight: Tensor
    bias: Tensor
    form: WinogradForm


@dataclass(frozen=True)
class Pointwise:
    """A 1x1x1 convolution: ``weight`` [C_out, C_in] and ``bias`` [C_out], or None where another layer adds it."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Resnet:
    """RMS norm, SiLU, conv, twice, plus the input (or its 1x1x1 shortcut, whose bias ``conv2`` already carries).

    ``norm1`` and ``norm2`` are gamma * sqrt(C), so that a norm is x / max(L2, 1e-12) * norm.
    """

    norm1: Tensor
    conv1: Conv | WinogradConv
    norm2: Tensor
    conv2: Conv | WinogradConv
    shortcut: Pointwise | None


@dataclass(frozen=True)
class Attention:
    """Single-head attention over the pixels of one frame: ``norm`` [C], ``qkv`` to 3C (q, k, v in order), ``proj``."""

    norm: Tensor
    qkv: Pointwise
    proj: Pointwise


@dataclass(frozen=True)
class UpsampleConv:
    """Nearest x2 followed by a 3x3 convolution, without ever forming the enlarged image.

    Exactly one form is present. ``phases`` [2, 2, C_out, 2, 2, C_in]: output phase (row, column), then the 2x2 taps
    that fall on distinct source pixels. ``components`` [16, 2, 2, C_out, C_in]: the phases' taps in F(3x3, 2x2) form,
    component 4 * i + j of row i of the vertical and row j of the horizontal transform. ``bias`` [C_out].
    """

    phases: Tensor | None
    components: Tensor | None
    bias: Tensor

    @property
    def halo_rows(self) -> int:
        """Rows that a band needs from each neighbour."""
        return UPSAMPLE_HALO_ROWS["phases" if self.components is None else "winograd"]


@dataclass(frozen=True)
class Upsampler:
    """What follows an up block's resnets: the optional time doubling (a 3x1x1 conv to 2C), then ``spatial``."""

    time: Conv | None
    spatial: UpsampleConv


@dataclass(frozen=True)
class UpBlock:
    resnets: tuple[Resnet, ...]
    upsampler: Upsampler | None


@dataclass(frozen=True)
class Head:
    """norm_out and conv_out. ``weight`` [112, 3, 1, 1, C]: the 3x3 taps of the 12 outputs as channels of a temporal
    conv.

    Channel 12 * (3 * dy + dx) + o holds tap (dy, dx) of output channel o; the last four are zero padding.
    ``bias`` [12].
    """

    norm: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """The whole decoder, in the order of the architecture."""

    post_quant_conv: Pointwise
    conv_in: Conv
    mid_resnets: tuple[Resnet, Resnet]
    mid_attention: Attention
    up_blocks: tuple[UpBlock, ...]
    head: Head
