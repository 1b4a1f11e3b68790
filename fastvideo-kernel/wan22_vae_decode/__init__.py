# SPDX-License-Identifier: Apache-2.0
"""Exact, fast decoder of the Wan2.2 (TI2V-5B) video VAE."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan22_vae_decode import accuracy as accuracy
    from wan22_vae_decode import backends as backends
    from wan22_vae_decode import decoder as decoder
    from wan22_vae_decode import errors as errors
    from wan22_vae_decode import memory as memory
    from wan22_vae_decode import weights as weights
    from wan22_vae_decode.decoder import Decoder, why_not
    from wan22_vae_decode.errors import (
        BackendUnavailableError,
        CommunicationError,
        DecodeError,
        InputError,
        OutOfMemoryError,
        PeerError,
        WeightsError,
    )

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "CommunicationError",
    "DecodeError",
    "Decoder",
    "InputError",
    "OutOfMemoryError",
    "PeerError",
    "WeightsError",
    "why_not",
]

_MODULES = ("accuracy", "backends", "decoder", "errors", "memory", "weights")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


# Hidden from type checkers, which would take any name for one of these.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first wanted: the command line must come to run before torch is loaded,
        which takes seconds, to answer an interrupt meanwhile.
        """
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "decoder" if name in ("Decoder", "why_not") else "errors"
        # Kept, so that it is looked for here only once.
        globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return globals()[name]
