# SPDX-License-Identifier: Apache-2.0
"""A decoder for a VAE module: prepared when it is first needed, and again once the module's weights have changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wan22_vae_decode.decoder import Decoder, why_not
from wan22_vae_decode.signature import signature


class Source(NamedTuple):
    """What a decoder is made from: the weights as they are now, told by their signature, and the options."""

    contents: tuple
    options: dict[str, Any]


class ModuleDecoder:
    """The decoder of one ``AutoencoderKLWan``, FastVideo's or diffusers'.

    Before every decode, ``survey`` says why the module's own decode has to do it, or from what a decoder has to be
    made; ``prepare`` makes that decoder, unless it is the one that is there. A copy starts without. Threads may share
    it: each gets the decoder of its own source.
    """

    def __init__(self) -> None:
        self._preparing = threading.Lock()
        self.drop()

    def drop(self) -> None:
        """Lets the prepared weights go."""
        # One value, so that no thread can see one source's decoder with another source.
        self._prepared: tuple[Decoder | None, Source | None] = (None, None)

    @property
    def decoder(self) -> Decoder | None:
        """The one that is prepared, or None."""
        return self._prepared[0]

    def survey(
        self,
        module: nn.Module,
        latents: Tensor,
        *,
        dtype: torch.dtype | str = "auto",
        backend: str = "auto",
        frames_per_pass: int | Literal["auto"] = 4,
        group: Any = None,
    ) -> tuple[str | None, Source | None]:
        """The reason for the module's own decode, as far as it can be told without preparing anything; or else, the
        reason being None, the weights as they are now and the options of ``Decoder.from_state_dict``.

        "auto" is the CUDA kernels here: reference ops would be no faster than the module, so that only somebody who
        names them wants them. Never raises, since a rank that did so alone would leave the others waiting.
        """
        backend = "cuda" if backend == "auto" else backend
        try:
            tensors = own_weights(module)
            reason = _why_not(module, tensors, latents, dtype, backend)
            contents = signature(tensors) if reason is None else ()
        except torch.OutOfMemoryError as error:
            return str(error), None
        except RuntimeError as error:
            return f"the weights cannot be examined ({error})", None
        if reason is not None:
            return reason, None
        options = {"dtype": dtype, "backend": backend, "frames_per_pass": frames_per_pass, "group": group}
        return None, Source(contents, {"device": latents.device, **options})

    def is_current(self, source: Source | None) -> bool:
        """True if the prepared decoder was made from this source."""
        return self._prepared[1] == source

    def prepare(self, module: nn.Module, source: Source, anew: bool = False) -> Decoder:
        """The decoder of a source; with ``anew`` made once more also where it is current: ranks prepare together.

        Raises what ``Decoder.from_state_dict`` does.
        """
        with self._preparing:
            decoder, made_from = self._prepared
            if decoder is None or anew or made_from != source:
                # Before the new weights need the memory.
                del decoder
                self.drop()
                decoder = Decoder.from_state_dict(own_weights(module), **source.options)
                self._prepared = (decoder, source)
            return decoder

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Around the module's ``_apply``: weights that leave a device do not leave prepared ones behind there."""
        before = _placement(module)
        yield
        if _placement(module) != before:
            self.drop()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleDecoder:
        return ModuleDecoder()

    def __reduce__(self) -> tuple[Callable[[], ModuleDecoder], tuple[()]]:
        return ModuleDecoder, ()


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """The state dict under its own names, also where a part has been wrapped by ``torch.compile``."""
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in module.state_dict().items()}


def _why_not(
    module: nn.Module, tensors: dict[str, Tensor], latents: Tensor, dtype: torch.dtype | str, backend: str
) -> str | None:
    device, _ = _placement(module)
    if latents.device != device:
        return f"latents are on {latents.device}, but the VAE is on {device}; move one of them"
    if torch.is_grad_enabled() and (latents.requires_grad or _learns(module)):
        return "gradients may be needed; decode under torch.no_grad() for the fast path"
    return why_not(tensors, device=latents.device, dtype=dtype, backend=backend)


def _placement(module: Any) -> tuple[torch.device, torch.dtype]:
    weight = module.post_quant_conv.weight
    return weight.device, weight.dtype


def _learns(module: nn.Module) -> bool:
    return any(
        parameter.requires_grad
        for name, parameter in module.named_parameters()
        if name.startswith(("post_quant_conv.", "decoder."))
    )
