# SPDX-License-Identifier: Apache-2.0
"""Checks the request once more where it runs, and turns its seed and image into generators and pixels."""

from __future__ import annotations

import torch
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.pipelines.pan2.requests import check_request
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.pipelines.stages.base import PipelineStage


class PAN2InputValidationStage(PipelineStage):
    """Fills ``seeds``, ``generator`` (one CPU generator per video, so that results do not depend on device or ranks)
    and ``pil_image``.
    """

    def forward(self, batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        """Raises ValueError for a request that PAN2 cannot serve."""
        batch.pil_image = check_request(batch)
        assert batch.seed is not None
        if batch.negative_prompt is None:  # the typed API's default
            batch.negative_prompt = ""
        batch.seeds = [batch.seed + index for index in range(batch.num_videos_per_prompt)]
        batch.generator = [torch.Generator("cpu").manual_seed(seed) for seed in batch.seeds]
        return batch
