# SPDX-License-Identifier: Apache-2.0
"""PAN2 text- and image-to-video for FastVideo.

``import fastvideo.pipelines.pan2`` is the switch: it registers the PAN2 family and our Wan2.2 video decoder with
FastVideo, in this process and in every worker that FastVideo spawns from it. Without the import FastVideo behaves as
if this package were not installed. Importing twice is harmless.

Raises:
    ImportError: the installed FastVideo ships PAN2 itself, or no longer has a name that this package builds on.
"""

from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.pipelines.pan2.presets import PAN2_I2V, PAN2_T2V
from fastvideo.pipelines.pan2.registration import register

register()

__all__ = ["PAN2_I2V", "PAN2_T2V", "PAN2PipelineConfig"]
