# SPDX-License-Identifier: Apache-2.0
"""Reads a VAE folder in diffusers' layout: ``config.json`` beside one or several ``*.safetensors``."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wan22_vae_decode.errors import InputError, WeightsError

_RANGES = {"latents_mean": (-1e6, 1e6), "latents_std": (1e-6, 1e6)}
"""Far beyond any VAE's, and such that float32 holds what comes of them."""


def vae_folder(folder: Path) -> Path:
    """The folder itself, or its ``vae`` if it is a whole pipeline's.

    Raises:
        InputError: neither holds a VAE.
    """
    whole = (folder / "model_index.json").is_file()
    for candidate in (folder / "vae",) if whole else (folder, folder / "vae"):
        if any(candidate.glob("*.safetensors")):
            return candidate
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; --vae names the VAE's folder of a Wan2.2 TI2V-5B checkpoint")
    raise InputError(f"{folder} holds no *.safetensors, nor does a folder vae in it")


def check_readable(path: Path) -> None:
    """Safetensors itself says of every file that it cannot open that there is none.

    Raises:
        InputError: with the system's reason.
    """
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The decoder's tensors, on the CPU.

    Raises:
        InputError: a file may not be read.
        WeightsError: a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        check_readable(path)
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(("post_quant_conv.", "decoder."))]  # noqa: SIM118
                if twice := next((name for name in names if name in tensors), None):
                    raise WeightsError(f"{path} holds {twice}, as another file in {folder} does; leave only one there")
                tensors |= {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read as safetensors: {error}") from error
    return tensors


def read_normalisation(folder: Path, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents' channels, [channels] float64 each.

    Raises:
        InputError: ``config.json`` does not give them, or other numbers than a mean and a deviation can be.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        given = {name: config[name] for name in _RANGES}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"--normalized needs latents_mean and latents_std in {path} ({type(error).__name__}: {error})"
        ) from error
    for name, (low, high) in _RANGES.items():
        values = given[name]
        if not isinstance(values, list) or len(values) != channels:
            raise InputError(f"{path} gives latents_mean and latents_std for other than {channels} channels")
        for channel, value in enumerate(values):
            # In Python, where true is a number, but whole numbers have any size.
            if type(value) not in (int, float) or not low <= value <= high:
                got = reprlib.repr(value)
                raise InputError(f"{path} gives no {name} from {low:g} to {high:g}: that of channel {channel} is {got}")
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in given.values())
    return mean, std
