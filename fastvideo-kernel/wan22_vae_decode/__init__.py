# SPDX-License-Identifier: Apache-2.0
"""Exact, fast decoder of the Wan2.2 (TI2V-5B) video VAE."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first wanted: the command line must come to run before torch is loaded, which
    takes seconds, to answer an interrupt meanwhile.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "decoder" if name in ("Decoder", "why_not") else "errors"
    return getattr(import_module(f"{__name__}.{module}"), name)
