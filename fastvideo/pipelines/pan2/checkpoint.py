# SPDX-License-Identifier: Apache-2.0
"""Checks a PAN2 checkpoint folder by its small JSON files and weight headers, before any model is built."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from fastvideo.configs.models.dits.pan2 import PAN2ArchConfig, PAN2Config
from fastvideo.configs.models.vaes.wan22_decode import WanVAEConfig
from fastvideo.models.dits import pan2_checkpoint
from fastvideo.pipelines.pan2.text import tokenize_prompt

# `_class_name` of model_index.json or modular_model_index.json, in lower case as FastVideo's detectors see it.
CHECKPOINT_CLASSES = ("pan2pipeline", "pan2modularpipeline")
# Component folder -> class names that FastVideo can load for PAN2, as written in its own config.
COMPONENTS: dict[str, tuple[str, ...]] = {
    "transformer": ("PAN2Transformer3DModel",),
    "vae": ("AutoencoderKLWan",),
    "text_encoder": ("Qwen3_5TextModel", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5Model"),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    "tokenizer": (),
}
CONFIG_FILES = {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json"}
INDEX_FILES = ("model_index.json", "modular_model_index.json")


def read_index(model_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The folder's model_index.json or modular_model_index.json; ValueError if it has neither or it is not JSON."""
    for name in INDEX_FILES:
        file = Path(model_path, name)
        if file.is_file():
            return _read_json(file)
    raise ValueError(
        f"{model_path} holds neither {' nor '.join(INDEX_FILES)}: give the folder of a PAN2 checkpoint in diffusers "
        "layout."
    )


def is_pan2(path_or_class: str) -> bool:
    """Detector for FastVideo's registry: true for the class names of a PAN2 checkpoint, never for a mere path."""
    return path_or_class.lower() in CHECKPOINT_CLASSES


def is_pan2_folder(model_path: str | os.PathLike[str]) -> bool:
    """Whether a folder's index names a PAN2 pipeline."""
    try:
        return is_pan2(str(read_index(model_path).get("_class_name")))
    except ValueError:
        return False


def with_local_components(index: Mapping[str, Any], model_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The index with the components filled in that a modular one leaves open, [null, null, {"type_hint": ...}],
    although their folders are there.
    """
    filled = dict(index)
    for name in COMPONENTS:
        entry = index.get(name)
        if isinstance(entry, list) and len(entry) > 2 and entry[0] is None and Path(model_path, name).is_dir():
            hint = entry[2].get("type_hint") if isinstance(entry[2], Mapping) else None
            if isinstance(hint, list) and len(hint) == 2:
                filled[name] = [*hint, entry[2]]
    return filled


def check_checkpoint(
    model_path: str | os.PathLike[str],
    index: Mapping[str, Any],
    *,
    sp_size: int = 1,
    provided: Collection[str] = (),
) -> None:
    """Checks that every component is there, of a class we load, with all its weights, and fits the others and the
    ranks.

    Args:
        model_path: the checkpoint folder.
        index: its model_index.json or modular_model_index.json.
        sp_size: sequence-parallel ranks.
        provided: components that the caller brings along and that need no folder.

    Raises:
        ValueError: what is missing or wrong, where, and what to do.
        FileNotFoundError: a weight file is missing.
    """
    index = with_local_components(index, model_path)
    folders = {name: Path(model_path, name) for name in COMPONENTS if name not in provided}
    configs = {name: _component_config(folder, name, index) for name, folder in folders.items()}
    if "transformer" in configs:
        arch = _transformer_arch(folders["transformer"], configs["transformer"])
        arch.check_sequence_parallel(sp_size)
        _check_fit(model_path, arch, configs)
        pan2_checkpoint.check_checkpoint(folders["transformer"], PAN2Config(arch_config=arch))
    if "vae" in configs:
        shapes = _vae_shapes(folders["vae"], configs["vae"])
        pan2_checkpoint.compare_tensors(folders["vae"], shapes, "the VAE")
    if "text_encoder" in configs:
        pan2_checkpoint.stored_shapes(folders["text_encoder"])
    if "tokenizer" in configs:
        check_tokenizer(folders["tokenizer"])


def _component_config(folder: Path, name: str, index: Mapping[str, Any]) -> dict[str, Any]:
    """A component's own config, if the index lists it and its class is one that we load."""
    entry = index.get(name)
    if not isinstance(entry, list) or not entry or entry[0] is None:
        raise ValueError(f"The index of {folder.parent} does not list a {name}: PAN2 needs {', '.join(COMPONENTS)}.")
    file = folder / CONFIG_FILES.get(name, "config.json")
    if not file.is_file():
        raise ValueError(f"The PAN2 checkpoint {folder.parent} lacks {name}/{file.name}: download or copy it again.")
    config = _read_json(file)
    classes = COMPONENTS[name]
    found = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    if classes and found not in classes:
        raise ValueError(f"{name} of {folder.parent} is a {found}: PAN2 needs {' or '.join(classes)}.")
    return config


def _transformer_arch(folder: Path, config: Mapping[str, Any]) -> PAN2ArchConfig:
    known = {field.name for field in dataclasses.fields(PAN2ArchConfig)}
    try:
        return PAN2ArchConfig(**{name: value for name, value in config.items() if name in known})
    except TypeError as error:
        raise ValueError(f"{folder / 'config.json'} has a value of the wrong type ({error}).") from error


def _check_fit(
    model_path: str | os.PathLike[str], arch: PAN2ArchConfig, configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares the widths at which the components meet."""
    text = configs.get("text_encoder", {})
    text = text.get("text_config") or text
    meetings = (
        ("vae's z_dim", configs.get("vae", {}).get("z_dim"), "out_channels", arch.out_channels),
        ("text encoder's hidden_size", text.get("hidden_size"), "text_embed_dim", arch.text_embed_dim),
    )
    for theirs, found, ours, needed in meetings:
        if found is not None and found != needed:
            raise ValueError(
                f"The components of {model_path} do not fit together: the {theirs} is {found}, "
                f"the transformer's {ours} is {needed}."
            )
    if configs.get("scheduler", {}).get("use_dynamic_shifting"):
        raise ValueError(f"The scheduler of {model_path} uses dynamic shifting: PAN2's schedule has one fixed shift.")


def _vae_shapes(folder: Path, config: Mapping[str, Any]) -> pan2_checkpoint.Shapes:
    """Name and shape of every tensor of FastVideo's VAE, built without memory."""
    from fastvideo.models.vaes.wan22_decode import AutoencoderKLWan

    vae_config = WanVAEConfig()
    try:
        vae_config.update_model_arch(dict(config))
        with torch.device("meta"):
            vae = AutoencoderKLWan(vae_config)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{folder / 'config.json'} does not describe a Wan VAE ({error}).") from error
    _check_normalisation(folder / "config.json", vae_config.arch_config)
    return {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}


def _check_normalisation(file: Path, arch: Any) -> None:
    """Raises ValueError if the latents' mean and deviation would leave no picture of any video."""
    if not all(map(math.isfinite, arch.latents_mean)):
        raise ValueError(f"{file} gives a latents_mean that is not finite: download or copy it again.")
    if not all(0 < value < math.inf for value in arch.latents_std):
        raise ValueError(f"{file} gives a latents_std that is not positive and finite: download or copy it again.")


def check_tokenizer(folder: Path) -> None:
    """Raises ValueError if the tokenizer cannot be loaded, or if PAN2 cannot find the prompt in its chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(f"The tokenizer in {folder} cannot be loaded ({error}): download or copy it again.") from error
    tokenize_prompt(tokenizer, "")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read as JSON ({error}): download or copy it again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} holds a {type(content).__name__} where an object is needed: download or copy it again."
        )
    return content
