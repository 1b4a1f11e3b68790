# SPDX-License-Identifier: Apache-2.0
"""The stages of a PAN2 generation whose contract differs from FastVideo's shared ones, one file each, in the order
they run.
"""

from fastvideo.pipelines.pan2.stages.decoding import PAN2DecodingStage
from fastvideo.pipelines.pan2.stages.denoising import PAN2DenoisingStage
from fastvideo.pipelines.pan2.stages.image_conditioning import PAN2ImageConditioningStage
from fastvideo.pipelines.pan2.stages.input_validation import PAN2InputValidationStage
from fastvideo.pipelines.pan2.stages.latent_preparation import PAN2LatentPreparationStage
from fastvideo.pipelines.pan2.stages.text_encoding import PAN2TextEncodingStage
from fastvideo.pipelines.pan2.stages.timestep_preparation import PAN2TimestepPreparationStage

__all__ = [
    "PAN2DecodingStage",
    "PAN2DenoisingStage",
    "PAN2ImageConditioningStage",
    "PAN2InputValidationStage",
    "PAN2LatentPreparationStage",
    "PAN2TextEncodingStage",
    "PAN2TimestepPreparationStage",
]
