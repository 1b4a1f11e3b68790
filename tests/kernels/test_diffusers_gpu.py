# SPDX-License-Identifier: Apache-2.0
"""diffusers' VAE of the released width on the CUDA kernels; on a CPU the same tests, with a narrow VAE on torch ops."""

from typing import NamedTuple

import pytest
import torch
from diffusers import AutoencoderKLWan

from wan22_vae_decode.accuracy import distance, strict_float32
from wan22_vae_decode.integrations import diffusers as fast_decode


class Place(NamedTuple):
    """Where a VAE of some width decodes, and by which options of ``enable``."""

    device: str
    base: int
    latent: int
    options: dict


CPU = Place("cpu", 8, 4, {"backend": "torch", "dtype": "float16"})
CUDA = Place("cuda", 256, 48, {})
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(scope="module", params=[CPU, pytest.param(CUDA, marks=NEEDS_GPU)], ids=lambda place: place.device)
def place(request):
    return request.param


@pytest.fixture(scope="module")
def shared_vae(place, make_vae, make_state_dict):
    return make_vae(place.base, place.latent, make_state_dict(place.base, place.latent), torch.float32).to(place.device)


@pytest.fixture
def vae(shared_vae):
    """In float32, and decoding without TF32."""
    with strict_float32():
        yield shared_vae
    fast_decode.disable(shared_vae)
    shared_vae.disable_tiling()


@pytest.fixture
def z(place, latents):
    return latents(3, 4, 6, channels=place.latent).float().to(place.device)


def assert_unpatched(video, expected):
    """cuDNN may choose other algorithms; float16 is farther away."""
    torch.testing.assert_close(video, expected, rtol=0, atol=1e-4)


def test_float16_video_follows_the_unpatched_float32_one(place, vae, z, made, lines):
    expected = vae.decode(z).sample
    fast_decode.enable(vae, **place.options)
    video = vae.decode(z).sample
    (decoder,) = made
    assert (decoder.backend, decoder.dtype) == (place.options.get("backend", "cuda"), torch.float16)
    assert (video.shape, video.dtype, video.device) == (expected.shape, torch.float32, z.device)
    error = distance(video, expected)
    assert 60 < error.worst_frame_db < 120, "float16 rounds"
    assert not lines
    fast_decode.disable(vae)
    assert type(vae) is AutoencoderKLWan
    assert_unpatched(vae.decode(z).sample, expected)
    assert len(made) == 1


def test_tiles_are_diffusers_own(place, vae, z, made, lines):
    vae.enable_tiling(64, 64, 48, 48)
    expected = vae.decode(z).sample
    fast_decode.enable(vae, **place.options)
    assert_unpatched(vae.decode(z).sample, expected)
    assert not made
    assert [line.partition(",")[0] for line in lines] == ["decoding with diffusers' own decode: tiling is enabled"]
    vae.disable_tiling()
    assert (vae.decode(z).sample - expected).abs().max() > 1e-3, "tiles change the pixels"
    assert len(made) == 1
