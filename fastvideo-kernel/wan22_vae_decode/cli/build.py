# SPDX-License-Identifier: Apache-2.0
"""``build``: the kernels ahead of their first use."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from wan22_vae_decode import jit
from wan22_vae_decode.backends.cuda import library
from wan22_vae_decode.backends.cuda.targets import TARGETS
from wan22_vae_decode.cli import options
from wan22_vae_decode.jit.cache import cache_folder


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "build",
        help="build the CUDA kernels ahead, for a container (needs no GPU)",
        description="Compiles the kernels into the cache (WAN22_VAE_DECODE_CACHE), where decoders find them, also on "
        "machines without nvcc; to those with one, kernels of another nvcc are others, as are those of another version "
        "of this package. Needs nvcc, but no GPU. The self-test still runs at first use, on the GPU.",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=tuple(TARGETS),
        help="for which GPUs (default: the one here; without one, all that have kernels)",
    )
    options.add_json(parser)
    # Says that it builds, which takes minutes, and that it waits for another process.
    parser.set_defaults(verbose=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Builds what is not there yet; prints where each library is."""
    built = {}
    for arch in arguments.arch or _default_archs():
        recipe = library.recipe(arch)
        built[arch] = str(jit.build(recipe) / recipe.library)
        if not arguments.json:
            print(f"{arch}: {built[arch]}", flush=True)
    if arguments.json:
        print(json.dumps({"cache": str(cache_folder()), "libraries": built}))
    return 0


def _default_archs() -> list[str]:
    if torch.cuda.is_available():
        return [jit.arch_of(torch.cuda.get_device_capability())]
    chosen = jit.chosen_arch()
    return [chosen] if chosen else list(TARGETS)
