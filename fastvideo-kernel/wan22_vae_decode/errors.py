# SPDX-License-Identifier: Apache-2.0
"""The package's exceptions. Every message is one sentence: what is wrong, where, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_NAMED = 4
"""Names of a kind that a message lists."""


class DecodeError(RuntimeError):
    """Base of everything this package raises on purpose."""


class InputError(DecodeError, ValueError):
    """The latents or an option of a call cannot be decoded: shape, type, device, or value."""


class WeightsError(DecodeError, ValueError):
    """The state dict is not a Wan2.2 decoder, or holds values that are not finite; says which tensors."""


class BackendUnavailableError(DecodeError):
    """The requested backend cannot run here: no GPU, no kernels for its architecture, no compiler."""


class OutOfMemoryError(DecodeError):
    """Not even the smallest pass, the video or the weights fit into the free memory."""


class PeerError(DecodeError):
    """Another rank reported a failure before a decode or between its passes; no exchange was interrupted and the group
    stays usable.
    """


class CommunicationError(DecodeError):
    """A rank failed, fell silent or was at another place; the decoder's communicator cannot be used again."""


def listed(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_NAMED])} and {more} more"


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch and Python raise where memory runs out. torch has no type for it on a CPU; what this package
    raises may quote another rank's.
    """
    if isinstance(error, DecodeError):
        return False
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Turns torch's error into this package's, whose sentence begins with ``what`` did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{what} not fit into the free memory; free memory, or decode fewer pixels") from error
