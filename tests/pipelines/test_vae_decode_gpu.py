# SPDX-License-Identifier: Apache-2.0
"""The VAE on a GPU: what is prepared there, when it is let go, and whose latents it takes."""

from __future__ import annotations

import weakref

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KERNEL = {"decode_kernel": True, "decode_backend": "torch"}


@torch.no_grad()
def test_module_decodes_where_it_is_and_leaves_nothing_behind(tiny):
    vae, z = tiny.tiny_vae(**KERNEL), tiny.tiny_latents()
    on_cpu = vae.decode(z)
    assert vae.decode_report()["decode_path"] == "wan22_vae_decode, torch, float32"
    vae.to("cuda")
    on_gpu = vae.decode(z.to("cuda"))
    assert on_gpu.is_cuda
    assert vae.decode_report()["decode_path"] == "wan22_vae_decode, torch, float16"
    assert (on_gpu.cpu() - on_cpu).abs().max() < 1e-2
    prepared = weakref.ref(vae._prepared.decoder)
    vae.to("cpu")
    assert prepared() is None
    assert torch.equal(vae.decode(z), on_cpu)


@torch.no_grad()
def test_float32_on_the_gpu_is_upstream_s_decode(tiny, monkeypatch):
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(backend, "allow_tf32", False)
    z = tiny.tiny_latents(frames=5).to("cuda")
    video = tiny.tiny_vae(**KERNEL, decode_dtype="float32").to("cuda").decode(z)
    torch.testing.assert_close(video, tiny.tiny_vae().to("cuda").decode(z), rtol=0, atol=1e-5)


@torch.no_grad()
def test_writes_through_data_are_seen_on_the_gpu(tiny):
    vae, z = tiny.tiny_vae(**KERNEL).to("cuda"), tiny.tiny_latents().to("cuda")
    before = vae.decode(z)
    assert torch.equal(vae.decode(z), before)
    weight = vae.decoder.conv_in.weight
    weight.data.copy_(weight.flatten().flip(0).view_as(weight))
    assert (vae.decode(z) - before).abs().max() > 1e-2


@torch.no_grad()
def test_latents_of_the_cpu_are_refused_by_upstream(tiny):
    vae = tiny.tiny_vae(**KERNEL).to("cuda")
    with pytest.raises(RuntimeError):
        vae.decode(tiny.tiny_latents())
    assert vae.decode_report()["decode_reason"].startswith("latents are on cpu, but the VAE is on cuda:0")
