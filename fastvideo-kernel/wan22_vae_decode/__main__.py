# SPDX-License-Identifier: Apache-2.0
"""``python -m wan22_vae_decode`` and ``wan22-vae-decode``: the command line as a process of its own, which an interrupt
ends with one line also while modules are loaded.
"""

import contextlib
import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Runs this process's command line; returns its exit status."""
    # An interrupt that is ignored stays so, as in a shell's background jobs.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _end)
    from wan22_vae_decode.cli.main import main as run

    try:
        return run()
    finally:
        if heeded:
            # All is done, and the interpreter would tell of an interrupt of its own end with a traceback.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends at once, since nothing is begun yet: an exception would go through half-loaded modules."""
    signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
