# SPDX-License-Identifier: Apache-2.0
"""Pipeline configuration of PAN2."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fastvideo.configs.models.dits.base import DiTConfig
from fastvideo.configs.models.dits.pan2 import PAN2Config
from fastvideo.configs.models.encoders.base import EncoderConfig
from fastvideo.configs.models.encoders.qwen3_5 import Qwen3_5Config
from fastvideo.configs.models.vaes.base import VAEConfig
from fastvideo.configs.models.vaes.wan22_decode import WanVAEConfig
from fastvideo.configs.pipelines.base import PipelineConfig


class ActivatesOnUnpickle:
    """A config that registers this plug-in wherever it is unpickled: FastVideo's spawned workers receive their config
    that way.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        import fastvideo.pipelines.pan2  # noqa: F401 (registers)

        self.__dict__.update(state)


class VaeSwitch:
    """A dataclass field that is another name for a field of ``vae_config``; None leaves that as it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, owner: type) -> bool | None:
        return None if config is None else getattr(config.vae_config, self.name, False)

    def __set__(self, config: Any, value: bool | None) -> None:
        if value is not None:
            setattr(config.vae_config, self.name, value)


def _decode_by_kernels() -> WanVAEConfig:
    return WanVAEConfig(decode_kernel=True, decode_kernel_parallel=True)


@dataclass
class PAN2PipelineConfig(ActivatesOnUnpickle, PipelineConfig):
    """Defaults of the released PAN2 model.

    Attributes:
        flow_shift: replaces the shift of the checkpoint's scheduler; None keeps it.
        dit_fused_kernels: run the transformer's elementwise groups as Triton kernels; without Triton or a GPU the
            torch ops run, with one log line.
        vae_decode_kernel: decode with the fast exact decoder (``vae_config.decode_kernel``); falls back with one
            log line.
        vae_decode_kernel_parallel: split that decode over the sequence-parallel ranks
            (``vae_config.decode_kernel_parallel``).
    """

    dit_config: DiTConfig = field(default_factory=PAN2Config)
    vae_config: VAEConfig = field(default_factory=_decode_by_kernels)
    text_encoder_configs: tuple[EncoderConfig, ...] = field(default_factory=lambda: (Qwen3_5Config(),))

    flow_shift: float | None = None
    dit_precision: str = "bf16"
    dit_fused_kernels: bool = True
    vae_precision: str = "fp32"
    vae_tiling: bool = False
    vae_sp: bool = False
    text_encoder_precisions: tuple[str, ...] = ("bf16",)

    # After vae_config, which they forward to.
    vae_decode_kernel: bool | None = VaeSwitch("decode_kernel")  # type: ignore[assignment]
    vae_decode_kernel_parallel: bool | None = VaeSwitch("decode_kernel_parallel")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.vae_config.load_encoder = True
        self.vae_config.load_decoder = True

    def check_pipeline_config(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        if not self.vae_decode_kernel:
            self.vae_decode_kernel_parallel = False
        if isinstance(self.vae_config, WanVAEConfig):
            self.vae_config.check_decode()
        if self.flow_shift is not None and not 0 < self.flow_shift < math.inf:
            raise ValueError(
                f"flow_shift is {self.flow_shift}: give a positive number, or None for the checkpoint's own."
            )
        super().check_pipeline_config()
