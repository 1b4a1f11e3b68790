# SPDX-License-Identifier: Apache-2.0
"""The transformer alone on several sequence-parallel ranks: ``transformer_ranks.py CASES OUT RANKS...``.

Runs the cases of the file CASES and saves the outputs of every rank as ``OUT.<ranks>.<rank>``.
"""

import os
import sys

import fastvideo.pipelines.pan2  # noqa: F401  (on a CPU: the device, the attention backend)
import torch
from fastvideo.configs.models.dits.pan2 import PAN2Config
from fastvideo.distributed import cleanup_dist_env_and_memory, maybe_init_distributed_environment_and_model_parallel
from fastvideo.forward_context import set_forward_context
from fastvideo.models.dits.pan2 import PAN2Transformer3DModel
from forked_ranks import run_forked


def run_rank(rank: int, ranks: int, cases_file: str, out: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    saved = torch.load(cases_file)
    maybe_init_distributed_environment_and_model_parallel(
        tp_size=1, sp_size=ranks, distributed_init_method=f"file://{out}.{ranks}.rendezvous"
    )
    config = PAN2Config()
    config.update_model_arch(saved["config"])
    model = PAN2Transformer3DModel(config, hf_config={})
    model.load_state_dict(saved["weights"])
    with torch.no_grad(), set_forward_context(current_timestep=0, attn_metadata=None):
        outputs = [model(**case) for case in saved["cases"]]
    torch.save(outputs, f"{out}.{ranks}.{rank}")
    cleanup_dist_env_and_memory()


def main(cases_file: str, out: str, *rank_counts: str) -> None:
    torch.set_num_threads(1)
    for ranks in map(int, rank_counts):
        run_forked(run_rank, ranks, cases_file, out, timeout=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
