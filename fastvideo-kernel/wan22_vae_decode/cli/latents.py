# SPDX-License-Identifier: Apache-2.0
"""Reads latents from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from wan22_vae_decode.cli.checkpoint import check_readable
from wan22_vae_decode.cli.extras import MissingExtraError, require
from wan22_vae_decode.errors import InputError, listed

KEY = "latents"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_latents(path: Path, key: str | None) -> Tensor:
    """Latents [1, z, T, H, W] of one video, on the CPU.

    Args:
        path: ``.safetensors``, ``.pt``, ``.pth`` or ``.npy``, [z, T, H, W] or [1, z, T, H, W].
        key: the tensor's name in a file that holds several; by default "latents", or the only one.

    Raises:
        InputError: no such file, not readable, damaged, of another kind or shape.
    """
    latents = _only(_contents(path), path, key)
    plain = latents.layout == torch.strided and not latents.is_nested and latents.device.type != "meta"
    if not plain or latents.dtype not in _TYPES:
        kind = f"{latents.layout} {latents.dtype}".replace("torch.", "").replace("strided ", "")
        raise InputError(f"{path} holds a {kind} tensor; latents are float16, bfloat16, float32 or float64 in memory")
    if latents.dim() == 4:
        latents = latents[None]
    if latents.dim() != 5:
        raise InputError(f"{path} holds {list(latents.shape)}; latents are [z, T, H, W] or [1, z, T, H, W]")
    if latents.shape[0] != 1:
        raise InputError(f"{path} holds latents of {latents.shape[0]} videos; decode takes those of one")
    # A saved Parameter requires gradients, which a decode refuses.
    return latents.detach()


def _contents(path: Path) -> Any:
    """A tensor, or a dictionary of them."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise InputError(f"{path} is none of {', '.join(_READERS)}")
    check_readable(path)
    try:
        return _READERS[kind](path)
    except MissingExtraError:
        raise
    except Exception as error:  # each library has its own for a damaged file
        reason = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
        raise InputError(f"{path} cannot be read as {kind[1:]}: {reason}") from error


def _torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _numpy(path: Path) -> Tensor:
    return torch.from_numpy(require("numpy", "a .npy file").load(path, allow_pickle=False))


_READERS: dict[str, Callable[[Path], Any]] = {".safetensors": load_file, ".pt": _torch, ".pth": _torch, ".npy": _numpy}


def _only(contents: Any, path: Path, key: str | None) -> Tensor:
    if isinstance(contents, Tensor):
        if key is not None:
            raise InputError(f"{path} holds one tensor without a name; leave --key out")
        return contents
    named = contents.items() if isinstance(contents, dict) else ()
    tensors = {name: value for name, value in named if isinstance(value, Tensor)}
    if not tensors:
        kind = type(contents).__name__
        raise InputError(f"{path} holds no tensor by name ({kind}); save the latents as a tensor or in a dict of them")
    if key is None:
        key = KEY if KEY in tensors or len(tensors) != 1 else next(iter(tensors))
    if key not in tensors:
        held = listed(list(map(str, tensors)))
        raise InputError(f"{path} holds no tensor {key}, but {held}; --key chooses one")
    return tensors[key]
