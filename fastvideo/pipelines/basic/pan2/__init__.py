# SPDX-License-Identifier: Apache-2.0
"""Where FastVideo's scan of ``pipelines/basic`` finds PAN2; the pipeline itself is :mod:`fastvideo.pipelines.pan2`."""
