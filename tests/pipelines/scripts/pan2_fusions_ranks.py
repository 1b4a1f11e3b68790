# SPDX-License-Identifier: Apache-2.0
"""A transformer with fused kernels on several sequence-parallel ranks: ``pan2_fusions_ranks.py CASES OUT RANKS``.

Saves the outputs of each rank, and which ops made them, as ``OUT.<rank>``.
"""

import os
import sys

import fastvideo.pipelines.pan2  # noqa: F401  (on a CPU: the device, the attention backend)
import torch
from fastvideo.configs.models.dits.pan2 import PAN2Config
from fastvideo.distributed import cleanup_dist_env_and_memory, maybe_init_distributed_environment_and_model_parallel
from fastvideo.forward_context import set_forward_context
from fastvideo.models.dits.pan2 import PAN2Transformer3DModel
from fastvideo.models.dits.pan2_fusions import FUSED_OPS, set_fused_kernels
from forked_ranks import run_forked


def run_rank(rank: int, ranks: int, cases_file: str, out: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    saved = torch.load(cases_file)
    maybe_init_distributed_environment_and_model_parallel(
        tp_size=1, sp_size=ranks, distributed_init_method=f"file://{out}.rendezvous"
    )
    config = PAN2Config()
    config.update_model_arch(saved["config"])
    model = PAN2Transformer3DModel(config, hf_config={}).requires_grad_(False)
    model.load_state_dict(saved["weights"])
    set_fused_kernels(model, True)
    with torch.no_grad(), set_forward_context(current_timestep=0, attn_metadata=None):
        outputs = [model(**case) for case in saved["cases"]]
    torch.save({"outputs": outputs, "ops": "fused" if model.ops is FUSED_OPS else "torch"}, f"{out}.{rank}")
    cleanup_dist_env_and_memory()


def main(cases_file: str, out: str, rank_count: str) -> None:
    torch.set_num_threads(1)
    run_forked(run_rank, int(rank_count), cases_file, out, timeout=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
