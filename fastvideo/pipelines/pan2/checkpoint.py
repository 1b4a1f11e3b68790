# SPDX-License-Identifier: Apache-2.0
"""Checks a PAN2 checkpoint folder by its small JSON files and weight headers, before any model is built."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fastvideo.configs.models.dits.pan2 import PAN2ArchConfig, PAN2Config
from fastvideo.models.dits import pan2_checkpoint
from fastvideo.pipelines.pan2.text import tokenize_prompt

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


def check_checkpoint(
    model_path: str | os.PathLike[str],
    index: Mapping[str, Any],
    *,
    sp_size: int = 1,
    provided: Collection[str] = (),
) -> None:
    """Checks that every component is there, of a class we load, and divisible over the ranks.

    Args:
        model_path: the checkpoint folder.
        index: its model_index.json or modular_model_index.json.
        sp_size: sequence-parallel ranks.
        provided: components that the caller brings along and that need no folder.

    Raises:
        ValueError: what is missing or wrong, where, and what to do.
    """
    for name, classes in COMPONENTS.items():
        if name in provided:
            continue
        entry = index.get(name)
        folder = Path(model_path, name)
        if not isinstance(entry, list) or not entry or entry[0] is None:
            raise ValueError(f"The index of {model_path} does not list a {name}: PAN2 needs {', '.join(COMPONENTS)}.")
        config_file = folder / CONFIG_FILES.get(name, "config.json")
        if not config_file.is_file():
            raise ValueError(
                f"The PAN2 checkpoint {model_path} lacks {name}/{config_file.name}: download or copy it again."
            )
        config = _read_json(config_file)
        if classes:
            found = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
            if found not in classes:
                raise ValueError(f"{name} of {model_path} is a {found}: PAN2 needs {' or '.join(classes)}.")
        if name == "transformer":
            check_transformer(folder, config, sp_size)
        elif name == "tokenizer":
            check_tokenizer(folder)


def check_transformer(folder: Path, config: Mapping[str, Any], sp_size: int) -> None:
    """Checks the transformer's fields, its heads against the ranks, and every name and shape of its weights.

    Raises:
        ValueError: lists all that is wrong with the weights in one message.
    """
    known = {field.name for field in dataclasses.fields(PAN2ArchConfig)}
    arch = PAN2ArchConfig(**{name: value for name, value in config.items() if name in known})
    arch.check_sequence_parallel(sp_size)
    pan2_checkpoint.check_checkpoint(folder, PAN2Config(arch_config=arch))


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
