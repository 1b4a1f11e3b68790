# SPDX-License-Identifier: Apache-2.0
"""Writes an H.264 file while its frames come in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from torch import Tensor

from wan22_vae_decode.cli.extras import require
from wan22_vae_decode.errors import DecodeError, InputError

SUFFIXES = (".mp4", ".mkv", ".mov")


class EncodingError(DecodeError):
    """ffmpeg could not write the file; the message has its last words."""


class VideoFile:
    """A context in which frames are written; the file has its name only once it is complete, else there is none.

    Until then it is a hidden file in the same folder. A file of that name which was there before is replaced at the
    end, and untouched if the end is not reached.

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
        if path.is_dir():
            raise InputError(f"{path} cannot be written: it is a folder")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise InputError(f"{path} cannot be written: {path.parent} is no folder that can be written to")
        require("numpy", "writing a video")
        self._ffmpeg = require("imageio_ffmpeg", "writing a video").get_ffmpeg_exe()
        self._path = path
        self._partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
        self._fps, self._crf = fps, crf
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VideoFile:
        self._log = tempfile.TemporaryFile()
        return self

    def write(self, frames: Tensor) -> None:
        """Encodes [3, f, H, W], uint8, in host memory; H and W are even and the same every time."""
        if self._process is None:
            self._process = self._started(*frames.shape[2:])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frames.permute(1, 2, 3, 0).contiguous().numpy().data)
        except BrokenPipeError:
            raise self._failure() from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._process is not None:
                self._process.kill()
                with contextlib.suppress(BrokenPipeError):
                    self._process.communicate()
            self._log.close()
            self._partial.unlink(missing_ok=True)

    def _started(self, rows: int, cols: int) -> subprocess.Popen[bytes]:
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{cols}x{rows}", "-r", str(self._fps), "-i", "-"]
        target = ["-an", "-c:v", "libx264", "-crf", str(self._crf), "-pix_fmt", "yuv420p"]
        if self._path.suffix.lower() != ".mkv":
            target += ["-movflags", "+faststart"]
        command = [self._ffmpeg, "-y", "-v", "error", *source, *target, str(self._partial)]
        # A session of its own: an interrupt from the terminal is for us, who then end it.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._log, start_new_session=True)

    def _finish(self) -> None:
        if self._process is None:
            raise EncodingError(f"{self._path} would have no frames")
        try:
            self._process.communicate()
        except BrokenPipeError:
            raise self._failure() from None
        if self._process.returncode != 0:
            raise self._failure()
        os.replace(self._partial, self._path)

    def _failure(self) -> EncodingError:
        assert self._process is not None
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "no word")
        return EncodingError(f"{self._path} could not be written: ffmpeg ended with {words}")
