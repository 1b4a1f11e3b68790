# SPDX-License-Identifier: Apache-2.0
"""Sampling defaults of the released PAN2 model.

FastVideo picks the preset by checkpoint, not by name, and one checkpoint serves both workloads, so the two presets
share their values; whoever wants others passes them with the request.
"""

from fastvideo.api.presets import InferencePreset, PresetStageSpec

MODEL_FAMILY = "pan2"

_DENOISE = PresetStageSpec(
    name="denoise",
    kind="denoising",
    description="Flow-matching Euler steps with two-pass classifier-free guidance",
    allowed_overrides=frozenset({"num_inference_steps", "guidance_scale"}),
)

_DEFAULTS = {
    "height": 704,
    "width": 1248,
    "num_frames": 313,
    "fps": 24,
    "num_inference_steps": 50,
    "guidance_scale": 2.5,
    "negative_prompt": "",
}

PAN2_T2V = InferencePreset(
    name="pan2_t2v",
    version=1,
    model_family=MODEL_FAMILY,
    description="PAN2 text-to-video, 704x1248, 313 frames (13 s at 24 fps)",
    workload_type="t2v",
    stage_schemas=(_DENOISE,),
    defaults=dict(_DEFAULTS),
)

PAN2_I2V = InferencePreset(
    name="pan2_i2v",
    version=1,
    model_family=MODEL_FAMILY,
    description="PAN2 image-to-video, 704x1248, 313 frames, the image as first frame",
    workload_type="i2v",
    stage_schemas=(_DENOISE,),
    defaults=dict(_DEFAULTS),
)
