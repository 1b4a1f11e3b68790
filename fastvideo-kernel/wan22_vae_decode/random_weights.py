# SPDX-License-Identifier: Apache-2.0
"""Random decoders, to check and measure with where no trained weights are at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.weights import expected_shapes


def random_state_dict(
    arch: Architecture,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Weights of a decoder that keep each layer's variance, so that standard normal latents decode to pixels most of
    which lie inside [-1, 1].
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("gamma"):
            return 0.5 + torch.rand(shape, generator=generator, dtype=dtype, device=device)
        noise = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        if len(shape) == 1:
            return 0.1 * noise
        gain = 0.5 if "conv_out" in name else 1.0
        return gain * noise / torch.Size(shape[1:]).numel() ** 0.5

    return {name: draw(name, shape) for name, shape in expected_shapes(arch).items()}
