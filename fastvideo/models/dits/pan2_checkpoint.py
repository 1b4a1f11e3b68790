# SPDX-License-Identifier: Apache-2.0
"""Compares the tensors of a transformer checkpoint with the model's before any of them is read.

FastVideo's loader stops at the first tensor it does not know; here every difference is in one error.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from fastvideo.configs.models.dits.pan2 import PAN2Config
from safetensors import SafetensorError, safe_open

Shapes = dict[str, tuple[int, ...]]


def check_checkpoint(folder: str | Path, config: PAN2Config) -> None:
    """Check that ``folder`` holds exactly the tensors of a PAN2 transformer of this configuration.

    Only the headers of the safetensors files are read.

    Args:
        folder: the checkpoint's ``transformer`` folder.
        config: configuration with the folder's ``config.json`` applied.

    Raises:
        FileNotFoundError: the folder has no safetensors files, or its index names files that are absent.
        ValueError: a file is damaged, or tensors are missing, unexpected, misshapen or stored twice; all are listed.
    """
    compare_tensors(Path(folder), expected_shapes(config), "the PAN2 transformer")


def compare_tensors(folder: Path, expected: Shapes, what: str) -> None:
    """Check that ``folder`` holds exactly the expected tensors; raises as `check_checkpoint` does."""
    found, repeated = stored_shapes(folder)
    misshapen = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    complaints = {
        "missing": summarise_names(expected.keys() - found.keys()),
        "unexpected": summarise_names(found.keys() - expected.keys()),
        "misshapen": summarise_names(misshapen),
        "stored twice": summarise_names(repeated),
    }
    if any(complaints.values()):
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in complaints.items() if names)
        raise ValueError(f"{folder} does not hold {what} that its config.json describes: {listed}")


def expected_shapes(config: PAN2Config) -> Shapes:
    """Name and shape of every tensor of the model, from the model itself, built without memory."""
    # Imported here: the model needs all of FastVideo's layers.
    from fastvideo.models.dits.pan2 import PAN2Transformer3DModel

    with torch.device("meta"):
        model = PAN2Transformer3DModel(config, hf_config={})
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def summarise_names(names: Iterable[str]) -> list[str]:
    """Sorted names; those that differ in the block number only are one: ``transformer_blocks.[0-43].ff.net.2.bias``."""
    blocks: dict[tuple[str, str], list[int]] = {}
    summary = []
    for name in names:
        # The block is the first number of a name; later ones are positions inside of it.
        numbered = re.match(r"(\D*\.)(\d+)(\..*)", name)
        if numbered:
            prefix, number, rest = numbered.groups()
            blocks.setdefault((prefix, rest), []).append(int(number))
        else:
            summary.append(name)
    summary += [f"{prefix}{_ranges(sorted(numbers))}{rest}" for (prefix, rest), numbers in blocks.items()]
    return sorted(summary)


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as ``3``, or as ``[0-2,5]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return parts[0] if len(numbers) == 1 else f"[{','.join(parts)}]"


def stored_shapes(folder: Path) -> tuple[Shapes, list[str]]:
    """Shapes of all tensors in the folder's safetensors files, and the names that more than one file holds.

    Raises:
        FileNotFoundError: there are no such files, or the index names others.
        OSError: a file may not be read.
        ValueError: a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors files: is the checkpoint complete?")
    absent = sorted(_indexed_files(folder) - {file.name for file in files})
    if absent:
        raise FileNotFoundError(f"{folder} lacks files that its index names: {', '.join(absent)}")
    shapes: Shapes = {}
    repeated = []
    for file in files:
        # safetensors itself says of a file that it may not open that there is none.
        file.open("rb").close()
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name in shapes:
                        repeated.append(name)
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short ({error}): copy or download it again") from error
    return shapes, repeated


def _indexed_files(folder: Path) -> set[str]:
    names: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        try:
            names.update(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of weight files: copy or download it again") from error
    return names
