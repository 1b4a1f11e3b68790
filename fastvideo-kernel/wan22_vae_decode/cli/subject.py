# SPDX-License-Identifier: Apache-2.0
"""What ``verify`` and ``bench`` decode: given or random weights, and random latents."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

from wan22_vae_decode import weights
from wan22_vae_decode.cli import options
from wan22_vae_decode.cli.checkpoint import read_weights, vae_folder
from wan22_vae_decode.errors import InputError
from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.random_weights import random_state_dict

CPU_SIZE = (32, 48, 9)
CPU_CHANNELS = 16


class Subject(NamedTuple):
    """Weights, latents [1, z, T, H, W] on the device, and rows, columns and frames of their video.

    Where the weights come from is told by ``origin``.
    """

    state_dict: dict[str, Tensor]
    latents: Tensor
    size: tuple[int, int, int]
    origin: str


def add_options(parser: argparse.ArgumentParser, gpu_size: tuple[int, int, int]) -> None:
    parser.add_argument(
        "--vae", type=options.path, help="folder of a VAE whose weights to take (default: random weights)"
    )
    options.add_size(parser, *("x".join(map(str, size)) for size in (gpu_size, CPU_SIZE)))


def read(arguments: argparse.Namespace, device: torch.device, gpu_size: tuple[int, int, int]) -> Subject:
    """What the options mean; small on a CPU unless they say otherwise.

    Raises:
        InputError: the folder of the weights holds none, or --channels is given too.
        WeightsError: they are not this decoder's, or not finite.
    """
    on_gpu = device.type == "cuda"
    if arguments.vae is not None:
        if arguments.channels is not None:
            raise InputError("--channels is the width of random weights; leave it out with --vae")
        state_dict = read_weights(vae_folder(arguments.vae))
    else:
        arch = Architecture(arguments.channels or (Architecture.base if on_gpu else CPU_CHANNELS))
        state_dict = random_state_dict(arch, arguments.seed, device, torch.float32)
    size = arguments.size or (gpu_size if on_gpu else CPU_SIZE)
    tensors = weights.decoder_tensors(state_dict)
    arch = weights.check(tensors)
    # Here once, instead of in every row of a table.
    weights.check_finite(tensors)
    generator = torch.Generator(device).manual_seed(arguments.seed)
    latents = torch.randn(options.latents_shape(size, arch.latent), generator=generator, device=device)
    return Subject(state_dict, latents, size, "random" if arguments.vae is None else str(arguments.vae))
