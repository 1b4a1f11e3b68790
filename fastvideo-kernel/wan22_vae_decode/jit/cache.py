# SPDX-License-Identifier: Apache-2.0
"""The cache of built libraries: whole entries or none, one builder at a time.

An entry is a folder with a `manifest.json` that lists its files' hashes. It is filled under a temporary name beside
its place and renamed, so a reader sees a finished entry or nothing. A process that is killed (a library must not catch
SIGTERM for it) leaves that folder and the lock's file; the system drops the lock, and the next build of the entry
removes the folder. What does not match its manifest, or belongs to another user, is never loaded.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan22_vae_decode.jit.errors import BuildError
from wan22_vae_decode.jit.recipe import sha256
from wan22_vae_decode.log import logger

MANIFEST = "manifest.json"
FIRST_NOTICE_S = 2.0
NOTICE_EVERY_S = 15.0
POLL_S = 0.1


def cache_folder() -> Path:
    """Where entries are kept: WAN22_VAE_DECODE_CACHE, else a folder in the user's cache.

    Raises BuildError where that is in the home of a user who has none.
    """
    chosen = os.environ.get("WAN22_VAE_DECODE_CACHE")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wan22_vae_decode"
    except RuntimeError as error:
        raise BuildError(
            f"The folder of the kernel cache, {chosen or '~/.cache'}, is in a home that does not exist; set "
            "WAN22_VAE_DECODE_CACHE to another."
        ) from error


@contextlib.contextmanager
def usable(root: Path) -> Iterator[None]:
    """Turns what the system says of a cache in the way, full or closed to this user, into a BuildError."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"The kernel cache {root} cannot be used ({error}); make room or access, or set WAN22_VAE_DECODE_CACHE to "
            "another folder."
        ) from error


def entries(root: Path, prefix: str) -> "list[Entry]":
    """Those of a cache whose key begins so, whole or not; none where it cannot be read."""
    try:
        return [Entry(root, manifest.parent.name) for manifest in sorted(root.glob(f"{prefix}*/{MANIFEST}"))]
    except OSError:
        return []


@dataclass(frozen=True)
class Entry:
    """The place of one library in the cache."""

    root: Path
    key: str

    @property
    def folder(self) -> Path:
        return self.root / self.key

    @property
    def failure(self) -> Path:
        return self.root / f"{self.key}.failed.json"

    @property
    def log(self) -> Path:
        return self.root / f"{self.key}.log"

    def defect(self) -> str | None:
        """None if the entry is whole and ours, otherwise what is wrong with it ("absent" if there is none)."""
        try:
            if not self.folder.is_dir():
                return "absent"
            manifest = self.manifest()
            owner = (self.folder / MANIFEST).stat().st_uid
            files = dict(manifest["files"])
            key = manifest["key"]
        except (OSError, ValueError, KeyError, TypeError):
            return "no readable manifest"
        if owner not in (0, os.geteuid()):
            return f"owned by user {owner}"
        if key != self.key:
            return f"written for {key}"
        if not files:
            return "no files in its manifest"
        for name, digest in files.items():
            try:
                matches = sha256(self.folder / name) == digest
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
            if not matches:
                return f"{name} does not match its manifest"
        return None

    def manifest(self) -> dict[str, Any]:
        """What `publish` wrote, which only `defect` checks; {} where it cannot be read."""
        try:
            return dict(json.loads((self.folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the entry's lock, which the system drops if the holder dies. Waits for it with a line in the log."""
        with usable(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / f"{self.key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with usable(self.root):
                self._wait_for(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _wait_for(self, descriptor: int) -> None:
        start = time.monotonic()
        notice = FIRST_NOTICE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            waited = time.monotonic() - start
            if waited >= notice:
                logger.info("waiting for another process to build %s (%.0f s so far)", self.key, waited)
                notice += NOTICE_EVERY_S
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def filling(self) -> Iterator[Path]:
        """A temporary folder beside the entry, removed on the way out; killed builds' go first. Only under `locked`."""
        for stale in self.root.glob(f".{self.key}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{self.key}.", dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, files: list[str], **origin: Any) -> None:
        """Makes `folder` the entry, with a manifest of `files` and of what they come from. Only under `locked`."""
        digests = {name: sha256(folder / name) for name in files}
        manifest = {"key": self.key, "files": digests, **origin}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        folder.chmod(0o755)
        try:
            if self.folder.exists():
                # rename() replaces no filled folder; the old one leaves under a name that `filling` sweeps up.
                self.folder.rename(Path(tempfile.mkdtemp(prefix=f".{self.key}.", dir=self.root)) / "old")
            folder.rename(self.folder)
        except OSError as error:
            raise BuildError(
                f"The cache entry {self.folder} cannot be replaced ({error.strerror}); remove it or set "
                "WAN22_VAE_DECODE_CACHE to another folder."
            ) from error
        self.failure.unlink(missing_ok=True)
        for stale in self.root.glob(f".{self.key}.*"):
            shutil.rmtree(stale, ignore_errors=True)

    def record_failure(self, message: str) -> None:
        """Leaves the reason for those who waited for this build, so that they do not repeat it."""
        # A disk that is full may be the reason.
        with contextlib.suppress(OSError):
            self.failure.write_text(json.dumps({"time": time.time(), "message": message}))

    def failure_since(self, moment: float) -> str | None:
        """The recorded reason, if a build failed after `moment` (seconds since the epoch)."""
        try:
            record = json.loads(self.failure.read_text())
            return str(record["message"]) if record["time"] >= moment else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
