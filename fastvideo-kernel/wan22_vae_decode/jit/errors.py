# SPDX-License-Identifier: Apache-2.0
"""The one exception of the build."""

from wan22_vae_decode.errors import BackendUnavailableError


class BuildError(BackendUnavailableError):
    """The kernels cannot be built or loaded; the message says why and what to do."""
