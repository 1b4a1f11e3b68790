# SPDX-License-Identifier: Apache-2.0
"""Decodes with this package inside diffusers' ``AutoencoderKLWan``, alone or in a pipeline of Wan2.2 TI2V-5B:

    from wan22_vae_decode.integrations import diffusers as fast_decode

    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.2-TI2V-5B-Diffusers", torch_dtype=torch.bfloat16).to("cuda")
    fast_decode.enable(pipe)

One object changes, not diffusers: the VAE gets a ``decode`` of its own, in front of its class's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from wan22_vae_decode import log
from wan22_vae_decode.decoder import check_options
from wan22_vae_decode.errors import DecodeError, InputError
from wan22_vae_decode.module_decoder import ModuleDecoder

try:
    from diffusers import AutoencoderKLWan
    from diffusers.models.autoencoders.vae import DecoderOutput
    from diffusers.utils.accelerate_utils import apply_forward_hook
except ImportError as error:
    raise ImportError(f"this module needs diffusers' AutoencoderKLWan: pip install -U diffusers ({error})") from error


def enable(
    vae_or_pipe: Any,
    *,
    backend: str = "auto",
    dtype: torch.dtype | str = "auto",
    frames_per_pass: int | Literal["auto"] = 4,
) -> None:
    """Makes a VAE's ``decode`` run through this package where it can.

    Latents and results stay as diffusers has them: ``decode(z, return_dict=True)`` takes denormalised latents
    [B, z, T, H, W] and gives [B, 3, 4T - 3, 16H, 16W] in [-1, 1], in the VAE's type. ``use_slicing`` is followed: one
    video of a batch at a time. What this package cannot do goes to diffusers' own decode, with one log line that gives
    the reason: tiles, which change the pixels; latents for which gradients may be needed; weights that are offloaded
    layer by layer; a GPU without kernels or memory. Weights may change, move or be retyped at any time; they are
    prepared anew at the next decode, so also for every video of a pipeline that offloads its VAE in between. Enabling
    again changes the options.

    Args:
        vae_or_pipe: a diffusers ``AutoencoderKLWan`` of Wan2.2 TI2V-5B, or a pipeline whose ``vae`` is one.
        backend: "auto" or "cuda", this package's kernels; "torch", reference ops on any device, which are no faster
            than diffusers.
        dtype: the compute type, as for ``Decoder.from_state_dict``; "auto" is float16 on CUDA, also in a bfloat16
            VAE, since it is more accurate and no slower.
        frames_per_pass: as for ``Decoder.from_state_dict``.

    Raises:
        InputError: another VAE, or an option without meaning.
    """
    check_options(dtype=dtype, backend=backend, frames_per_pass=frames_per_pass)
    vae = _vae(vae_or_pipe)
    config = vae.config
    if not config.is_residual or config.patch_size != 2:
        raise InputError(f"only the VAE of Wan2.2 TI2V-5B is decoded here; this is another one (z_dim {config.z_dim})")
    disable(vae)
    route = _Route(vae, {"backend": backend, "dtype": dtype, "frames_per_pass": frames_per_pass})
    # Bound methods, which a deep copy or a pickle of the VAE binds to its own.
    vae.decode, vae._apply = route.decode, route.apply


def disable(vae_or_pipe: Any) -> None:
    """Gives a VAE its own ``decode`` back and lets the prepared weights go; does nothing to one that was not enabled.

    Raises:
        InputError: neither an ``AutoencoderKLWan`` nor a pipeline with one.
    """
    vae = _vae(vae_or_pipe)
    if isinstance(getattr(vae.decode, "__self__", None), _Route):
        del vae.decode, vae._apply


def _vae(vae_or_pipe: Any) -> AutoencoderKLWan:
    vae = getattr(vae_or_pipe, "vae", vae_or_pipe)
    if not isinstance(vae, AutoencoderKLWan):
        raise InputError(
            f"enable and disable take an AutoencoderKLWan or a pipeline with one, not {type(vae_or_pipe).__name__}"
        )
    return vae


class _Route:
    """What stands in front of a VAE's methods: its decoder, and the options for it."""

    def __init__(self, vae: AutoencoderKLWan, options: dict[str, Any]) -> None:
        self.vae = vae
        self.options = options
        self.prepared = ModuleDecoder()

    def decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """As the class's own."""
        _bring(self.vae)
        video = self._decoded(z)
        if video is None:
            return type(self.vae).decode(self.vae, z, return_dict=return_dict)
        return DecoderOutput(sample=video) if return_dict else (video,)

    def apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AutoencoderKLWan:
        """As the class's own ``_apply``, which ``to``, ``cuda`` and the like go through."""
        with self.prepared.following(self.vae):
            return type(self.vae)._apply(self.vae, fn, recurse)

    def _decoded(self, z: Tensor) -> Tensor | None:
        """The video, or None and a log line with the reason."""
        vae = self.vae
        reason = _tiles(vae, z)
        source = None
        if reason is None:
            reason, source = self.prepared.survey(vae, z, **self.options)
        if source is not None:
            try:
                decoder = self.prepared.prepare(vae, source)
                latents, dtype = z.detach(), vae.post_quant_conv.weight.dtype
                if vae.use_slicing and latents.shape[0] > 1:
                    return torch.cat([decoder.decode(one, dtype) for one in latents.split(1)])
                return decoder.decode(latents, dtype)
            except InputError as error:
                reason = str(error)
            except (DecodeError, torch.OutOfMemoryError) as error:
                # In the way of diffusers' decode, which needs the memory.
                self.prepared.drop()
                reason = str(error)
        message = f"decoding with diffusers' own decode: {reason}"
        log.once(message, key=log.without_figures(message))
        return None


@apply_forward_hook
def _bring(vae: AutoencoderKLWan) -> None:
    """Lets accelerate's hook, if there is one, bring the weights to their device, as before the class's own."""


def _tiles(vae: AutoencoderKLWan, z: Tensor) -> str | None:
    """The reason why diffusers' tiles decode these latents, or None where it would not cut them either."""
    if not vae.use_tiling or z.dim() != 5:
        return None
    ratio = vae.spatial_compression_ratio
    rows, cols = vae.tile_sample_min_height // ratio, vae.tile_sample_min_width // ratio
    if z.shape[3] <= rows and z.shape[4] <= cols:
        return None
    return "tiling is enabled, which changes the pixels; passes need little memory without it (vae.disable_tiling())"
