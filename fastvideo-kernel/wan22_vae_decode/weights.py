# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's tensors to prepared weights: a strict check by name, then every rewrite, in float64.

FastVideo's and diffusers' ``AutoencoderKLWan`` name the decoder's 110 tensors alike: ``post_quant_conv.*`` and
``decoder.*``. All else in a state dict (encoder, quant_conv) is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wan22_vae_decode import winograd
from wan22_vae_decode.errors import WeightsError, listed
from wan22_vae_decode.geometry import OUT_CHANNELS, RESNETS, Architecture
from wan22_vae_decode.layers import (
    Attention,
    Conv,
    DecoderWeights,
    Head,
    Pointwise,
    Resnet,
    UpBlock,
    UpsampleConv,
    Upsampler,
    WinogradConv,
    WinogradForm,
)

if TYPE_CHECKING:
    from wan22_vae_decode.backends.base import Backend

HEAD_CHANNELS = 112
"""The head's 9 * 12 tap channels, padded to a multiple of 16."""

_PART_CHANNELS = 128
"""Output channels of an upsampling conv whose weights are transformed at a time."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def decoder_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder's part of a state dict, in its order, detached but not copied.

    Raises:
        WeightsError: it is no mapping, or one of the decoder's values is no tensor.
    """
    if not isinstance(state_dict, Mapping):
        raise WeightsError(f"a state dict must map names to tensors, not be a {type(state_dict).__name__}")
    own = {
        name: tensor
        for name, tensor in state_dict.items()
        if isinstance(name, str) and name.startswith(("post_quant_conv.", "decoder."))
    }
    others = [f"{name} ({type(value).__name__})" for name, value in own.items() if not isinstance(value, Tensor)]
    if others:
        raise WeightsError(f"a state dict must map names to tensors, but these are none: {listed(others)}")
    return {name: detached(tensor) for name, tensor in own.items()}


def detached(tensor: Tensor) -> Tensor:
    """The tensor without its gradients, also a parameter that was made in inference mode and moved or retyped outside:
    it has no version counter, which every view of it would share.
    """
    if tensor.is_inference() or version(tensor) >= 0:
        return tensor.detach()
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    memory = tensor.untyped_storage()
    return other.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder and its shape, in state-dict order."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, c_out: int, c_in: int, *kernel: int) -> None:
        shapes[f"{name}.weight"] = (c_out, c_in, *kernel)
        shapes[f"{name}.bias"] = (c_out,)

    def resnet(name: str, c_in: int, c_out: int) -> None:
        shapes[f"{name}.norm1.gamma"] = (c_in, 1, 1, 1)
        conv(f"{name}.conv1", c_out, c_in, 3, 3, 3)
        shapes[f"{name}.norm2.gamma"] = (c_out, 1, 1, 1)
        conv(f"{name}.conv2", c_out, c_out, 3, 3, 3)
        if c_in != c_out:
            conv(f"{name}.conv_shortcut", c_out, c_in, 1, 1, 1)

    c = arch.inner
    conv("post_quant_conv", arch.latent, arch.latent, 1, 1, 1)
    conv("decoder.conv_in", c, arch.latent, 3, 3, 3)
    shapes["decoder.mid_block.attentions.0.norm.gamma"] = (c, 1, 1)
    conv("decoder.mid_block.attentions.0.to_qkv", 3 * c, c, 1, 1)
    conv("decoder.mid_block.attentions.0.proj", c, c, 1, 1)
    for index in range(2):
        resnet(f"decoder.mid_block.resnets.{index}", c, c)
    for index, block in enumerate(arch.up_blocks):
        name = f"decoder.up_blocks.{index}"
        for number in range(RESNETS):
            resnet(f"{name}.resnets.{number}", block.c_in if number == 0 else block.c_out, block.c_out)
        if block.doubles_space:
            conv(f"{name}.upsampler.resample.1", block.c_out, block.c_out, 3, 3)
        if block.doubles_time:
            conv(f"{name}.upsampler.time_conv", 2 * block.c_out, block.c_out, 3, 1, 1)
    shapes["decoder.norm_out.gamma"] = (arch.base, 1, 1, 1)
    conv("decoder.conv_out", OUT_CHANNELS, arch.base, 3, 3, 3)
    return shapes


def check(tensors: Mapping[str, Tensor]) -> Architecture:
    """Finds the widths of a decoder's tensors and checks every name, shape and type.

    Raises:
        WeightsError: one sentence with the first few that are missing, unexpected, misshapen or of a wrong type.
    """
    if any(".upsamplers." in name for name in tensors):
        raise WeightsError("these are the weights of the Wan2.1 VAE, this decoder is for the Wan2.2 (TI2V-5B) VAE")
    arch = _architecture(tensors)
    expected = expected_shapes(arch)
    problems = []
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected]
    if missing:
        problems.append(f"missing: {listed(missing)}")
    if extra:
        problems.append(f"unexpected: {listed(extra)}")
    shared = [(name, tensors[name], shape) for name, shape in expected.items() if name in tensors]
    misshapen = [f"{name} {list(t.shape)} instead of {list(shape)}" for name, t, shape in shared if t.shape != shape]
    if misshapen:
        problems.append(f"wrong shapes: {listed(misshapen)}")
    mistyped = [f"{name} ({t.dtype})" for name, t, _ in shared if t.dtype not in _FLOATS]
    if mistyped:
        problems.append(f"not floating-point: {listed(mistyped)}")
    sparse = [f"{name} ({t.layout})" for name, t, _ in shared if t.layout != torch.strided]
    if sparse:
        problems.append(f"not dense: {listed(sparse)}")
    unplaced = [name for name, t, _ in shared if t.device.type == "meta"]
    if unplaced:
        problems.append(f"without data (meta device): {listed(unplaced)}")
    if problems:
        raise WeightsError(f"not a Wan2.2 decoder of base width {arch.base}: {'; '.join(problems)}")
    return arch


@torch.no_grad()
def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Looks for values in checked tensors, wherever they lie, that are not finite in float32, as biases are in every
    fast decoder: one reduction each, one wait at the end.

    Raises:
        WeightsError: names the first tensor that holds any.
    """
    # NaN passes through both extremes.
    extremes = [torch.stack(torch.aminmax(tensor)).float() for tensor in tensors.values()]
    finite = torch.stack([pair.to(extremes[0].device) for pair in extremes]).isfinite().all(1).tolist()
    spoilt = [name for name, whole in zip(tensors, finite, strict=True) if not whole]
    if spoilt:
        where = f"{spoilt[0]} and {len(spoilt) - 1} other tensors" if len(spoilt) > 1 else spoilt[0]
        raise WeightsError(f"the weights hold NaN or values beyond float32, in {where}; load or copy them again")


def fingerprint(tensors: Mapping[str, Tensor]) -> tuple:
    """A cheap value that changes when a tensor is replaced, moved, retyped or written in place (``_version``)."""
    return tuple((name, t.data_ptr(), version(t), t.dtype, t.device, tuple(t.shape)) for name, t in tensors.items())


def version(tensor: Tensor) -> int:
    """How often a tensor was written in place, or -1 if inference mode left it without a counter."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def prepare(
    tensors: Mapping[str, Tensor], arch: Architecture, backend: Backend, split_rows: bool = False
) -> DecoderWeights:
    """Rewrites checked tensors into the layouts of ``layers``, on the backend's device and in its type.

    Each layer is prepared in float64 on the device and rounded once; the largest float64 copy is one layer's.
    """
    return backend.adopt(_Preparation(tensors, arch, backend, split_rows).decoder())


class _Preparation:
    """The rewrites, one method a kind of layer."""

    def __init__(self, tensors: Mapping[str, Tensor], arch: Architecture, backend: Backend, split_rows: bool) -> None:
        self.tensors = tensors
        self.arch = arch
        self.backend = backend
        self.split_rows = split_rows

    def decoder(self) -> DecoderWeights:
        c = self.arch.inner
        return DecoderWeights(
            post_quant_conv=self.pointwise("post_quant_conv"),
            conv_in=self.conv("decoder.conv_in"),
            mid_resnets=(
                self.resnet("decoder.mid_block.resnets.0", 0, c, c),
                self.resnet("decoder.mid_block.resnets.1", 0, c, c),
            ),
            mid_attention=self.attention("decoder.mid_block.attentions.0"),
            up_blocks=tuple(self.up_block(index) for index in range(len(self.arch.up_blocks))),
            head=self.head(),
        )

    def up_block(self, index: int) -> UpBlock:
        block = self.arch.up_blocks[index]
        name = f"decoder.up_blocks.{index}"
        widths = [block.c_in] + [block.c_out] * RESNETS
        resnets = tuple(
            self.resnet(f"{name}.resnets.{number}", block.level, widths[number], widths[number + 1])
            for number in range(RESNETS)
        )
        if not block.doubles_space:
            return UpBlock(resnets, None)
        time = self.conv(f"{name}.upsampler.time_conv") if block.doubles_time else None
        method = self.backend.upsample_method(block.level, block.c_out, block.c_out)
        spatial = self.upsample(f"{name}.upsampler.resample.1", method)
        return UpBlock(resnets, Upsampler(time, spatial))

    def resnet(self, name: str, level: int, c_in: int, c_out: int) -> Resnet:
        form1 = self.backend.winograd_form(level, c_in, c_out, self.split_rows)
        form2 = self.backend.winograd_form(level, c_out, c_out, self.split_rows)
        shortcut, shortcut_bias = None, None
        if c_in != c_out:
            shortcut = Pointwise(self.typed(self.wide(f"{name}.conv_shortcut.weight").flatten(1)), None)
            shortcut_bias = self.wide(f"{name}.conv_shortcut.bias")
        return Resnet(
            norm1=self.norm(f"{name}.norm1.gamma"),
            conv1=self.conv3d(f"{name}.conv1", form1),
            norm2=self.norm(f"{name}.norm2.gamma"),
            conv2=self.conv3d(f"{name}.conv2", form2, extra_bias=shortcut_bias),
            shortcut=shortcut,
        )

    def attention(self, name: str) -> Attention:
        return Attention(
            norm=self.norm(f"{name}.norm.gamma"),
            qkv=self.pointwise(f"{name}.to_qkv"),
            proj=self.pointwise(f"{name}.proj"),
        )

    def head(self) -> Head:
        weight = head_weight(self.wide("decoder.conv_out.weight"))
        bias = self.exact(self.wide("decoder.conv_out.bias"))
        return Head(self.norm("decoder.norm_out.gamma"), self.typed(weight), bias)

    def conv(self, name: str) -> Conv:
        weight = self.wide(f"{name}.weight").permute(0, 2, 3, 4, 1)
        return Conv(self.typed(weight), self.exact(self.wide(f"{name}.bias")))

    def conv3d(self, name: str, form: WinogradForm | None, extra_bias: Tensor | None = None) -> Conv | WinogradConv:
        weight = self.wide(f"{name}.weight").permute(0, 2, 3, 4, 1)
        bias = self.wide(f"{name}.bias")
        bias = self.exact(bias if extra_bias is None else bias + extra_bias)
        if form is not None:
            components = winograd.prepare_weight(weight, form.columns, self.backend.dtype)
            return WinogradConv(components, bias, form)
        return Conv(self.typed(weight), bias)

    def pointwise(self, name: str) -> Pointwise:
        return Pointwise(self.typed(self.wide(f"{name}.weight").flatten(1)), self.exact(self.wide(f"{name}.bias")))

    def upsample(self, name: str, method: str) -> UpsampleConv:
        weight = self.wide(f"{name}.weight")
        bias = self.exact(self.wide(f"{name}.bias"))
        if method == "winograd":
            # In parts, as Winograd's other weights.
            parts = [self.typed(upsample_components(part)) for part in weight.split(_PART_CHANNELS)]
            return UpsampleConv(None, torch.cat(parts, dim=3), bias)
        return UpsampleConv(self.typed(upsample_phases(weight)), None, bias)

    def norm(self, name: str) -> Tensor:
        gamma = self.wide(name).flatten()
        return self.exact(gamma * gamma.numel() ** 0.5)

    def wide(self, name: str) -> Tensor:
        """A checkpoint's tensor in float64 on the backend's device."""
        return self.tensors[name].to(self.backend.device, torch.float64)

    def typed(self, tensor: Tensor) -> Tensor:
        """Rounded to the compute type, contiguous, in memory of its own."""
        return tensor.to(self.backend.dtype, memory_format=torch.contiguous_format, copy=True).contiguous()

    def exact(self, tensor: Tensor) -> Tensor:
        """A gamma or a bias: float32, or float64 in a float64 decoder."""
        dtype = torch.float64 if self.backend.dtype == torch.float64 else torch.float32
        return tensor.to(dtype, copy=True)


def upsample_phases(weight: Tensor) -> Tensor:
    """[C_out, C_in, 3, 3] -> [2, 2, C_out, 2, 2, C_in]: taps that fall on the same source pixel, summed.

    Output row 2y sees source rows (y - 1, y) with taps (a, b + c); row 2y + 1 sees (y, y + 1) with (a + b, c).
    """
    sums = weight.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
    return torch.einsum("pky,qlx,oiyx->pqokli", sums, sums, weight)


def upsample_components(weight: Tensor) -> Tensor:
    """[C_out, C_in, 3, 3] -> [16, 2, 2, C_out, C_in]: the four phases' taps in F(3x3, 2x2) form."""
    matrix = winograd.upsample_transforms().weight.to(weight)
    return torch.einsum("mk,nl,pqokli->mnpqoi", matrix, matrix, upsample_phases(weight)).flatten(0, 1)


def head_weight(weight: Tensor) -> Tensor:
    """[12, C, 3, 3, 3] -> [112, 3, 1, 1, C]: spatial taps become output channels, tap-major; zeros up to 112."""
    taps = weight.permute(3, 4, 0, 2, 1).flatten(0, 2)
    padding = taps.new_zeros(HEAD_CHANNELS - taps.shape[0], *taps.shape[1:])
    return torch.cat([taps, padding])[:, :, None, None, :]


def _architecture(tensors: Mapping[str, Tensor]) -> Architecture:
    """The widths, read from the two tensors that fix them."""
    sources = {"post_quant_conv.weight": 5, "decoder.conv_out.weight": 5}
    for name, dims in sources.items():
        if name not in tensors:
            hint = "no tensor is named decoder.* or post_quant_conv.*" if not tensors else "it is missing"
            raise WeightsError(f"not a Wan2.2 decoder: {name} fixes the widths, but {hint}")
        if tensors[name].dim() != dims:
            raise WeightsError(f"not a Wan2.2 decoder: {name} has {tensors[name].dim()} dimensions instead of {dims}")
    return Architecture(
        base=tensors["decoder.conv_out.weight"].shape[1], latent=tensors["post_quant_conv.weight"].shape[1]
    )
