# SPDX-License-Identifier: Apache-2.0
"""Offers the PAN2 pipeline to FastVideo's discovery, once somebody has imported :mod:`fastvideo.pipelines.pan2`.

Discovery imports this file for every model family. Importing PAN2 from here unasked would activate it for all of them.
"""

import sys

if "fastvideo.pipelines.pan2" in sys.modules:
    from fastvideo.pipelines.pan2.pipeline import PAN2Pipeline

    EntryClass = PAN2Pipeline
