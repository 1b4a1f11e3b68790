# SPDX-License-Identifier: Apache-2.0
"""Chooses the command, and turns its outcome into a line and a status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import torch

import wan22_vae_decode
from wan22_vae_decode.cli import bench, build, decode, doctor, verify
from wan22_vae_decode.errors import DecodeError

CANNOT_RUN, INTERRUPTED = 2, 130

_DESCRIPTION = """\
Decodes latents of the Wan2.2 (TI2V-5B) video VAE, and checks and measures the decoder on this machine.

Exit status: 0 all is well, 1 a check failed (doctor, verify, bench), 2 wrong use or something is missing here,
130 interrupted. Results go to stdout, everything else to stderr."""

_EPILOG = """\
examples:
  wan22-vae-decode doctor                          what would run on this machine, and if not, why and what to do
  wan22-vae-decode build --arch sm_90a             build the kernels ahead, for a container (needs no GPU)
  wan22-vae-decode verify                          compare the decoder with plain torch in float32
  wan22-vae-decode bench --out times               a table, times.json and times.png
  wan22-vae-decode decode z.safetensors --vae Wan2.2-TI2V-5B-Diffusers/vae -o out.mp4"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status (argparse itself exits with 2)."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(message)s", force=True)
    try:
        return arguments.run(arguments)
    except DecodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_RUN
    except torch.OutOfMemoryError as error:
        # Outside a decode, whose own words would be better: while weights or latents are made or moved.
        print(f"error: out of memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wan22-vae-decode",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=wan22_vae_decode.__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="also say what is being built and tested")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (doctor, build, verify, bench, decode):
        command.add_parser(commands).set_defaults(run=command.run)
    return parser
