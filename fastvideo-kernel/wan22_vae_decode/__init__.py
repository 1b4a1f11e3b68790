# SPDX-License-Identifier: Apache-2.0
"""Exact, fast decoder of the Wan2.2 (TI2V-5B) video VAE."""

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
