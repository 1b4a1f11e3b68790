# SPDX-License-Identifier: Apache-2.0
"""Backends by name. The one place that decides which of them runs.

A backend module offers ``why_not(device, dtype) -> str | None`` (the reason it cannot run there, cheap, no build)
and ``create(device, dtype) -> Backend`` (which may build kernels, and raises ``BackendUnavailableError``). Modules
are imported on first use, so that a machine without a GPU or a compiler never touches them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from wan22_vae_decode.backends.base import Backend
from wan22_vae_decode.errors import BackendUnavailableError, InputError

# In the order in which "auto" tries them.
_MODULES = {"cuda": "wan22_vae_decode.backends.cuda", "torch": "wan22_vae_decode.backends.torch"}

NAMES = tuple(_MODULES)


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why backend ``name`` cannot run on ``device`` in ``dtype``, or None if it can."""
    module = _module(name)
    if module is None:
        return f"the {name} backend is not part of this installation"
    return module.why_not(device, dtype)


def create(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend ``name``, or ``BackendUnavailableError`` with the reason why it cannot run."""
    reason = why_not(name, device, dtype)
    if reason is not None:
        raise BackendUnavailableError(reason)
    module = _module(name)
    assert module is not None
    return module.create(device, dtype)


def _module(name: str) -> ModuleType | None:
    if name not in _MODULES:
        raise InputError(f"backend must be 'auto' or one of {', '.join(map(repr, NAMES))}, not {name!r}")
    path = _MODULES[name]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and path.startswith(error.name):
            return None
        raise
