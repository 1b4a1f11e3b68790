# SPDX-License-Identifier: Apache-2.0
"""Refuses to activate beside a FastVideo that this overlay does not fit.

pip overwrites silently: a FastVideo release that ships PAN2 itself would own the same paths as this wheel, and
whichever was installed last would win. The installed RECORDs tell, and so does a look at the upstream names that
this overlay reaches for.
"""

from __future__ import annotations

import functools
import importlib
from importlib import metadata

OVERLAY = "fastvideo-pan2"
UPSTREAM = "fastvideo"

# What registration, the generator's wrappers, the executor, the stages and the CPU preview replace or call.
RELIED_ON = {
    "fastvideo.api.presets": ("InferencePreset", "PresetStageSpec", "register_preset"),
    "fastvideo.distributed.communication_op": ("_sp_warmup_done",),
    "fastvideo.distributed.parallel_state": ("get_local_torch_device", "get_sp_group", "get_world_group"),
    "fastvideo.entrypoints.video_generator": (
        "VideoGenerator.from_fastvideo_args",
        "VideoGenerator._generate_single_video",
    ),
    "fastvideo.fastvideo_args": ("FastVideoArgs.check_fastvideo_args", "UNIFIED_MEMORY_OFFLOAD_FLAGS"),
    "fastvideo.models.registry": ("ModelRegistry.models", "ModelRegistry.register_model"),
    "fastvideo.models.vaes.wanvae": ("AutoencoderKLWan.decode", "AutoencoderKLWan.streaming_decode"),
    "fastvideo.pipelines.pipeline_registry": ("_import_pipeline_classes_cached",),
    "fastvideo.pipelines.stages.decoding": ("DecodingStage._denormalize_latents",),
    "fastvideo.pipelines.stages.text_encoding": ("TextEncodingStage.encode_text",),
    "fastvideo.registry": (
        "_CONFIG_REGISTRY",
        "_MODEL_NAME_DETECTORS",
        "_PIPELINE_REGISTRY",
        "get_model_info",
        "register_configs",
    ),
    "fastvideo.worker.executor": ("Executor",),
    "fastvideo.worker.gpu_worker": ("Worker.execute_forward", "Worker.init_device"),
}


def _installed_files(distribution: str) -> set[str]:
    files = metadata.distribution(distribution).files or ()
    return {str(file) for file in files if ".dist-info" not in str(file) and not str(file).endswith(".pyc")}


def _has(module: object, path: str) -> bool:
    try:
        functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        return False
    return True


def check_ownership() -> None:
    """Raises ImportError if a file of this overlay belongs to the installed FastVideo too."""
    try:
        ours, theirs = _installed_files(OVERLAY), _installed_files(UPSTREAM)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed as a package, so {OVERLAY}'s files cannot be told from FastVideo's; "
            f"run `pip install {error.name}`."
        ) from None
    contested = sorted(ours & theirs)
    if contested:
        raise ImportError(
            f"fastvideo {metadata.version(UPSTREAM)} owns {len(contested)} file(s) of {OVERLAY} ({contested[0]}, ...); "
            f"uninstall {OVERLAY} and reinstall fastvideo to use its own PAN2, or install the fastvideo that {OVERLAY} "
            "is pinned to."
        )


def check_names() -> None:
    """Raises ImportError if an upstream name that this overlay builds on is gone."""
    missing = [
        f"{module}.{name}"
        for module, names in RELIED_ON.items()
        for name in names
        if not _has(importlib.import_module(module), name)
    ]
    if missing:
        raise ImportError(
            f"{OVERLAY} builds on names that fastvideo {metadata.version(UPSTREAM)} does not have: "
            f"{', '.join(missing)}; install the fastvideo that {OVERLAY} is pinned to."
        )
