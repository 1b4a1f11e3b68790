# SPDX-License-Identifier: Apache-2.0
"""FastVideo's Wan VAE config with the switches of the fast exact Wan2.2 decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastvideo.configs.models.vaes.wanvae import WanVAEConfig as UpstreamWanVAEConfig
from fastvideo.utils import StoreBoolean

from wan22_vae_decode.memory import MAX_FRAMES

BACKENDS = ("auto", "cuda", "torch")
DTYPES = ("auto", "float16", "bfloat16", "float32", "float64")


@dataclass
class WanVAEConfig(UpstreamWanVAEConfig):
    """Adds how ``AutoencoderKLWan.decode`` runs; with every switch at its default it is upstream's, bit for bit.

    Attributes:
        decode_kernel: decode through ``wan22_vae_decode`` where it can, through upstream's decode (with one log
            line) elsewhere.
        decode_kernel_parallel: split that decode over FastVideo's sequence-parallel group; needs ``decode_kernel``.
        decode_frames_per_pass: latent frames per pass and GPU, from 1 to 61, or "auto" for the most that free memory
            allows.
        decode_dtype: "auto" (float16 on CUDA, float32 on CPU) or one of float16, bfloat16, float32, float64.
        decode_backend: "auto" (the CUDA kernels, else upstream's decode), "cuda" or "torch" (readable reference
            ops, any device).
    """

    decode_kernel: bool = False
    decode_kernel_parallel: bool = False
    decode_frames_per_pass: int | str = 4
    decode_dtype: str = "auto"
    decode_backend: str = "auto"

    def check_decode(self) -> None:
        """Raises ValueError for a combination of switches that means nothing."""
        if self.decode_kernel_parallel and not self.decode_kernel:
            raise ValueError(
                "vae_config.decode_kernel_parallel splits the kernel decode over ranks: set decode_kernel=True too."
            )
        if self.decode_backend not in BACKENDS:
            raise ValueError(
                f"vae_config.decode_backend is {self.decode_backend!r}; choose one of {', '.join(BACKENDS)}."
            )
        if self.decode_dtype not in DTYPES:
            raise ValueError(f"vae_config.decode_dtype is {self.decode_dtype!r}; choose one of {', '.join(DTYPES)}.")
        frames = self.decode_frames_per_pass
        if frames != "auto" and (
            isinstance(frames, bool) or not isinstance(frames, int) or not 1 <= frames <= MAX_FRAMES
        ):
            raise ValueError(
                f"vae_config.decode_frames_per_pass is {frames!r}; give a whole number of latent frames from 1 to "
                f"{MAX_FRAMES}, or 'auto'."
            )


def add_decode_arguments(parser: Any, prefix: str = "vae-config") -> Any:
    """Adds the decoder's switches to FastVideo's argument parser; they count only where they are given."""
    destination = prefix.replace("-", "_")
    for name, meaning in (
        ("decode_kernel", "Decode through wan22_vae_decode (Wan2.2 TI2V-5B and PAN2)"),
        ("decode_kernel_parallel", "Split that decode over the sequence-parallel ranks"),
    ):
        flag = f"--{prefix}.{name.replace('_', '-')}"
        parser.add_argument(flag, action=StoreBoolean, dest=f"{destination}.{name}", default=False, help=meaning)
    for name, kind, choices, meaning in (
        ("decode_frames_per_pass", _frames_per_pass, None, "Latent frames per pass and GPU, or auto"),
        ("decode_dtype", str, DTYPES, "Compute type of that decode"),
        ("decode_backend", str, BACKENDS, "Its ops: the CUDA kernels or else FastVideo's decode (auto), or by name"),
    ):
        flag = f"--{prefix}.{name.replace('_', '-')}"
        default = getattr(WanVAEConfig, name)
        parser.add_argument(
            flag, type=kind, choices=choices, dest=f"{destination}.{name}", default=default, help=meaning
        )
    return parser


def _frames_per_pass(text: str) -> int | str:
    return text if text == "auto" else int(text)
