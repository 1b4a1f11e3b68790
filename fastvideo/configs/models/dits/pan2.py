# SPDX-License-Identifier: Apache-2.0
"""Configuration of PAN2's diffusion transformer; the defaults are the released model's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastvideo.configs.models.dits.base import DiTArchConfig, DiTConfig
from fastvideo.platforms import AttentionBackendEnum


def is_repeated_block(name: str, module: Any) -> bool:
    """Whether ``name`` is one of the numbered transformer or text refiner blocks."""
    parent, _, index = name.rpartition(".")
    return index.isdigit() and parent.endswith(("transformer_blocks", "context_refiner"))


@dataclass
class PAN2ArchConfig(DiTArchConfig):
    """The fields of ``transformer/config.json``.

    Raises:
        ValueError: the fields contradict each other.
    """

    _fsdp_shard_conditions: list = field(default_factory=lambda: [is_repeated_block])
    _compile_conditions: list = field(default_factory=lambda: [is_repeated_block])
    # Dense and exact only: the others quantise or drop part of the attention.
    _supported_attention_backends: tuple[AttentionBackendEnum, ...] = (
        AttentionBackendEnum.FLASH_ATTN,
        AttentionBackendEnum.TORCH_SDPA,
    )
    exclude_lora_layers: list[str] = field(
        default_factory=lambda: ["x_embedder", "time_embedder", "context_embedder", "proj_out"]
    )

    patch_size: tuple[int, int, int] = (1, 2, 2)
    in_channels: int = 97
    out_channels: int = 48
    num_attention_heads: int = 32
    attention_head_dim: int = 128
    num_layers: int = 44
    num_refiner_layers: int = 4
    mlp_ratio: float = 8.0
    context_mlp_ratio: float = 4.0
    refiner_mlp_ratio: float = 4.0
    text_embed_dim: int = 4096
    rope_axes_dim: tuple[int, int, int] = (16, 56, 56)
    rope_theta: float = 256.0
    # Frame positions are counted at the 16 frames per second that RoPE was trained with, videos run at 24.
    rope_temporal_scale: float = 16 / 24

    def __post_init__(self) -> None:
        super().__post_init__()
        # JSON has lists only.
        self.patch_size = _three("patch_size", self.patch_size)
        self.rope_axes_dim = _three("rope_axes_dim", self.rope_axes_dim)
        if any(dim % 2 for dim in self.rope_axes_dim) or sum(self.rope_axes_dim) != self.attention_head_dim:
            raise ValueError(
                f"PAN2's rope_axes_dim must be even numbers that add up to attention_head_dim "
                f"{self.attention_head_dim}, got {self.rope_axes_dim}"
            )
        if self.in_channels != 2 * self.out_channels + 1:
            raise ValueError(
                f"PAN2's in_channels must be 2 * out_channels + 1 (noisy latents, condition latents and mask), "
                f"got {self.in_channels} with out_channels {self.out_channels}"
            )
        self.hidden_size = self.num_attention_heads * self.attention_head_dim
        self.num_channels_latents = self.out_channels

    def check_sequence_parallel(self, ranks: int) -> None:
        """Check that ``ranks`` sequence-parallel ranks can share the attention heads.

        Needs neither weights nor GPUs, so that a pipeline can call it before it loads anything.

        Raises:
            ValueError: the number of heads is not a multiple of ``ranks``.
        """
        if ranks < 1 or self.num_attention_heads % ranks:
            raise ValueError(
                f"PAN2's {self.num_attention_heads} attention heads cannot be shared by {ranks} sequence-parallel "
                f"ranks: use a number of GPUs (sp_size) that divides {self.num_attention_heads}"
            )


def _three(name: str, values: Sequence[int]) -> tuple[int, int, int]:
    if len(values) != 3:
        raise ValueError(f"PAN2's {name} must have the three parts (t, h, w), got {list(values)}")
    t, h, w = values
    return t, h, w


@dataclass
class PAN2Config(DiTConfig):
    """FastVideo's side of the transformer configuration; attribute look-ups fall through to `PAN2ArchConfig`."""

    arch_config: DiTArchConfig = field(default_factory=PAN2ArchConfig)

    prefix: str = "PAN2"
