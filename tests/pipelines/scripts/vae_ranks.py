# SPDX-License-Identifier: Apache-2.0
"""The VAE's decode on several sequence-parallel ranks: ``vae_ranks.py OUT RANKS...``.

Every rank goes through the same scenarios, some of which inject a fault on the last rank, and saves what it saw as
``OUT.<ranks>.<rank>``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fastvideo.pipelines.pan2  # noqa: F401  (on a CPU: the device)
import torch
import torch.distributed as dist
from fastvideo.distributed import cleanup_dist_env_and_memory, maybe_init_distributed_environment_and_model_parallel
from fastvideo.models.vaes import wan22_decode
from fastvideo.models.vaes.wan22_decode import AutoencoderKLWan
from forked_ranks import run_forked
from vae_tiny import tiny_latents, tiny_vae

from wan22_vae_decode import Decoder, OutOfMemoryError, module_decoder, weights
from wan22_vae_decode.backends.torch import TorchBackend

KERNEL = {"decode_kernel": True, "decode_backend": "torch"}
PARALLEL = KERNEL | {"decode_kernel_parallel": True}
TILES = {"use_feature_cache": False, "use_tiling": True, "use_parallel_tiling": True}


class Rank:
    """One rank's scenarios and their outcomes."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        logging.getLogger(wan22_decode.__name__).addHandler(handler)
        self.prepared = 0
        self.outcomes: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        upstream = Decoder.from_state_dict

        def from_state_dict(*arguments: Any, **options: Any) -> Decoder:
            self.prepared += 1
            return upstream(*arguments, **options)

        with mock.patch.object(Decoder, "from_state_dict", from_state_dict):
            yield

    def on_last(self, *arguments: Any, **options: Any) -> contextlib.AbstractContextManager:
        """``mock.patch.object`` on the last rank, nothing on the others."""
        return mock.patch.object(*arguments, **options) if self.is_last else contextlib.nullcontext()

    def decode(self, name: str, vae: Any, z: torch.Tensor, only_first: bool = False, frames: bool = False) -> None:
        video, error, start = None, None, time.monotonic()
        try:
            with torch.no_grad():
                if frames and self.is_first:
                    # The others follow the writer, whatever was asked of them.
                    video = vae.frames_on_first_rank(z, is_writer=True)
                else:
                    video = vae.decode_on_first_rank(z, is_writer=self.is_first) if only_first else vae.decode(z)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        self.outcomes[name] = {
            "video": video,
            "error": error,
            "seconds": time.monotonic() - start,
            "report": vae.decode_report(),
            "lines": self.lines.copy(),
            "prepared": self.prepared,
        }
        self.lines.clear()
        self.prepared = 0


def raising(error: Exception) -> Callable:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def sum_over_ranks(vae: Any, z: torch.Tensor) -> torch.Tensor:
    total = z.clone()
    dist.all_reduce(total)
    return total


def run(rank: Rank) -> None:
    long, short = tiny_latents(frames=9, rows=5), tiny_latents(frames=3, rows=5)
    vae = tiny_vae(**PARALLEL)
    rank.decode("long", vae, long)
    rank.decode("short", vae, short)
    rank.decode("only the first", vae, short, only_first=True)
    rank.decode("frames, only the first", vae, short, only_first=True, frames=True)
    rank.decode("one row", vae, tiny_latents(frames=2, rows=1))
    rank.decode("one row, only the first", vae, tiny_latents(frames=2, rows=1), only_first=True)

    for name, switches in {"off": {}, "each alone": KERNEL}.items():
        rank.decode(name, tiny_vae(**switches), short)
        rank.decode(f"{name}, only the first", tiny_vae(**switches), short, only_first=True)

    # Upstream's own way to share a decode; over gloo its exchange of tiles fails, whence a simpler one.
    with mock.patch.object(AutoencoderKLWan, "parallel_tiled_decode", sum_over_ranks):
        for name, switches in {"tiles": TILES, "tiles, on": TILES | PARALLEL}.items():
            rank.decode(name, tiny_vae(**switches), short, only_first=True)

    if rank.is_last:
        # The same values: only the identity of a tensor has changed.
        vae.decoder.conv_in.bias = torch.nn.Parameter(vae.decoder.conv_in.bias.clone(), requires_grad=False)
    rank.decode("replaced on one rank", vae, short)

    gamma = vae.decoder.norm_out.gamma
    if rank.is_last:
        vae.decoder.norm_out.gamma = torch.nn.Parameter(gamma[:1] * 0 + 1, requires_grad=False)
    rank.decode("bad weights", vae, short)
    vae.decoder.norm_out.gamma = gamma
    rank.decode("good weights again", vae, short)

    out_of_memory = torch.OutOfMemoryError("CUDA out of memory")
    faults: dict[str, tuple] = {
        "no kernels": (module_decoder, "why_not", lambda *_, **__: "no kernels for this GPU"),
        "no memory to look at the weights": (module_decoder, "signature", raising(out_of_memory)),
        "no memory to prepare": (weights, "prepare", raising(out_of_memory)),
        "no memory for a pass": (TorchBackend, "reserve", raising(OutOfMemoryError("full"))),
    }
    for name, (owner, attribute, fault) in faults.items():
        vae = tiny_vae(**PARALLEL)
        with rank.on_last(owner, attribute, fault):
            rank.decode(name, vae, short)
            rank.decode(f"{name}, again", vae, short)
            rank.decode(f"{name}, only the first", vae, short, only_first=True)
        rank.decode(f"{name}, mended", vae, short)

    with rank.on_last(TorchBackend, "time_double", raising(out_of_memory)):
        rank.decode("in the middle", vae, short)
    rank.decode("in the middle, mended", vae, short)


def run_rank(rank: int, ranks: int, out: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    # A rank whose neighbour failed in a pass learns of it no sooner.
    os.environ["WAN22_VAE_DECODE_TIMEOUT"] = "5"
    maybe_init_distributed_environment_and_model_parallel(
        tp_size=1, sp_size=ranks, distributed_init_method=f"file://{out}.{ranks}.rendezvous"
    )
    this = Rank(rank, ranks)
    with this.counting():
        run(this)
    torch.save(this.outcomes, f"{out}.{ranks}.{rank}")
    cleanup_dist_env_and_memory()


def main(out: str, *rank_counts: str) -> None:
    torch.set_num_threads(1)
    for ranks in map(int, rank_counts):
        run_forked(run_rank, ranks, out, timeout=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
