# SPDX-License-Identifier: Apache-2.0
"""The PAN2 pipeline: which components it loads and which stages it runs."""

from __future__ import annotations

from typing import Any

import torch
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.models.dits.pan2_fusions import set_fused_kernels
from fastvideo.pipelines.composed_pipeline_base import ComposedPipelineBase
from fastvideo.pipelines.lora_pipeline import LoRAPipeline
from fastvideo.pipelines.pan2.checkpoint import check_checkpoint, with_local_components
from fastvideo.pipelines.pan2.stages import (
    PAN2DecodingStage,
    PAN2DenoisingStage,
    PAN2ImageConditioningStage,
    PAN2InputValidationStage,
    PAN2LatentPreparationStage,
    PAN2TextEncodingStage,
    PAN2TimestepPreparationStage,
)


class PAN2Pipeline(LoRAPipeline, ComposedPipelineBase):
    """Text-to-video, and image-to-video when the request carries an image."""

    is_video_pipeline = True
    _required_config_modules = ["text_encoder", "tokenizer", "vae", "transformer", "scheduler"]  # noqa: RUF012 (upstream's list)

    def load_modules(
        self,
        fastvideo_args: FastVideoArgs,
        loaded_modules: dict[str, torch.nn.Module] | None = None,
    ) -> dict[str, Any]:
        """Checks the whole checkpoint before the first weight is read, and gives the transformer its fused kernels.

        Raises:
            ValueError: a component is missing, of the wrong class, or does not fit the number of ranks.
        """
        index = self._load_config(self.model_path)
        provided = set(loaded_modules or {})
        check_checkpoint(self.model_path, index, sp_size=fastvideo_args.sp_size, provided=provided)
        modules = super().load_modules(fastvideo_args, loaded_modules)
        set_fused_kernels(modules["transformer"], fastvideo_args.pipeline_config.dit_fused_kernels)
        return modules

    def _load_config(self, model_path: str) -> dict[str, Any]:
        return with_local_components(super()._load_config(model_path), self.model_path)

    def create_pipeline_stages(self, fastvideo_args: FastVideoArgs) -> None:
        """Adds the stages in the order they run."""
        vae, transformer, scheduler = (self.get_module(name) for name in ("vae", "transformer", "scheduler"))
        self.add_stage("input_validation_stage", PAN2InputValidationStage())
        self.add_stage(
            "prompt_encoding_stage",
            PAN2TextEncodingStage(
                text_encoders=[self.get_module("text_encoder")],
                tokenizers=[self.get_module("tokenizer")],
            ),
        )
        self.add_stage("timestep_preparation_stage", PAN2TimestepPreparationStage(scheduler))
        self.add_stage("latent_preparation_stage", PAN2LatentPreparationStage())
        self.add_stage("image_conditioning_stage", PAN2ImageConditioningStage(vae))
        self.add_stage("denoising_stage", PAN2DenoisingStage(transformer, scheduler))
        self.add_stage("decoding_stage", PAN2DecodingStage(vae, pipeline=self))
