# SPDX-License-Identifier: Apache-2.0
"""The whole decoder on the CUDA kernels, on a GPU: against strict fp32, pass sizes, overflow, threads, interruption."""

import logging
import math
import threading

import pytest
import torch

from wan22_vae_decode import memory
from wan22_vae_decode.decoder import Decoder
from wan22_vae_decode.errors import InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BASE, LATENT = 64, 16


@pytest.fixture(scope="module")
def small_state_dict(make_state_dict):
    return {name: tensor.float().cuda() for name, tensor in make_state_dict(BASE, LATENT).items()}


@pytest.fixture(autouse=True)
def strict_fp32():
    """The reference must not use TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        yield
        torch.backends.cuda.matmul.allow_tf32 = before


def psnr(video, reference):
    """dB over the range [-1, 1]."""
    return 10 * math.log10(4 / max(float((video.double() - reference.double()).square().mean()), 1e-30))


def decoder(state_dict, dtype, backend="cuda", **options):
    return Decoder.from_state_dict(state_dict, device="cuda", dtype=dtype, backend=backend, **options)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 60.0), (torch.bfloat16, 42.0)])
@pytest.mark.parametrize(
    ("batch", "frames", "rows", "cols"), [(1, 1, 1, 1), (1, 2, 3, 5), (2, 5, 4, 7), (1, 9, 5, 2), (1, 3, 2, 2)]
)
def test_small_videos_follow_fp32(small_state_dict, latents, dtype, least, batch, frames, rows, cols):
    inputs = latents(frames, rows, cols, batch, channels=LATENT).float().cuda()
    exact = decoder(small_state_dict, torch.float32, "torch").decode(inputs)
    ours = decoder(small_state_dict, dtype).decode(inputs)
    same_type = decoder(small_state_dict, dtype, "torch").decode(inputs)
    assert ours.shape == exact.shape
    assert psnr(ours, exact) > min(least, psnr(same_type, exact) - 2)


@pytest.fixture(scope="module")
def full_state_dict(make_state_dict):
    return {name: tensor.float().cuda() for name, tensor in make_state_dict(256, 48).items()}


@pytest.mark.parametrize(
    ("frames", "rows", "cols"),
    [(1, 44, 78), (5, 44, 78), (2, 45, 80), (2, 30, 52), (2, 52, 30), (2, 68, 120), (3, 2, 2)],
)
def test_real_sizes_follow_fp32(full_state_dict, latents, frames, rows, cols):
    inputs = latents(frames, rows, cols, channels=48).float().cuda()
    exact = decoder(full_state_dict, torch.float32, "torch", frames_per_pass=1).decode(inputs)
    ours = decoder(full_state_dict, torch.float16).decode(inputs)
    assert psnr(ours, exact) > 60


def test_the_pass_size_changes_nothing(small_state_dict, latents):
    inputs = latents(7, 4, 6, channels=LATENT).float().cuda()
    videos = [decoder(small_state_dict, torch.float16, frames_per_pass=n).decode(inputs) for n in (1, 2, 4, 7)]
    for video in videos[1:]:
        assert torch.equal(video, videos[0])


@pytest.mark.parametrize("frame", [0, 3, 6])
def test_overflow_goes_on_in_bf16(small_state_dict, latents, caplog, frame):
    """Latents that fp16 cannot carry from some frame on: that pass and the later ones equal a bf16 decode."""
    inputs = latents(7, 4, 6, channels=LATENT).float().cuda()
    inputs[:, :, frame:] *= 3e5
    with caplog.at_level(logging.WARNING):
        ours = decoder(small_state_dict, torch.float16, frames_per_pass=1).decode(inputs)
    assert sum("bfloat16" in record.getMessage() for record in caplog.records) == 1
    assert bool(ours.isfinite().all())
    whole = decoder(small_state_dict, torch.bfloat16, frames_per_pass=1).decode(inputs)
    start = max(0, 4 * frame - 3)
    assert torch.equal(ours[:, :, start:], whole[:, :, start:])


def test_nan_latents_decode_as_the_reference(small_state_dict, latents):
    inputs = latents(3, 4, 6, channels=LATENT).float().cuda()
    inputs[0, 3, 1, 2, 2] = math.nan
    ours = decoder(small_state_dict, torch.float16).decode(inputs)
    exact = decoder(small_state_dict, torch.float32, "torch").decode(inputs)
    assert torch.equal(ours.isnan(), exact.isnan())


def test_a_pass_holds_what_the_formula_says(full_state_dict, latents):
    """What torch's allocator saw, beside weights, latents and video, is the formula's up to its rounding of sizes."""
    inputs = latents(5, 44, 78, channels=48).half().cuda()
    ours = decoder(full_state_dict, torch.float16, frames_per_pass=2)
    before = torch.cuda.memory_allocated()
    predicted = memory.pass_bytes(ours._ops, ours.arch, memory.Extent(1, 44, 44, 78), memory.plans(2)[0])
    # Without the block that a pass reserves, which would hide what it uses.
    ours._ops._granted = 1 << 60
    torch.cuda.reset_peak_memory_stats()
    video = ours.decode(inputs)
    held = torch.cuda.max_memory_allocated() - before - video.nbytes
    assert 0.9 * predicted < held < 1.02 * predicted


def test_two_decoders_in_two_threads(small_state_dict, latents):
    inputs = [latents(5, 4, 6, channels=LATENT, seed=seed).float().cuda() for seed in (1, 2)]
    shared = decoder(small_state_dict, torch.float16)
    expected = [shared.decode(given) for given in inputs]
    torch.cuda.synchronize()
    videos, failures = [None, None], []

    def work(index):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                own = decoder(small_state_dict, torch.float16)
                for used in (own, shared, own):
                    videos[index] = used.decode(inputs[index])
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for video, reference in zip(videos, expected, strict=True):
        assert torch.equal(video, reference)


def test_capture_of_a_decode_is_refused(small_state_dict, latents):
    inputs = latents(2, 2, 2, channels=LATENT).float().cuda()
    ours = decoder(small_state_dict, torch.float16)
    ours.decode(inputs)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(InputError, match="captured"):
        ours.decode(inputs)


def test_an_interrupted_decode_leaves_the_decoder_usable(small_state_dict, latents, monkeypatch):
    inputs = latents(5, 4, 6, channels=LATENT).float().cuda()
    ours = decoder(small_state_dict, torch.float16, frames_per_pass=2)
    expected = ours.decode(inputs)
    kernels = type(ours._ops.kernels)
    calls = []
    whole = kernels.tap_gemm

    def interrupted(self, *arguments, **options):
        calls.append(None)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return whole(self, *arguments, **options)

    monkeypatch.setattr(kernels, "tap_gemm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.decode(inputs)
    assert torch.equal(ours.decode(inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_every_pixel_type(small_state_dict, latents, dtype):
    inputs = latents(3, 4, 6, channels=LATENT).float().cuda()
    ours = decoder(small_state_dict, torch.float16)
    plain, typed = ours.decode(inputs), ours.decode(inputs, out_dtype=dtype)
    if dtype == torch.uint8:
        assert torch.equal(typed, ((plain / 2 + 0.5) * 255).to(torch.uint8))
    else:
        assert torch.equal(typed, plain.to(dtype))
