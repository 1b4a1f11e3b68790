# SPDX-License-Identifier: Apache-2.0
"""Distances between videos, and float32 that is float32."""

import subprocess
import sys

import pytest
import torch

from wan22_vae_decode.accuracy import distance


def test_distance_is_that_of_the_video_and_of_its_worst_frame():
    reference = torch.zeros(1, 3, 4, 2, 2)
    video = reference.clone()
    video[:, :, 2] = 0.02
    found = distance(video, reference)
    assert found.worst_frame == 2
    assert found.worst_frame_db == pytest.approx(40, abs=1e-3)
    assert found.psnr_db == pytest.approx(46.02, abs=1e-2)
    assert distance(reference, reference).psnr_db > 300
    video[0, 0, 0, 0, 0] = torch.nan
    assert distance(video, reference)[1:] == (pytest.approx(-294, abs=1), 0)


SWITCHES = """
import torch
from wan22_vae_decode.accuracy import strict_float32

{before}
with strict_float32():
    if hasattr(torch.backends.cudnn, "conv"):
        found = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
        assert found == ("ieee", "ieee"), found
    else:
        assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
{after}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "assert torch.backends.cuda.matmul.allow_tf32"),
        ("torch.set_float32_matmul_precision('high')", "assert torch.get_float32_matmul_precision() == 'high'"),
        pytest.param(
            "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
            "assert torch.backends.cuda.matmul.fp32_precision == 'tf32'",
            marks=pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9"),
        ),
    ],
)
def test_tf32_is_off_and_then_as_before(before, after):
    """In processes of their own: torch's old and new switches do not go together."""
    ended = subprocess.run(
        [sys.executable, "-c", SWITCHES.format(before=before, after=after)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
