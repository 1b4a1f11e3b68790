# SPDX-License-Identifier: Apache-2.0
"""Makes FastVideo 0.2.1 run where there is no CUDA device, for a first look and for tests.

FastVideo names CUDA or Apple's GPUs as its only homes. Installed by ``import fastvideo.pipelines.pan2`` on machines
without CUDA only; each function below corrects the upstream place that it names.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from fastvideo.logger import init_logger

logger = init_logger(__name__)


def install() -> None:
    """Applies every correction, once per process."""
    _use_cpu_device()
    _attend_with_sdpa()
    _skip_nccl_warmup()
    _keep_weights_in_place()
    _ignore_cuda_synchronize()
    _autocast_on_the_cpu()


def cpu_device() -> torch.device:
    """Stands in for ``get_local_torch_device``, which knows CUDA, NPU and else Apple's "mps"."""
    return torch.device("cpu")


def _use_cpu_device() -> None:
    # distributed/parallel_state.py:891, imported by name into many modules.
    from fastvideo.distributed import parallel_state

    upstream = parallel_state.get_local_torch_device
    for name, module in list(sys.modules.items()):
        if name.startswith("fastvideo") and getattr(module, "get_local_torch_device", None) is upstream:
            module.get_local_torch_device = cpu_device  # type: ignore[attr-defined]


def _attend_with_sdpa() -> None:
    # platforms/cpu.py has no get_attn_backend_cls.
    from fastvideo.platforms.cpu import CpuPlatform

    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *_: "fastvideo.attention.backends.sdpa.SDPABackend")


def _skip_nccl_warmup() -> None:
    # distributed/communication_op.py:118 warms NCCL up with CUDA tensors.
    from fastvideo.distributed import communication_op

    communication_op._sp_warmup_done = True


def _keep_weights_in_place() -> None:
    # models/loader/component_loader.py:482 and fsdp_load.py:229 build a CUDA mesh for every kind of offload, and
    # entrypoints/video_generator.py:796 pins host memory. Neither means anything when the CPU is the device.
    from fastvideo.fastvideo_args import UNIFIED_MEMORY_OFFLOAD_FLAGS, FastVideoArgs

    upstream = FastVideoArgs.check_fastvideo_args

    def check_fastvideo_args(self: FastVideoArgs) -> None:
        for flag in (*UNIFIED_MEMORY_OFFLOAD_FLAGS, "pin_cpu_memory", "use_fsdp_inference"):
            setattr(self, flag, False)
        upstream(self)

    FastVideoArgs.check_fastvideo_args = check_fastvideo_args


def _ignore_cuda_synchronize() -> None:
    # pipelines/stages/base.py:123 synchronises CUDA around each stage when FASTVIDEO_STAGE_LOGGING is set.
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]


class _TorchOfTheCpu:
    """``torch`` for modules that name "cuda" wherever they enter autocast."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def autocast(device_type: str, **options: Any) -> torch.autocast:
        return torch.autocast("cpu", **options)


def _autocast_on_the_cpu() -> None:
    # pipelines/stages/denoising.py:465,595 and decoding.py:180,249 autocast "cuda", which without CUDA has no effect:
    # Wan's float32 text embeddings then meet bfloat16 weights.
    from fastvideo.pipelines.stages import decoding, denoising

    for stage in (denoising, decoding):
        stage.torch = _TorchOfTheCpu()
