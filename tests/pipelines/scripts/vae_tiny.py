# SPDX-License-Identifier: Apache-2.0
"""A Wan2.2 VAE of FastVideo small enough for a test of its decode, with random weights."""

from typing import Any

import torch
from fastvideo.configs.models.vaes.wan22_decode import WanVAEConfig
from fastvideo.configs.models.vaes.wanvae import WanVAEArchConfig
from fastvideo.models.vaes.wan22_decode import AutoencoderKLWan

LATENT = 4

ARCHITECTURE = {
    "base_dim": 4,
    "decoder_base_dim": 8,
    "z_dim": LATENT,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": (0.0,) * LATENT,
    "latents_std": (1.0,) * LATENT,
}


def tiny_config(config_class: type = WanVAEConfig, architecture: dict[str, Any] | None = None, **switches: Any) -> Any:
    """The VAE's config: the decoder alone, with whatever switches."""
    arch_config = WanVAEArchConfig(**(ARCHITECTURE if architecture is None else architecture))
    return config_class(arch_config=arch_config, load_encoder=False, **switches)


def tiny_vae(
    config: Any = None, vae_class: type = AutoencoderKLWan, seed: int = 0, frozen: bool = True, **switches: Any
) -> Any:
    """A VAE whose weights depend on the seed alone; ``frozen`` so that no gradient can be asked of it."""
    vae = vae_class(tiny_config(**switches) if config is None else config).eval().requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in vae.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("gamma"):
                weight.copy_(1 + 0.2 * noise)
            else:
                # By fan-in; the last conv gently, so that few pixels are clamped.
                gain = 0.5 if "conv_out" in name else 1.0
                weight.copy_(0.1 * noise if weight.dim() == 1 else gain * noise / weight[0].numel() ** 0.5)
    return vae


def tiny_latents(frames: int = 3, rows: int = 3, cols: int = 2, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Latents [B, 4, T, H, W], float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, LATENT, frames, rows, cols, generator=generator)
