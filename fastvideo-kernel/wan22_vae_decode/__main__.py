# SPDX-License-Identifier: Apache-2.0
"""``python -m wan22_vae_decode``: the command line."""

import sys

from wan22_vae_decode.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
