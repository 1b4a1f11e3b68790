# SPDX-License-Identifier: Apache-2.0
"""Packages that only the command line uses, which a plain installation may lack."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from wan22_vae_decode.errors import DecodeError

MODULES = ("numpy", "imageio_ffmpeg", "rich", "matplotlib")
"""Those of the extra ``cli``."""


class MissingExtraError(DecodeError):
    """A package of the extra ``cli`` is not installed."""


def install(*modules: str) -> str:
    """The command that installs modules."""
    return f"pip install {' '.join(module.replace('_', '-') for module in modules)}"


def require(module: str, purpose: str) -> ModuleType:
    """The module, or ``MissingExtraError`` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"{purpose} needs {package}: {install(package)}") from error


def ffmpeg() -> str:
    """The path of the program, which not every build of imageio-ffmpeg brings."""
    package = require("imageio_ffmpeg", "writing a video")
    try:
        return package.get_ffmpeg_exe()
    except RuntimeError as error:
        raise MissingExtraError(
            "writing a video needs the program ffmpeg: install it, or let IMAGEIO_FFMPEG_EXE name it"
        ) from error


def optional(module: str, purpose: str) -> ModuleType | None:
    """The module, or None and a line on stderr that says what is left out."""
    try:
        return require(module, purpose)
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        return None
