# SPDX-License-Identifier: Apache-2.0
"""float16 decodes whose values overflow go on in bfloat16 from that pass; non-finite latents decode like the
reference.
"""

import pytest
import torch

from wan22_vae_decode import DecodeError, Decoder, OutOfMemoryError, weights
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.layers import WinogradForm

PER_PASS = 2
FRAMES = 6


@pytest.fixture(scope="module")
def loud_state_dict(make_state_dict):
    """A residual stream of about 3000, which norms bring back to one before every conv."""
    tensors = make_state_dict()
    tensors["decoder.conv_in.weight"] *= 3000
    return tensors


def decode(tensors, z, dtype, **options):
    return Decoder.from_state_dict(tensors, dtype=dtype, frames_per_pass=PER_PASS, **options).decode(z)


@pytest.mark.parametrize("loud_frame", [0, 3, 5])
def test_overflow_gives_the_bfloat16_video_from_its_pass_on(loud_frame, loud_state_dict, latents, caplog):
    z = latents(FRAMES, 2, 2).float()
    z[:, :, loud_frame] *= 100
    video = decode(loud_state_dict, z, "float16")
    lines = [record.getMessage() for record in caplog.records]
    first = loud_frame // PER_PASS * PER_PASS
    assert lines == [
        f"float16 overflowed in latent frames {first} to {first + PER_PASS - 1}; this decode goes on in bfloat16"
    ]
    seam = max(0, 4 * first - 3)
    assert torch.equal(video[:, :, seam:], decode(loud_state_dict, z, "bfloat16")[:, :, seam:])
    if first:
        assert torch.equal(video[:, :, :seam], decode(loud_state_dict, z[:, :, :first], "float16"))


def test_next_decode_starts_in_float16_again(loud_state_dict, latents, caplog):
    decoder = Decoder.from_state_dict(loud_state_dict, dtype="float16", frames_per_pass=PER_PASS)
    z = latents(3, 2, 2).float()
    expected = decoder.decode(z)
    assert not caplog.records
    decoder.decode(100 * z)
    assert len(caplog.records) == 1
    assert torch.equal(decoder.decode(z), expected)
    assert len(caplog.records) == 1


def test_streamed_pixels_are_released_only_when_finite(loud_state_dict, latents):
    z = latents(FRAMES, 2, 2).float()
    z[:, :, 3] *= 100
    decoder = Decoder.from_state_dict(loud_state_dict, dtype="float16", frames_per_pass=PER_PASS)
    items = list(decoder.stream(z))
    assert [item.shape[2] for item in items] == [5, 8, 8]
    assert all(torch.isfinite(item).all() for item in items)


def test_overflow_is_hidden_without_the_test_before_the_clamp(loud_state_dict, latents, monkeypatch):
    """The guard is what turns garbage into the right video: without its flag the result differs."""
    z = 100 * latents(2, 2, 2).float()
    guarded = decode(loud_state_dict, z, "float16")
    monkeypatch.setattr("wan22_vae_decode.backends.torch._flag_nonfinite", lambda x, flag: None)
    unguarded = decode(loud_state_dict, z, "float16")
    assert torch.isfinite(guarded).all()
    assert not torch.equal(guarded, unguarded)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_latents_decode_like_the_reference(value, dtype, state_dict, reference_vae, latents, caplog):
    z = latents(4, 2, 3)
    z[0, 1, 2, 1, 1] = value
    expected = reference_vae.decode(z).sample
    video = decode(state_dict, z.float(), dtype)
    assert not caplog.records
    assert torch.isnan(expected[:, :, 5:]).any()
    assert torch.equal(torch.isnan(video), torch.isnan(expected))
    assert (video - expected)[:, :, :5].abs().max() < 0.1


def test_nan_pixels_are_zero_in_uint8(state_dict, latents):
    z = latents(2, 2, 2).float()
    z[:, :, 1] = float("nan")
    video = Decoder.from_state_dict(state_dict).decode(z, out_dtype=torch.uint8)
    assert (video[:, :, 1:] == 0).all()
    assert (video[:, :, :1] > 0).any()


def test_bfloat16_weights_come_from_unchanged_parameters(make_state_dict, latents):
    tensors = make_state_dict()
    tensors["decoder.conv_in.weight"] *= 3000
    decoder = Decoder.from_state_dict(tensors, dtype="float16")
    tensors["decoder.conv_in.weight"].mul_(2)
    with pytest.raises(DecodeError, match="changed after the decoder was made"):
        decoder.decode(100 * latents(2, 2, 2).float())


def test_latents_beyond_float16_count_as_overflow(state_dict, latents, caplog):
    z = latents(2, 2, 2).float()
    z[0, 0, 1] = 1e6
    video = decode(state_dict, z, "float16")
    assert torch.isfinite(video).all()
    assert len(caplog.records) == 1


def test_winograd_weights_beyond_float16_count_as_overflow(make_state_dict, latents, caplog):
    tensors = make_state_dict()
    tensors["decoder.up_blocks.2.resnets.1.conv1.weight"][3, 5] = 1e6
    z = latents(2, 2, 2).float()

    def make(dtype, winograd):
        return TorchBackend(torch.device("cpu"), dtype, winograd_levels={2: WinogradForm(4)} if winograd else {})

    expected = decode(tensors, z, "bfloat16", backend=make(torch.bfloat16, True))
    video = decode(tensors, z, "float16", backend=make(torch.float16, True))
    assert torch.equal(video, expected)
    assert len(caplog.records) == 1


def test_weights_in_bfloat16_that_do_not_fit_end_the_decode(loud_state_dict, latents, monkeypatch):
    """Going on in float16 without the guard would give NaN pixels."""
    decoder = Decoder.from_state_dict(loud_state_dict, dtype="float16", frames_per_pass=PER_PASS)
    z = latents(FRAMES, 2, 2).float()
    z[:, :, 3] *= 100

    def prepare(*args, **options):
        raise torch.OutOfMemoryError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "prepare", prepare)
        with pytest.raises(OutOfMemoryError, match="overflowed, and the weights in bfloat16 do not fit"):
            decoder.decode(z)
    assert torch.isfinite(decoder.decode(z)).all()


def test_nonfinite_frame_leaves_the_passes_before_it_guarded(loud_state_dict, latents, caplog):
    z = latents(FRAMES, 2, 2).float()
    z[:, :, 1] *= 100
    expected = decode(loud_state_dict, z, "bfloat16")
    z[0, 0, 5, 0, 0] = float("nan")
    video = decode(loud_state_dict, z, "float16")
    assert [record.getMessage() for record in caplog.records] == [
        "float16 overflowed in latent frames 0 to 1; this decode goes on in bfloat16"
    ]
    assert torch.equal(video[:, :, :13], expected[:, :, :13])
    assert torch.isnan(video[:, :, 17:]).any()
