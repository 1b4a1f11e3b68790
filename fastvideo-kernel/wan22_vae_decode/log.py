# SPDX-License-Identifier: Apache-2.0
"""The package's logger, and lines that are worth saying only once."""

import logging
import re
import threading

logger = logging.getLogger("wan22_vae_decode")

_said: set[str] = set()
_lock = threading.Lock()


def once(message: str, level: int = logging.WARNING, key: str | None = None) -> None:
    """Logs ``message`` the first time this process meets it: fallbacks give their reason once, not once a video.

    ``key`` stands for the message where that contains figures that vary.
    """
    with _lock:
        if (key or message) in _said:
            return
        _said.add(key or message)
    logger.log(level, "%s", message)


def without_figures(message: str) -> str:
    """What a message has in common with others of its kind: free memory, for one, differs every time."""
    return re.sub(r"[\d.]+", "", message)


def forget() -> None:
    """Makes ``once`` speak again about everything (for tests)."""
    with _lock:
        _said.clear()
