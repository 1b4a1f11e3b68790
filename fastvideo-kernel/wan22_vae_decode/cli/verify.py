# SPDX-License-Identifier: Apache-2.0
"""``verify``: is what this machine decodes the VAE's video?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from wan22_vae_decode import backends
from wan22_vae_decode.accuracy import distance, strict_float32
from wan22_vae_decode.cli import options, subject
from wan22_vae_decode.decoder import Decoder
from wan22_vae_decode.errors import BackendUnavailableError, InputError

# Some dB below what decoders of right arithmetic reach with random weights.
LEAST_DB = {torch.float16: 60.0, torch.bfloat16: 40.0, torch.float32: 100.0}

GPU_SIZE = (704, 1248, 9)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "verify",
        help="compare the decoder with plain torch",
        description="Tests every kernel against its torch counterpart, then decodes the same latents with the decoder "
        "and with plain torch in float32 without TF32 (float64 if the decoder computes in float32), and compares the "
        "videos by PSNR. Without a GPU it does this with the torch backend, at a small size.",
    )
    subject.add_options(parser, GPU_SIZE)
    parser.add_argument(
        "--min-db",
        type=options.finite,
        help="least PSNR of the worst frame (default: float16 60, bfloat16 40, float32 100)",
    )
    options.add_decoder(parser)
    options.add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison; 1 if a kernel or the video is off."""
    device = options.device(arguments.device)
    small = device.type != "cuda"
    if small:
        print(f"no GPU is used: this verifies the torch backend on {device}, not the kernels", file=sys.stderr)
    given = subject.read(arguments, device, GPU_SIZE)
    decoder = Decoder.from_state_dict(
        given.state_dict,
        device=device,
        dtype=arguments.dtype,
        backend=arguments.backend,
        frames_per_pass=arguments.frames_per_pass,
    )
    if decoder.dtype not in LEAST_DB:
        raise InputError(f"verify compares float16, bfloat16 or float32 with a wider type, not {arguments.dtype}")
    result: dict[str, Any] = {
        "backend": decoder.backend,
        "dtype": _name(decoder.dtype),
        "device": _device_name(device),
        "weights": given.origin,
    }
    # Where the kernels are not asked for, or do not compute in the type that is, nothing about them is amiss.
    wanted = arguments.backend != "torch" and not small and decoder.dtype != torch.float32
    result["selftest"] = _selftest(decoder) if wanted else "none"
    video = decoder.decode(given.latents)
    wider = torch.float64 if decoder.dtype == torch.float32 else torch.float32
    with strict_float32():
        oracle = Decoder.from_state_dict(given.state_dict, device=device, dtype=wider, backend="torch")
        found = distance(video, oracle.decode(given.latents, wider))
    least = LEAST_DB[decoder.dtype] if arguments.min_db is None else arguments.min_db
    result |= {"size": "x".join(map(str, given.size)), "reference": f"torch, {_name(wider)}", "least_db": least}
    result |= found._asdict()
    result["ok"] = result["selftest"] in ("passed", "none") and found.worst_frame_db >= least
    print(json.dumps(result) if arguments.json else _text(result))
    return 0 if result["ok"] else 1


def _selftest(decoder: Decoder) -> str:
    """ "passed", or why the kernels are not fit for use here."""
    # Imported only where there is a GPU.
    from wan22_vae_decode.backends.cuda import CudaBackend, selftest

    try:
        ops = backends.create("cuda", decoder.device, decoder.dtype)
        assert isinstance(ops, CudaBackend)
        selftest.check(ops)
    except BackendUnavailableError as error:
        return str(error)
    return "passed"


def _text(result: dict[str, Any]) -> str:
    subject = f"{result['backend']}, {result['dtype']}, {result['device']}"
    return "\n".join(
        [
            f"decoder    {subject}; {result['size']}, weights: {result['weights']}",
            f"self-test  {result['selftest']}",
            f"PSNR       {result['psnr_db']:.1f} dB against {result['reference']}",
            f"worst      {result['worst_frame_db']:.1f} dB, frame {result['worst_frame']} (at least "
            f"{result['least_db']:g} is asked)",
            "ok" if result["ok"] else "NOT OK",
        ]
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
