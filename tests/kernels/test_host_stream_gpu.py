# SPDX-License-Identifier: Apache-2.0
"""A GPU's stream in host memory: pinned, and the same video as on the GPU."""

import pytest
import torch

from wan22_vae_decode import Decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_stream_on_the_host_of_a_gpu_is_pinned_and_the_same_video(state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict, device="cuda", backend="torch", frames_per_pass=2)
    z = latents(9, 6, 7).cuda().float()
    items = list(decoder.stream(z, torch.uint8, on_host=True))
    assert all(item.device.type == "cpu" and item.is_pinned() for item in items)
    assert torch.equal(torch.cat(items, dim=2), decoder.decode(z, torch.uint8).cpu())


def test_items_on_the_host_do_not_change_when_earlier_ones_are_dropped(state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict, device="cuda", backend="torch", frames_per_pass=1)
    z = latents(12, 6, 7).cuda().float()
    expected = decoder.decode(z, torch.uint8).cpu()
    start = 0
    for item in decoder.stream(z, torch.uint8, on_host=True):
        assert torch.equal(item, expected[:, :, start : start + item.shape[2]])
        start += item.shape[2]
    assert start == expected.shape[2]
