# SPDX-License-Identifier: Apache-2.0
"""Chooses the command, and turns its outcome into a line and a status."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import wan22_vae_decode
from wan22_vae_decode.cli import bench, build, decode, doctor, verify
from wan22_vae_decode.errors import DecodeError, is_out_of_memory

CANNOT_RUN = 2
SIGNALLED = 128  # and the signal's number, as shells have it

_DESCRIPTION = """\
Decodes latents of the Wan2.2 (TI2V-5B) video VAE, and checks and measures the decoder on this machine.

Exit status: 0 all is well, 1 a check failed (doctor, verify, bench), 2 wrong use or something is missing here,
130 interrupted (129, 143: SIGHUP, SIGTERM). Results go to stdout, everything else to stderr."""

_EPILOG = """\
examples:
  wan22-vae-decode doctor                          what would run on this machine, and if not, why and what to do
  wan22-vae-decode build --arch sm_90a             build the kernels ahead, for a container (needs no GPU)
  wan22-vae-decode verify                          compare the decoder with plain torch in float32
  wan22-vae-decode bench --out times               a table, times.json and times.png
  wan22-vae-decode decode z.safetensors --vae Wan2.2-TI2V-5B-Diffusers/vae -o out.mp4"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status (argparse itself exits with 2)."""
    try:
        with _unwinding():
            return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        # Who reads our output has ended.
        _drop_output()
        return SIGNALLED + signal.SIGPIPE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        try:
            _flush()
        except OSError:
            _drop_output()
        return CANNOT_RUN


def _flush() -> None:
    if sys.stdout is not None:  # it was closed before the start
        sys.stdout.flush()


def _drop_output() -> None:
    """Drops what is left of the output: the interpreter's end would fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        # Names of files may hold what a terminal of another encoding cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(message)s", force=True)
    try:
        status = arguments.run(arguments)
        # Here, where a closed pipe can still be handled.
        _flush()
        return status
    except DecodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_RUN
    except (MemoryError, RuntimeError) as error:
        # Outside a decode, whose own words would be better: while weights or latents are made or moved.
        if not is_out_of_memory(error):
            raise
        first_line = next(iter(str(error).splitlines()), "Python's own")
        print(f"error: out of memory: {first_line}", file=sys.stderr)
        return CANNOT_RUN


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP unwind the program, once, so that what is unfinished goes: files, compilers.

    After that they stay without effect, since memory is still freed and words are written outside.
    """
    # What is ignored stays so: that is how nohup works. Only the main thread may choose.
    on_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if on_main_thread else ()
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number in numbers if before[number] != signal.SIG_IGN]
    ending = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        ending = True
        # A session's end sends two, and the impatient interrupt twice; the second must not end what the first began.
        for each in heeded:
            signal.signal(each, lambda *_: None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(SIGNALLED + number)

    for number in heeded:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in () if ending else heeded:
            signal.signal(number, before[number])


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        self.exit(CANNOT_RUN, f"error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="wan22-vae-decode",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=wan22_vae_decode.__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="also say what is being built and tested")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (doctor, build, verify, bench, decode):
        command.add_parser(commands).set_defaults(run=command.run)
    return parser
