# SPDX-License-Identifier: Apache-2.0
"""The flow-matching schedule: linearly spaced sigmas, shifted once by the scheduler."""

from __future__ import annotations

import numpy as np
from fastvideo.distributed import get_local_torch_device
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.pipelines.stages.base import PipelineStage


class PAN2TimestepPreparationStage(PipelineStage):
    """Sets ``batch.timesteps`` [num_inference_steps] in (0, 1000].

    The sigmas are given explicitly: left to itself FastVideo's scheduler spans them between bounds that its
    constructor has already shifted, and then shifts them again.
    """

    def __init__(self, scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler

    def forward(self, batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        sigmas = np.linspace(1.0, 0.0, batch.num_inference_steps + 1)[:-1]
        self.scheduler.set_timesteps(sigmas=sigmas, device=get_local_torch_device())
        batch.timesteps = self.scheduler.timesteps
        return batch
