# SPDX-License-Identifier: Apache-2.0
"""`verify`: what it compares, when it fails, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from wan22_vae_decode import backends
from wan22_vae_decode.accuracy import distance
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.cli import verify
from wan22_vae_decode.errors import BackendUnavailableError
from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.random_weights import random_state_dict

GIVEN = ("--size", "32x16x5", "--device", "cpu")
SMALL = ("--channels", 8, *GIVEN)


def test_without_a_gpu_it_verifies_the_torch_backend_and_says_so(cli):
    ended = cli("verify", *SMALL)
    assert ended.status == 0
    assert ended.err == "no GPU is used: this verifies the torch backend on cpu, not the kernels\n"
    assert "torch, float32, cpu; 32x16x5, weights: random" in ended.out
    assert "against torch, float64" in ended.out
    assert ended.out.endswith("\nok\n")


@pytest.mark.parametrize(("dtype", "low", "high"), [("float16", 60, 90), ("bfloat16", 40, 65), ("float32", 100, 160)])
def test_types_are_compared_with_a_wider_one(dtype, low, high, cli):
    report = json.loads(cli("verify", *SMALL, "--dtype", dtype, "--json").out)
    assert report["ok"]
    assert report["reference"] == ("torch, float64" if dtype == "float32" else "torch, float32")
    assert low < report["worst_frame_db"] <= report["psnr_db"] < high
    assert 0 <= report["worst_frame"] < 5


def test_given_weights_are_verified(cli, vae_folder):
    for folder in (vae_folder, vae_folder.parent):
        report = json.loads(cli("verify", "--vae", folder, "--size", "32x16x5", "--device", "cpu", "--json").out)
        assert report["ok"]
        assert report["weights"] == str(folder)


def test_wrong_arithmetic_is_status_1(cli, monkeypatch):
    head = TorchBackend.output_head

    def off(self, x, weights, out, nonfinite):
        head(self, x, weights, out, nonfinite)
        if self.dtype == torch.float32:
            out[:, :, -1] += 0.01

    monkeypatch.setattr(TorchBackend, "output_head", off)
    ended = cli("verify", *SMALL)
    assert ended.status == 1
    assert "frame 4 (at least 100 is asked)" in ended.out
    assert ended.out.endswith("\nNOT OK\n")
    assert cli("verify", *SMALL, "--min-db", "40").status == 0


def test_nan_is_status_1_and_valid_json(cli, monkeypatch):
    head = TorchBackend.output_head

    def broken(self, x, weights, out, nonfinite):
        head(self, x, weights, out, nonfinite)
        if self.dtype == torch.float32:
            out[:, :, 0] = torch.nan

    monkeypatch.setattr(TorchBackend, "output_head", broken)
    ended = cli("verify", *SMALL, "--json")
    assert ended.status == 1
    report = json.loads(ended.out, parse_constant=pytest.fail)
    assert report["worst_frame_db"] < -200
    assert report["worst_frame"] == 0


@pytest.mark.parametrize("failing", [False, True])
def test_kernels_are_tested_one_by_one_first(failing, cli, monkeypatch):
    from wan22_vae_decode.backends.cuda import selftest

    def check(ops):
        if failing:
            raise BackendUnavailableError("The CUDA kernels disagree with the torch ops on this card.")

    # A stand-in for the GPU's backend; what `verify` does with a real one is tested on a GPU.
    monkeypatch.setattr("wan22_vae_decode.backends.cuda.CudaBackend", TorchBackend)
    monkeypatch.setattr(selftest, "check", check)
    create = backends.create
    monkeypatch.setattr(backends, "create", lambda name, *rest: create("torch", *rest))
    decoder = verify.Decoder.from_state_dict(random_state_dict(Architecture(8, 4)), backend="torch")
    said = verify._selftest(decoder)
    assert said == ("The CUDA kernels disagree with the torch ops on this card." if failing else "passed")


def test_kernels_that_do_not_run_on_a_gpu_are_told(monkeypatch):
    def refuse(*_):
        raise BackendUnavailableError("sm_90a needs nvcc 12.3 or newer")

    decoder = verify.Decoder.from_state_dict(random_state_dict(Architecture(8, 4)), backend="torch")
    monkeypatch.setattr(backends, "create", refuse)
    assert verify._selftest(decoder) == "sm_90a needs nvcc 12.3 or newer"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_s_kernels_pass(cli):
    report = json.loads(cli("verify", "--size", "96x80x9", "--channels", 64, "--json").out)
    assert report["ok"]
    assert report["backend"] == "cuda"
    assert report["selftest"] == "passed"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--vae", "absent"), "absent is no folder; --vae names the VAE's folder"),
        (("--dtype", "float64"), "verify compares float16, bfloat16 or float32 with a wider type, not float64"),
        (("--backend", "cuda"), "the CUDA kernels need a CUDA device, not cpu"),
    ],
)
def test_refusals(arguments, sentence, cli):
    ended = cli("verify", *GIVEN, *arguments)
    assert ended.status == 2
    assert ended.err.splitlines()[-1].startswith(f"error: {sentence}")
    assert not ended.out


def test_folders_that_hold_no_decoder(cli, tmp_path, vae_folder):
    def refusal():
        ended = cli("verify", "--vae", tmp_path, "--device", "cpu")
        assert ended.status == 2
        return ended.err.splitlines()[-1]

    assert refusal() == f"error: {tmp_path} holds no *.safetensors, nor does a folder vae in it"
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"nothing of the kind")
    assert refusal().startswith(f"error: {damaged} cannot be read as safetensors: ")
    damaged.unlink()
    tensors = {}
    for path in vae_folder.glob("*.safetensors"):
        tensors |= load_file(path)
    del tensors["decoder.conv_in.bias"]
    save_file(tensors, tmp_path / "partial.safetensors")
    assert refusal() == "error: not a Wan2.2 decoder of base width 8: missing: decoder.conv_in.bias"


def test_distance_of_videos():
    reference = torch.zeros(1, 3, 4, 8, 8)
    video = reference.clone()
    assert distance(video, reference).psnr_db == pytest.approx(306, abs=0.1)
    video[:, :, 2] = 0.02
    found = distance(video, reference)
    assert found.worst_frame == 2
    assert found.worst_frame_db == pytest.approx(40, abs=1e-3)
    assert found.psnr_db == pytest.approx(46.02, abs=0.01)
