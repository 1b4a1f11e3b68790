# SPDX-License-Identifier: Apache-2.0
"""The command line, ``python -m wan22_vae_decode`` or ``wan22-vae-decode``: one module a command.

A command's module offers ``add_parser(commands)``, which adds its options, and ``run(arguments) -> int``, which prints
results on stdout and everything else on stderr. What it raises from this package is one line and status 2.
"""
