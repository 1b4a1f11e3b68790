# SPDX-License-Identifier: Apache-2.0
"""FastVideo's Wan2.2 TI2V-5B pipeline configs with the decoder's switches in their ``vae_config``.

Each keeps the name of the config that it extends (upstream compares names in places) and is otherwise the same.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastvideo.configs.models.vaes.base import VAEConfig
from fastvideo.configs.models.vaes.wan22_decode import WanVAEConfig
from fastvideo.configs.pipelines import wan
from fastvideo.configs.pipelines.pan2 import ActivatesOnUnpickle


class _DecodeSwitches(ActivatesOnUnpickle):
    """Turns whatever ``vae_config`` a Wan config makes into ours."""

    vae_config: VAEConfig

    def __post_init__(self) -> None:
        if not isinstance(self.vae_config, WanVAEConfig):
            theirs = self.vae_config
            self.vae_config = WanVAEConfig(**{f.name: getattr(theirs, f.name) for f in fields(theirs) if f.init})
        super().__post_init__()  # type: ignore[misc]

    def check_pipeline_config(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        self.vae_config.check_decode()
        super().check_pipeline_config()  # type: ignore[misc]


@dataclass
class Wan2_2_TI2V_5B_Config(_DecodeSwitches, wan.Wan2_2_TI2V_5B_Config):
    """Wan2.2 TI2V-5B."""


@dataclass
class FastWan2_2_TI2V_5B_Config(_DecodeSwitches, wan.FastWan2_2_TI2V_5B_Config):
    """FastWan2.2 TI2V-5B, distilled to three steps."""


@dataclass
class LucyEditDevConfig(_DecodeSwitches, wan.LucyEditDevConfig):
    """Lucy Edit Dev, video editing on Wan2.2 TI2V-5B."""


EXTENDED = {
    wan.Wan2_2_TI2V_5B_Config: Wan2_2_TI2V_5B_Config,
    wan.FastWan2_2_TI2V_5B_Config: FastWan2_2_TI2V_5B_Config,
    wan.LucyEditDevConfig: LucyEditDevConfig,
}
