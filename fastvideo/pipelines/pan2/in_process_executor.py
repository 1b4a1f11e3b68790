# SPDX-License-Identifier: Apache-2.0
"""Runs FastVideo's worker in the calling process, so that the same script serves ``python`` and ``torchrun``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from fastvideo.distributed import get_world_group
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.logger import init_logger
from fastvideo.pipelines.pipeline_batch_info import ForwardBatch
from fastvideo.worker.executor import Executor
from fastvideo.worker.gpu_worker import Worker

logger = init_logger(__name__)

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched_by_torchrun() -> bool:
    """True if a launcher has given this process its rank and a rendezvous (torchrun does)."""
    return all(name in os.environ for name in RENDEZVOUS)


class InProcessExecutor(Executor):
    """One rank of a ``torchrun`` job: each process calls the generator with the same arguments and joins in every
    forward.

    Results come back on every rank; pixels on the writer's (rank 0) alone.
    """

    def _init_executor(self) -> None:
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.is_writer = rank == 0
        self.worker = Worker(self.fastvideo_args, local_rank, rank, "env://")
        self.worker.init_device()

    @staticmethod
    def adopt_world(fastvideo_args: FastVideoArgs) -> None:
        """Takes the launcher's number of ranks where the script left ``num_gpus`` at 1.

        Raises:
            ValueError: the script asks for another number of ranks than were launched.
        """
        world_size = int(os.environ["WORLD_SIZE"])
        if fastvideo_args.num_gpus == world_size:
            return
        if fastvideo_args.num_gpus != 1:
            raise ValueError(
                f"num_gpus is {fastvideo_args.num_gpus} but torchrun started {world_size} processes: "
                f"pass num_gpus={world_size}, or leave it out."
            )
        logger.info("Using the %d processes that torchrun started, all for sequence parallelism.", world_size)
        fastvideo_args.num_gpus = fastvideo_args.sp_size = fastvideo_args.hsdp_shard_dim = world_size

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, over the CPU group; all ranks call it."""
        group = get_world_group()
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    def execute_forward(self, forward_batch: ForwardBatch, fastvideo_args: FastVideoArgs) -> ForwardBatch:
        """Runs the pipeline on this rank; all ranks must call it with the same request."""
        return self.worker.execute_forward(forward_batch, fastvideo_args)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a worker method by name, or ``method(worker, ...)``, here; every rank makes the same call.
        ``timeout`` has no use here.
        """
        if callable(method):
            return [method(self.worker, *args, **(kwargs or {}))]
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def set_lora_adapter(
        self, lora_nickname: str, lora_path: str | None = None, strength: float = 1.0, accumulate: bool = False
    ) -> None:
        """Sets the adapter on this rank; every rank makes the same call. RuntimeError if the pipeline takes none."""
        self._checked(self.worker.set_lora_adapter(lora_nickname, lora_path, strength=strength, accumulate=accumulate))

    def merge_lora_weights(self) -> None:
        """Merges the adapter's weights; RuntimeError if the pipeline takes none."""
        self._checked(self.worker.merge_lora_weights())

    def unmerge_lora_weights(self) -> None:
        """Takes the adapter's weights out again; RuntimeError if the pipeline takes none."""
        self._checked(self.worker.unmerge_lora_weights())

    @staticmethod
    def _checked(response: dict[str, Any]) -> None:
        if response["status"].startswith("failed"):
            raise RuntimeError(f"The LoRA call {response['status']}.")

    def set_log_queue(self, log_queue: Any) -> None:
        """Nothing to forward: the worker logs in this process."""

    def clear_log_queue(self) -> None:
        """Nothing to forward: the worker logs in this process."""

    def shutdown(self) -> None:
        """Destroys the process groups; a second call does nothing."""
        worker, self.worker = getattr(self, "worker", None), None
        if worker is not None:
            worker.shutdown()
