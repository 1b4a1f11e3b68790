# SPDX-License-Identifier: Apache-2.0
"""Whether files and folders can be written, found by trying: permissions do not tell of special file systems such as
/proc.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def try_file(file: Path) -> None:
    """Raises OSError where the file could not be written, and leaves all as it is."""
    if file.exists():
        with file.open("r+b"):
            return
    file.touch()
    file.unlink()


def try_folder(folder: Path) -> None:
    """Raises OSError where a folder that is to exist could not be made or written into, and leaves all as it is."""
    # A link that leads nowhere is there, and no folder.
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    tempfile.TemporaryDirectory(dir=existing).cleanup()


def partial(path: Path, target: Path) -> Path:
    """The name beside ``target`` under which ``path``, which is that file or a link to it, is written until complete.

    It ends as ``path`` does, since that says what kind of file it is.
    """
    # Cut, so that it is no longer than a name may be.
    return target.with_name(f".{path.stem[:40]}.{os.getpid()}.partial{path.suffix}")


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name beside the file, to write under; what is there at the end takes the file's place, if the end is reached.

    A symbolic link stays one: the file that it names is replaced.
    """
    target = Path(os.path.realpath(file))
    unfinished = partial(file, target)
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
