# SPDX-License-Identifier: Apache-2.0
"""Runs the ranks of a script as processes forked from it, so that FastVideo is imported once."""

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any


def run_forked(run_rank: Callable[..., None], ranks: int, *arguments: Any, timeout: float) -> None:
    """Calls ``run_rank(rank, ranks, *arguments)`` in each process; exits unless all of them end well in time."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, ranks, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=timeout)
        # A rank that lost its peers would wait for them.
        process.kill()
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"exit codes of {ranks} ranks: {[process.exitcode for process in processes]}")
