# SPDX-License-Identifier: Apache-2.0
"""Packages that only the command line uses, which a plain installation may lack."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from wan22_vae_decode.errors import DecodeError

INSTALL = "pip install 'wan22-vae-decode[cli]'"


class MissingExtraError(DecodeError):
    """A package of the extra ``cli`` is not installed."""


def require(module: str, purpose: str) -> ModuleType:
    """The module, or ``MissingExtraError`` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{purpose} needs {module.partition('.')[0]}: {INSTALL}") from error


def optional(module: str, purpose: str) -> ModuleType | None:
    """The module, or None and a line on stderr that says what is left out."""
    try:
        return require(module, purpose)
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        return None
