# SPDX-License-Identifier: Apache-2.0
"""Writes an H.264 file while its frames come in."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from torch import Tensor

from wan22_vae_decode.cli import writable
from wan22_vae_decode.cli.extras import ffmpeg, require
from wan22_vae_decode.errors import DecodeError, InputError

SUFFIXES = (".mp4", ".mkv", ".mov")


class EncodingError(DecodeError):
    """The file could not be written; the message has ffmpeg's last words, or the system's."""


class VideoFile:
    """A context in which frames are written; the file has its name only once it is complete, else there is none.

    Until then it is a hidden file in the same folder. A file of that name which was there before is replaced at the
    end, and untouched if the end is not reached. A symbolic link stays one: the file that it names is written.

    Args:
        path: ``.mp4``, ``.mkv`` or ``.mov``, in a folder that exists.
        fps: frames a second.
        crf: libx264's quality, 0 (lossless) to 51.

    Raises:
        InputError: another kind of file, or a folder that cannot be written.
        MissingExtraError: numpy or ffmpeg is not installed.
        EncodingError: at ``write`` or at the end.
    """

    def __init__(self, path: Path, fps: float, crf: int) -> None:
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path} must end in {', '.join(SUFFIXES)}")
        # Unlike resolve(), this raises nothing where links form a loop.
        target = Path(os.path.realpath(path))
        try:
            if not stat.S_ISREG(target.stat().st_mode):
                raise InputError(f"{path} cannot be written: it is a folder or a device")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error
        if not target.parent.is_dir():
            raise InputError(f"{path} cannot be written: {target.parent} is no folder")
        try:
            writable.try_folder(target.parent)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {target.parent} takes no files ({error.strerror})") from error
        require("numpy", "writing a video")
        self._ffmpeg = ffmpeg()
        self._path, self._target = path, target
        self._partial = writable.partial(path, target)
        self._fps, self._crf = fps, crf
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VideoFile:
        self._log = tempfile.TemporaryFile()
        return self

    def write(self, frames: Tensor) -> None:
        """Encodes [3, f, H, W], uint8, in host memory; H and W are even and the same every time."""
        with self._os_errors():
            if self._process is None:
                self._process = self._started(*frames.shape[2:])
            assert self._process.stdin is not None
            self._process.stdin.write(frames.permute(1, 2, 3, 0).contiguous().numpy().data)

    def abort(self) -> None:
        """Ends ffmpeg, and with it a ``write`` in another thread that waits for it."""
        if self._process is not None and self._process.poll() is None:
            # The whole session: what is named ffmpeg may be a script around it, and a reader left keeps the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self.abort()
            if self._process is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.communicate()
            self._log.close()
            self._partial.unlink(missing_ok=True)

    def _started(self, rows: int, cols: int) -> subprocess.Popen[bytes]:
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{cols}x{rows}", "-r", str(self._fps), "-i", "-"]
        target = ["-an", "-c:v", "libx264", "-crf", str(self._crf), "-pix_fmt", "yuv420p"]
        if self._path.suffix.lower() != ".mkv":
            target += ["-movflags", "+faststart"]
        # Without "file:", a colon in the name would end the name of a protocol.
        command = [self._ffmpeg, "-y", "-v", "error", *source, *target, f"file:{self._partial}"]
        # A session of its own: an interrupt from the terminal is for us, who then end it.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._log, start_new_session=True)

    def _finish(self) -> None:
        if self._process is None:
            raise EncodingError(f"{self._path} would have no frames")
        with self._os_errors():
            self._process.communicate()
            if self._process.returncode != 0:
                raise self._failure()
            os.replace(self._partial, self._target)

    @contextlib.contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Turns the system's errors into ``EncodingError``; of a broken pipe's cause ffmpeg itself knows more."""
        try:
            yield
        except BrokenPipeError:
            raise self._failure() from None
        except OSError as error:
            raise EncodingError(f"{self._path} could not be written: {error}") from error

    def _failure(self) -> EncodingError:
        assert self._process is not None
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "no word")
        return EncodingError(f"{self._path} could not be written: ffmpeg ended with {words}")
