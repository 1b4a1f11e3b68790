# SPDX-License-Identifier: Apache-2.0
"""Small decoders and the reference VAE for the kernel tests."""

import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from wan22_vae_decode import geometry, log, random_weights
from wan22_vae_decode.cli.main import main

BASE, LATENT = 8, 4


def random_state_dict(base: int = BASE, latent: int = LATENT, seed: int = 0) -> dict[str, Tensor]:
    """Random weights in float64."""
    return random_weights.random_state_dict(geometry.Architecture(base, latent), seed)


@pytest.fixture(scope="session")
def make_state_dict() -> Callable[..., dict[str, Tensor]]:
    return random_state_dict


@pytest.fixture(scope="session")
def state_dict() -> dict[str, Tensor]:
    return random_state_dict()


@pytest.fixture
def latents() -> Callable[..., Tensor]:
    """Latents [B, z, T, H, W] in float64, new ones for every seed."""

    def make(frames: int, rows: int, cols: int, batch: int = 1, channels: int = LATENT, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, channels, frames, rows, cols, generator=generator, dtype=torch.float64)

    return make


@pytest.fixture(scope="session")
def make_vae() -> Callable[..., nn.Module]:
    """diffusers' AutoencoderKLWan as in Wan2.2, with weights of a decoder of any width and a narrow encoder."""
    from diffusers import AutoencoderKLWan

    def make(base: int, latent: int, weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
        vae = AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=base,
            z_dim=latent,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_temporal=4,
            scale_factor_spatial=16,
            latents_mean=[0.0] * latent,
            latents_std=[1.0] * latent,
        )
        vae = vae.to(dtype).eval().requires_grad_(False)
        unused = vae.load_state_dict(weights, strict=False)
        assert not unused.unexpected_keys
        return vae

    return make


@pytest.fixture(scope="session")
def reference_vae(make_vae: Callable[..., nn.Module], state_dict: dict[str, Tensor]) -> nn.Module:
    """diffusers' AutoencoderKLWan with the session's weights, in float64.

    Its upsampling casts to float32, which would round a float64 decode; nearest neighbours need no cast.
    """
    vae = make_vae(BASE, LATENT, state_dict, torch.float64)
    for block in vae.decoder.up_blocks[:3]:
        block.upsampler.resample[0] = nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact")
    return vae


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the package logs."""
    log.forget()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.logger.addHandler(handler)
    yield said
    log.logger.removeHandler(handler)


class Ended(NamedTuple):
    """How a command line ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture) -> Iterator[Callable[..., Ended]]:
    """Runs a command line in this process."""
    # Background jobs and those of nohup start with signals ignored; a command that a signal ended leaves them so.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's own refusals
            status = int(end.code or 0)
        return Ended(status, *capsys.readouterr())

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def vae_folder(tmp_path_factory: pytest.TempPathFactory, state_dict: dict[str, Tensor]) -> Path:
    """The session's weights as a VAE folder of a checkpoint, in two files, with tensors of the encoder; read only."""
    folder = tmp_path_factory.mktemp("checkpoint") / "vae"
    folder.mkdir()
    tensors = {name: tensor.float() for name, tensor in state_dict.items()} | {"encoder.conv_in.bias": torch.ones(1)}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"diffusion_pytorch_model-{number}.safetensors")
    statistics = {"latents_mean": [0.1 * n for n in range(LATENT)], "latents_std": [1.0 + n for n in range(LATENT)]}
    (folder / "config.json").write_text(json.dumps(statistics))
    return folder
