# SPDX-License-Identifier: Apache-2.0
"""What is compiled, and the key under which the result is kept."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan22_vae_decode.jit.arch import gencode
from wan22_vae_decode.jit.toolchain import Toolchain

# Without NDEBUG, ptxas serialises wgmma because of CUTLASS's device asserts.
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-Xptxas", "-v")


@dataclass(frozen=True)
class Unit:
    """One translation unit: a source in the recipe's folder, compiled with these preprocessor definitions."""

    source: str
    defines: tuple[str, ...] = ()

    @property
    def object(self) -> str:
        return "-".join((Path(self.source).stem, *self.defines)).lower() + ".o"


@dataclass(frozen=True)
class Recipe:
    """A shared library: its name, the folder of its sources and headers, its units and its architecture.

    `generated` are further headers, as pairs of name and text, that the build writes for the units to include.
    """

    name: str
    folder: Path
    units: tuple[Unit, ...]
    arch: str
    generated: tuple[tuple[str, str], ...] = ()

    @property
    def library(self) -> str:
        return f"lib{self.name}.so"

    def compile_command(self, unit: Unit, toolchain: Toolchain) -> list[str]:
        """nvcc's arguments for one unit, writing its object file into the current folder."""
        defines = [f"-D{define}" for define in unit.defines]
        includes = [f"-I{path}" for path in (*([Path()] if self.generated else []), self.folder, *toolchain.includes)]
        command = [str(toolchain.nvcc.path), *FLAGS, gencode(self.arch), *defines, *includes]
        return [*command, "-c", "-o", unit.object, str(self.folder / unit.source)]

    def link_command(self, toolchain: Toolchain) -> list[str]:
        """nvcc's arguments that link all objects with a static CUDA runtime, so that no library path matters."""
        objects = [unit.object for unit in self.units]
        command = [str(toolchain.nvcc.path), "-shared", "-cudart=static", gencode(self.arch)]
        return [*command, "-o", self.library, *objects]

    def inputs(self, toolchain: Toolchain) -> dict[str, Any]:
        """Everything that the library depends on, and no path of this machine."""
        return {**self.own_inputs(), "nvcc": toolchain.nvcc.build, "cutlass": toolchain.cutlass}

    def own_inputs(self) -> dict[str, Any]:
        """`inputs` without what comes from outside this package."""
        files = sorted(path for path in self.folder.rglob("*") if path.suffix in (".cu", ".cuh", ".h"))
        return {
            "name": self.name,
            "arch": self.arch,
            "units": [[unit.source, *unit.defines] for unit in self.units],
            "flags": [*FLAGS, gencode(self.arch)],
            "sources": {str(path.relative_to(self.folder)): sha256(path) for path in files},
            "generated": dict(self.generated),
        }

    def key(self, toolchain: Toolchain) -> str:
        """Name of the cache entry: readable up to the hash of `inputs`."""
        digest = hashlib.sha256(json.dumps(self.inputs(toolchain), sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{self.arch}-{digest[:20]}"


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(stream)


def _sha256(stream: Any) -> str:
    digest = hashlib.sha256()
    for block in iter(lambda: stream.read(1 << 20), b""):
        digest.update(block)
    return digest.hexdigest()
