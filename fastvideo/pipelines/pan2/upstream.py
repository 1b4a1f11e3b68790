# SPDX-License-Identifier: Apache-2.0
"""Refuses to activate beside a FastVideo that this overlay does not fit.

pip overwrites silently: a FastVideo release that ships PAN2 itself would own the same paths as this wheel, and
    whichever was installed last would win. The installed RECORDs tell, and so does a look at the upstream names that
    registration reaches for.
"""

from __future__ import annotations

import importlib
from importlib import metadata

OVERLAY = "fastvideo-pan2"
UPSTREAM = "fastvideo"

# What registration, the executor and the CPU preview replace or call, by module.
RELIED_ON = {
    "fastvideo.api.presets": ("InferencePreset", "PresetStageSpec", "register_preset"),
    "fastvideo.entrypoints.video_generator": ("VideoGenerator",),
    "fastvideo.models.registry": ("ModelRegistry",),
    "fastvideo.pipelines.pipeline_registry": ("_import_pipeline_classes_cached",),
    "fastvideo.registry": ("_CONFIG_REGISTRY", "_PIPELINE_REGISTRY", "get_model_info", "register_configs"),
    "fastvideo.worker.executor": ("Executor",),
}


def _installed_files(distribution: str) -> set[str]:
    files = metadata.distribution(distribution).files or ()
    return {str(file) for file in files if ".dist-info" not in str(file) and not str(file).endswith(".pyc")}


def check_ownership() -> None:
    """Raises ImportError if a file of this overlay belongs to the installed FastVideo too."""
    try:
        ours = _installed_files(OVERLAY)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"{OVERLAY} is not installed as a package, so its files cannot be told from FastVideo's; "
            f"run `pip install {OVERLAY}`."
        ) from None
    contested = sorted(ours & _installed_files(UPSTREAM))
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
        if not hasattr(importlib.import_module(module), name)
    ]
    if missing:
        raise ImportError(
            f"{OVERLAY} builds on names that fastvideo {metadata.version(UPSTREAM)} does not have: "
            f"{', '.join(missing)}; install the fastvideo that {OVERLAY} is pinned to."
        )
