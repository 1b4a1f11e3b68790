# SPDX-License-Identifier: Apache-2.0
"""Small decoders and the reference VAE for the kernel tests."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wan22_vae_decode import geometry, weights

BASE, LATENT = 8, 4


def random_state_dict(base: int = BASE, latent: int = LATENT, seed: int = 0) -> dict[str, Tensor]:
    """Random weights that keep the residual stream near unit variance, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("gamma"):
            return 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 1:
            return 0.1 * noise
        gain = 0.5 if "conv_out" in name else 1.0
        return gain * noise / torch.Size(shape[1:]).numel() ** 0.5

    arch = geometry.Architecture(base, latent)
    return {name: draw(name, shape) for name, shape in weights.expected_shapes(arch).items()}


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
def reference_vae(state_dict: dict[str, Tensor]) -> nn.Module:
    """diffusers' AutoencoderKLWan with the session's weights, in float64.

    Its upsampling casts to float32, which would round a float64 decode; nearest neighbours need no cast.
    """
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=BASE,
        z_dim=LATENT,
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
        latents_mean=[0.0] * LATENT,
        latents_std=[1.0] * LATENT,
    )
    vae = vae.double().eval().requires_grad_(False)
    unused = vae.load_state_dict(state_dict, strict=False)
    assert not unused.unexpected_keys
    for block in vae.decoder.up_blocks[:3]:
        block.upsampler.resample[0] = nn.Upsample(scale_factor=2.0, mode="nearest-exact")
    return vae
