# SPDX-License-Identifier: Apache-2.0
"""The denoising loop: float32 latents, Euler steps, classifier-free guidance in two passes."""

from __future__ import annotations

import torch
from fastvideo.distributed import get_world_group
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.forward_context import set_forward_context
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.pipelines.stages.base import PipelineStage
from fastvideo.utils import PRECISION_TO_TYPE
from tqdm.auto import tqdm


class PAN2DenoisingStage(PipelineStage):
    """Denoises ``batch.latents`` in place of the noise it finds there.

    The transformer sees [noisy latents, condition latents, mask] in its own type; the latents and the Euler update
    stay in float32. Prompt and negative prompt are not padded to one length, so guidance takes two passes, and one if
    guidance_scale <= 1.
    """

    performance_component_metric = "dit_time_s"

    def __init__(self, transformer, scheduler) -> None:
        super().__init__()
        self.transformer = transformer
        self.scheduler = scheduler

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        assert batch.latents is not None
        assert batch.timesteps is not None
        assert batch.image_latent is not None
        dtype = PRECISION_TO_TYPE[fastvideo_args.pipeline_config.dit_precision]
        latents = batch.latents
        condition = batch.image_latent.to(dtype)
        texts = [batch.prompt_embeds[0]]
        if batch.do_classifier_free_guidance:
            assert batch.negative_prompt_embeds
            texts.append(batch.negative_prompt_embeds[0])
        texts = [text.to(device=latents.device, dtype=dtype).expand(latents.shape[0], -1, -1) for text in texts]

        parked = _parked_on_cpu(fastvideo_args)
        if parked:
            self.transformer.to(latents.device)
        steps = tqdm(batch.timesteps, desc="Denoising", unit="step", disable=not get_world_group().is_first_rank)
        for index, timestep in enumerate(steps):
            model_input = torch.cat([latents.to(dtype), condition], dim=1)
            predictions = []
            for text in texts:
                with set_forward_context(current_timestep=index, attn_metadata=None, forward_batch=batch):
                    velocity = self.transformer(
                        hidden_states=model_input,
                        encoder_hidden_states=text,
                        timestep=timestep.expand(latents.shape[0]),
                    )
                predictions.append(velocity.float())
            velocity = predictions[0]
            if len(predictions) == 2:
                conditional, unconditional = predictions
                velocity = unconditional + batch.guidance_scale * (conditional - unconditional)
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        batch.latents = latents
        if parked:
            self.transformer.to("cpu")
        manager = getattr(self.transformer, "_layerwise_offload_manager", None)
        if manager is not None and manager.enabled:
            manager.release_all()
        return batch


def _parked_on_cpu(fastvideo_args: FastVideoArgs) -> bool:
    """Whether the whole transformer waits on the CPU; FSDP and layerwise offload bring their weights themselves."""
    return (
        fastvideo_args.dit_cpu_offload
        and not fastvideo_args.dit_layerwise_offload
        and not fastvideo_args.use_fsdp_inference
    )
