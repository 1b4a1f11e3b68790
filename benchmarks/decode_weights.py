# SPDX-License-Identifier: Apache-2.0
"""Random Wan2.2 VAEs to measure with, where no trained weights are at hand.

Two sets, both scaled so that random latents decode to pixels that span about [-1, 1]. In ``calibrated`` the resnets'
branches add little to the stream they are added to, and an error made inside a branch hardly shows; in ``branches``
every branch has 0.4 of the stream's standard deviation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SETS = ("calibrated", "branches")
BRANCH_SHARE = 0.4

# AutoencoderKLWan's configuration in the Wan2.2 TI2V-5B checkpoint, with a narrow encoder: nothing here encodes.
CONFIG: dict[str, Any] = {
    "base_dim": 16,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


@torch.no_grad()
def random_vae(kind: str, device: torch.device, seed: int = 0, width: int = 256) -> Any:
    """A diffusers ``AutoencoderKLWan`` in float32 on ``device``; its latents are standard normal."""
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        vae = AutoencoderKLWan(**CONFIG | {"decoder_base_dim": width})
    vae.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in vae.state_dict().items():
        weight.normal_(generator=generator)
        if name.endswith("gamma"):
            weight.mul_(0.1).add_(1)
        elif weight.dim() == 1:
            weight.mul_(0.1)
        else:
            weight.div_(math.sqrt(math.prod(weight.shape[1:])))
    latents = torch.randn(1, CONFIG["z_dim"], 2, 12, 12, device=device, generator=generator)
    if kind == "branches":
        _scale_branches(vae, latents)
    _scale_output(vae, latents)
    return vae


def _scale_branches(vae: Any, latents: Tensor) -> None:
    """Scales each resnet's second conv, in the order of the forward, to the wanted share of the stream."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock

    stream: dict[torch.nn.Module, Tensor] = {}
    done: set[torch.nn.Module] = set()
    handles = []
    for block in vae.decoder.modules():
        if not isinstance(block, WanResidualBlock):
            continue

        def remember(module: Any, inputs: tuple[Any, ...], block: Any = block) -> None:
            stream[block] = block.conv_shortcut(inputs[0]).std()

        def scale(module: Any, inputs: tuple[Any, ...], output: Tensor, block: Any = block) -> Tensor | None:
            if block in done:
                return None
            done.add(block)
            factor = BRANCH_SHARE * stream[block] / output.std()
            module.weight.mul_(factor)
            module.bias.mul_(factor)
            return output * factor

        handles += [block.register_forward_pre_hook(remember), block.conv2.register_forward_hook(scale)]
    vae.decode(latents)
    for handle in handles:
        handle.remove()


def _scale_output(vae: Any, latents: Tensor) -> None:
    """Centres the pixels and lets all but a thousandth of them lie inside [-1, 1]."""
    pixels: list[Tensor] = []
    handle = vae.decoder.conv_out.register_forward_hook(lambda module, inputs, output: pixels.append(output))
    vae.decode(latents)
    handle.remove()
    values = torch.cat(pixels, dim=2).transpose(0, 1).flatten(1)
    centre = values.median(dim=1).values
    reach = (values - centre[:, None]).abs().flatten().quantile(0.999)
    conv = vae.decoder.conv_out
    conv.weight.div_(reach)
    conv.bias.sub_(centre).div_(reach)
