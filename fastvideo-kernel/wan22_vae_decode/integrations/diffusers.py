# SPDX-License-Identifier: Apache-2.0
"""Decodes with this package inside diffusers' ``AutoencoderKLWan``, alone or in a pipeline of Wan2.2 TI2V-5B:

    from wan22_vae_decode.integrations import diffusers as fast_decode

    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.2-TI2V-5B-Diffusers", torch_dtype=torch.bfloat16).to("cuda")
    fast_decode.enable(pipe)

One object changes, not diffusers: the VAE gets a class of its own, whose ``decode`` is in front of diffusers'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from wan22_vae_decode import log
from wan22_vae_decode.decoder import check_options
from wan22_vae_decode.errors import DecodeError, InputError
from wan22_vae_decode.module_decoder import ModuleDecoder

try:
    from diffusers import AutoencoderKLWan
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample
    from diffusers.models.autoencoders.vae import DecoderOutput
    from diffusers.utils.accelerate_utils import apply_forward_hook
    from diffusers.utils.torch_utils import is_compiled_module
except ImportError as error:
    raise ImportError(f"this module needs diffusers' AutoencoderKLWan: pip install -U diffusers ({error})") from error

_DECODES = ("decode", "_decode")
"""The methods that this package computes."""

_CONFIG = {"is_residual": True, "patch_size": 2}
"""What the configuration of Wan2.2 TI2V-5B's VAE has and others' have not."""

_WITHOUT_EFFECT = ("training", "gradient_checkpointing", "name")
"""Values of modules that do not change what they compute; of dropout, see ``_other_code``."""

_MOVERS = ("AlignDevicesHook", "CpuOffload")
"""accelerate's hooks that move weights and change nothing else."""


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
    layer by layer; a VAE whose code, not only its weights, is another than diffusers' (a subclass, hooks; methods,
    layers or their plain attributes that were replaced in this VAE or in its classes; dropout in training); a GPU
    without kernels or memory. Weights may change, move or be retyped at any time; they are prepared anew at the next
    decode, so also for every video of a pipeline that offloads its VAE in between. Enabling again changes the options.

    Args:
        vae_or_pipe: a diffusers ``AutoencoderKLWan`` of Wan2.2 TI2V-5B, also compiled, or a pipeline whose ``vae`` is
            one.
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
    if not _is_wan22(vae):
        raise InputError(
            f"only the VAE of Wan2.2 TI2V-5B is decoded here; this is another one (z_dim {vae.config.z_dim})"
        )
    options, parts = {"backend": backend, "dtype": dtype, "frames_per_pass": frames_per_pass}, _parts(vae)
    if not isinstance(vae, _Enabled):
        own = vae.__dict__.pop("decode", None)
        vae.__class__ = _enabled(vae.__class__)
    else:
        # What now stands in front of this class's decode was put there afterwards, and calls it.
        own = vae._fast_decode.own
    vae._fast_decode = _Route(options, own, parts)


def disable(vae_or_pipe: Any) -> None:
    """Gives a VAE its own ``decode`` back and lets the prepared weights go; does nothing to one that was not enabled.

    Where ``decode`` was wrapped or compiled after ``enable``, that stays, and what it calls is the VAE's own again.

    Raises:
        InputError: neither an ``AutoencoderKLWan`` nor a pipeline with one.
    """
    vae = _vae(vae_or_pipe)
    if not isinstance(vae, _Enabled):
        return
    own = vae._fast_decode.own
    if "decode" in vars(vae):
        vae._fast_decode = _Route(None, own, {})
        return
    vae.__dict__.pop("_fast_decode", None)
    vae.__class__ = _stock(type(vae))
    if own is not None:
        vae.__dict__["decode"] = own


def _vae(vae_or_pipe: Any) -> Any:
    vae = getattr(vae_or_pipe, "vae", vae_or_pipe)
    # In what torch.compile makes of a module.
    vae = getattr(vae, "_orig_mod", vae)
    if not isinstance(vae, AutoencoderKLWan):
        kind = type(vae).__name__
        raise InputError(f"enable and disable take an AutoencoderKLWan or a pipeline with one, not {kind}")
    return vae


class _Route:
    """What an enabled VAE keeps: its decoder, and what was said and found when it was enabled.

    Attributes:
        options: those of ``enable``, or None for a VAE that is disabled again.
        own: the ``decode`` that the VAE, not its class, had.
        parts: the layers that its configuration describes.
    """

    def __init__(self, options: dict[str, Any] | None, own: Any, parts: dict[str, _Kind]) -> None:
        self.options = options
        self.own = own
        self.parts = parts
        self.prepared = ModuleDecoder()

    @torch.compiler.disable
    def video(self, vae: AutoencoderKLWan, z: Tensor) -> Tensor | None:
        """The video, or None and a log line with the reason."""
        if self.options is None:
            return None
        reason = _tiles(vae, z) or _other_code(vae, self)
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


class _Enabled(AutoencoderKLWan):
    """In front of the class of a VAE that is enabled: methods of a class are every copy's own, however it is made."""

    _fast_decode = _Route(None, None, {})

    def decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """As diffusers'."""
        if not isinstance(self, _Enabled):
            # Somebody kept this method over ``disable``.
            return _stock(type(self)).decode(self, z, return_dict=return_dict)
        route = self._fast_decode
        _bring(self)
        video = route.video(self, z)
        if video is None:
            decode = super().decode if route.own is None else route.own
            return decode(z, return_dict=return_dict)
        return DecoderOutput(sample=video) if return_dict else (video,)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AutoencoderKLWan:
        """As diffusers', which ``to``, ``cuda`` and the like go through."""
        with self._fast_decode.prepared.following(self):
            return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # This class is made while the program runs, where pickle does not find it.
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return _blank, (_stock(type(self)),), *state


@functools.cache
def _enabled(cls: Any) -> type[_Enabled]:
    # Under the name that diffusers saves it by.
    return type(cls.__name__, (_Enabled, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _stock(cls: type[AutoencoderKLWan]) -> type[AutoencoderKLWan]:
    return cls.__bases__[1] if issubclass(cls, _Enabled) else cls


def _blank(cls: Any) -> _Enabled:
    enabled = _enabled(cls)
    return enabled.__new__(enabled)


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


def _other_code(vae: AutoencoderKLWan, route: _Route) -> str | None:
    """The reason why the weights alone do not say what this VAE computes, or None where they do."""
    if _has_replaced_decode(vae) or not (route.own is None or _is_stock(route.own, vae)):
        return "this VAE has a decode of its own"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "every module has forward hooks"
    if not _is_wan22(vae):
        return "its configuration has become another VAE's"
    modules = _modules(vae)
    parts = dict(modules)
    for name in sorted({*parts, *route.parts}):
        stock = route.parts.get(name)
        if stock is None or name not in parts or stock != _kind(parts[name], stock.values):
            return f"{name} is not the layer that diffusers makes from the VAE's configuration"
    for name, module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has forward hooks"
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return f"{name} drops values, since it is in training mode"
        if not _has_stock_forward(module):
            return f"{name} has a forward of its own"
    return None


def _has_replaced_decode(vae: AutoencoderKLWan) -> bool:
    cls = _stock(type(vae))
    decodes = {name: getattr(AutoencoderKLWan, name) for name in _DECODES}
    if "_decode" in vars(vae) or any(getattr(cls, name) is not decode for name, decode in decodes.items()):
        return True
    return not all(map(_is_libraries_own, decodes.values()))


def _is_libraries_own(function: Any) -> bool:
    """Whether a class's function, and all that it wraps, is defined in diffusers or torch. What somebody else puts in
    its place may go by its name, but has other globals.
    """
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] not in ("diffusers", "torch"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _is_stock(own: Any, vae: AutoencoderKLWan) -> bool:
    """True for diffusers' own decode of this VAE, also compiled."""
    stock = AutoencoderKLWan.decode.__get__(vae)
    # Both, since a wrapper of a compiled function has its attributes.
    inner = [getattr(own, name, None) for name in ("_torchdynamo_orig_callable", "__wrapped__")]
    return own == stock or inner == [stock, stock]


def _has_stock_forward(module: nn.Module) -> bool:
    if is_compiled_module(module):
        return True
    forward: Any = module.forward
    hook = type(getattr(module, "_hf_hook", None))
    if isinstance(forward, functools.partial) and {hook.__module__, forward.func.__module__} == {"accelerate.hooks"}:
        forward = module._old_forward if hook.__name__ in _MOVERS else forward
    stock: Any = type(module).forward
    return forward == stock.__get__(module) and _is_libraries_own(stock)


def _modules(vae: AutoencoderKLWan) -> list[tuple[str, nn.Module]]:
    """All that decodes, by its stock name; what torch.compile makes of a module is followed by that module."""
    return [
        (name.replace("._orig_mod", ""), module)
        for part in ("post_quant_conv", "decoder")
        for name, module in getattr(vae, part).named_modules(prefix=part, remove_duplicate=False)
    ]


class _Kind(NamedTuple):
    """What a module computes apart from its weights: its class, its own words and its plain values, by name."""

    cls: type
    words: str
    values: dict[str, Any]


def _kind(module: nn.Module, names: Iterable[str] | None = None) -> _Kind:
    """Of all plain values, or of these."""
    # diffusers' own only casts, to float32 and back.
    cls = nn.Upsample if type(module) is WanUpsample else type(module)
    if cls is nn.Dropout:
        # Nothing at all, apart from training.
        return _Kind(cls, "", {})
    if names is None:
        plain = {name for name, value in vars(module).items() if isinstance(value, bool | int | float | str | tuple)}
        names = [name for name in sorted(plain.difference(_WITHOUT_EFFECT)) if name[0] != "_"]
    return _Kind(cls, module.extra_repr(), {name: getattr(module, name, None) for name in names})


def _is_wan22(vae: AutoencoderKLWan) -> bool:
    return all(getattr(vae.config, name) == value for name, value in _CONFIG.items())


def _parts(vae: AutoencoderKLWan) -> dict[str, _Kind]:
    with torch.device("meta"):
        stock = AutoencoderKLWan.from_config(vae.config)
    return {name: _kind(module) for name, module in _modules(stock)}
