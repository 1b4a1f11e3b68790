# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the pipeline tests: one tiny checkpoint, and runs of whole generations in processes of their own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

PIPELINES = Path(__file__).parent
SCRIPTS = PIPELINES / "scripts"


@pytest.fixture(scope="module")
def tiny(scripts: Path) -> Iterator[SimpleNamespace]:
    """What ``vae_tiny.py`` makes, for tests of it on one thread: more would wait for each other on such tensors."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(**runpy.run_path(str(scripts / "vae_tiny.py")))
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random PAN2 checkpoint folder; do not write to it."""
    from fastvideo.pipelines.pan2.tiny_checkpoint import write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "pan2"
    write_tiny_checkpoint(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photograph as a small PNG."""
    from fastvideo.pipelines.pan2.demo import sample_photograph
    from PIL import Image

    file = tmp_path_factory.mktemp("image") / "photograph.png"
    Image.open(sample_photograph()).resize((150, 100)).save(file)
    return file


Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def run_python() -> Run:
    """Runs ``python ARGUMENTS`` with a time limit, away from the launcher's variables of other tests.

    A FastVideo worker that fails sends SIGQUIT to its parent, so generations never run inside pytest itself.
    """

    def run(
        *arguments: str | Path, check: bool = True, timeout: float = 300, cwd: Path | None = None, **environment: str
    ):
        variables = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
        variables |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | environment
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=variables,
            cwd=cwd,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{arguments} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            )
        return done

    return run


@pytest.fixture(scope="session")
def run_ranks(run_python: Run) -> Run:
    """Runs a script under ``torchrun`` with a number of CPU processes."""

    def run(ranks: int, script: str | Path, *arguments: str | Path, **options):
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        return run_python(*launcher, script, *arguments, **options)

    return run


@pytest.fixture(scope="session")
def scripts() -> Path:
    """The folder of the scripts that tests run in processes of their own."""
    return SCRIPTS
