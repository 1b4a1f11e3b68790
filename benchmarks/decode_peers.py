# SPDX-License-Identifier: Apache-2.0
"""The fastest public decoder, vLLM-Omni's Wan fast path, taken out of its wheel without installing vLLM.

The package needs only a logger and Triton's names from vLLM: a stand-in for those two modules lies beside the unpacked
files, outside the source tree.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

PREFIX = "vllm_omni/diffusion/distributed/autoencoders/wan_vae_fastpath/"
STAND_IN = {
    "vllm/__init__.py": "",
    "vllm/logger.py": "import logging\n\n\ndef init_logger(name):\n    return logging.getLogger(name)\n",
    "vllm/triton_utils.py": (
        "import triton\nimport triton.language as tl\n"
        "from triton.language.extra import libdevice as tldevice\n\nHAS_TRITON = True\n"
    ),
}


class PeerAbsentError(RuntimeError):
    """The wheel was not given or does not hold the package."""


def load(wheel: Path | None, folder: Path) -> Any:
    """The package ``wan_vae_fastpath``, unpacked from a ``vllm_omni`` wheel into ``folder``."""
    if wheel is None:
        raise PeerAbsentError("no wheel given (--vllm-omni FILE)")
    if not wheel.is_file():
        raise PeerAbsentError(f"{wheel} is not a file")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(PREFIX) and name.endswith(".py")]
        if not names:
            raise PeerAbsentError(f"{wheel} holds no {PREFIX}")
        for name in names:
            target = folder / "wan_vae_fastpath" / name.removeprefix(PREFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
    for name, text in STAND_IN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    import wan_vae_fastpath

    return wan_vae_fastpath
