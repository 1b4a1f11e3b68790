# SPDX-License-Identifier: Apache-2.0
"""The package's exceptions. Every message is one sentence: what is wrong, where, and what to do."""


class DecodeError(RuntimeError):
    """Base of everything this package raises on purpose."""


class InputError(DecodeError, ValueError):
    """The latents or an option of a call cannot be decoded: shape, type, device, or value."""


class WeightsError(DecodeError, ValueError):
    """The state dict is not a Wan2.2 decoder: lists all that is missing, unexpected or misshapen."""


class BackendUnavailableError(DecodeError):
    """The requested backend cannot run here: no GPU, no kernels for its architecture, no compiler."""


class OutOfMemoryError(DecodeError):
    """Not even the smallest pass fits into the free memory."""


class PeerError(DecodeError):
    """Another rank reported a failure before the first collective; nothing was exchanged and the group stays usable."""


class CommunicationError(DecodeError):
    """A rank failed or fell silent in the middle of a pass; the decoder's communicator cannot be used again."""
