# SPDX-License-Identifier: Apache-2.0
"""Every call that cannot be decoded is refused with one sentence; every odd one that can, is decoded right."""

import copy
import pickle

import numpy as np
import pytest
import torch

from wan22_vae_decode import BackendUnavailableError, Decoder, InputError, WeightsError, backends, log, why_not
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.layers import WinogradForm


@pytest.fixture(scope="module")
def decoder(state_dict):
    return Decoder.from_state_dict(state_dict, dtype="float32", frames_per_pass=2)


BAD_LATENTS = {
    "four dimensions": (torch.zeros(4, 2, 3, 3), r"must be \[B, 4, T, H, W\], not 4-dimensional"),
    "channels": (torch.zeros(1, 16, 2, 3, 3), "have 16 channels, but this decoder takes 4"),
    "no frames": (torch.zeros(1, 4, 0, 3, 3), "have no frames"),
    "no rows": (torch.zeros(1, 4, 2, 0, 3), "are empty"),
    "no items": (torch.zeros(0, 4, 2, 3, 3), "are empty"),
    "integers": (torch.zeros(1, 4, 2, 3, 3, dtype=torch.int64), "must be floating-point, not torch.int64"),
    "float8": (torch.zeros(1, 4, 2, 3, 3).to(torch.float8_e4m3fn), "must be floating-point, not torch.float8_e4m3fn"),
    "complex": (torch.zeros(1, 4, 2, 3, 3, dtype=torch.complex64), "must be floating-point"),
    "sparse": (torch.zeros(1, 4, 2, 3, 3).to_sparse(), "must be a dense tensor"),
    "device": (torch.zeros(1, 4, 2, 3, 3, device="meta"), "are on meta, but this decoder is on cpu"),
    "gradients": (torch.zeros(1, 4, 2, 3, 3, requires_grad=True), "require gradients"),
    "type": ([[1.0]], "must be a tensor, not list"),
}


@pytest.mark.parametrize("case", BAD_LATENTS)
def test_latents_are_refused_in_one_sentence(case, decoder):
    latents, reason = BAD_LATENTS[case]
    with pytest.raises(InputError, match=reason) as refusal:
        decoder.decode(latents)
    assert decoder.why_not(latents) == str(refusal.value)
    with pytest.raises(InputError, match=reason):
        decoder.stream(latents)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"out_dtype": torch.int32}, "out_dtype must be one of"),
        ({"to": 1}, "to must be 'all' or a rank below 1"),
        ({"to": "some"}, "to must be 'all'"),
        ({"to": False}, "to must be 'all' or a rank below 1, not False"),
    ],
)
def test_options_of_a_call_are_refused(options, reason, decoder, latents):
    z = latents(1, 2, 2).float()
    assert decoder.why_not(z) is None
    with pytest.raises(InputError, match=reason):
        decoder.decode(z, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "int8"}, "dtype must be 'auto' or one of float16"),
        ({"dtype": torch.int8}, "dtype must be"),
        ({"backend": "metal"}, "backend must be 'auto' or one of 'cuda', 'torch'"),
        ({"device": "nowhere"}, "device must name a torch device"),
    ],
)
def test_options_of_a_decoder_are_refused(options, reason, state_dict):
    assert reason.split(",")[0] in str(why_not(state_dict, **options))
    with pytest.raises(InputError, match=reason):
        Decoder.from_state_dict(state_dict, **options)


@pytest.mark.parametrize("value", [0, -1, 62, 1.5, True, "many"])
def test_frames_per_pass_is_checked(value, state_dict):
    with pytest.raises(InputError, match="frames_per_pass must be 'auto' or from 1 to 61"):
        Decoder.from_state_dict(state_dict, frames_per_pass=value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_without_a_gpu(state_dict):
    with pytest.raises(BackendUnavailableError, match="torch sees none"):
        Decoder.from_state_dict(state_dict, device="cuda")
    assert "torch sees none" in str(why_not(state_dict, device="cuda"))
    assert why_not(state_dict, device="cpu", backend="cuda") is not None
    with pytest.raises(BackendUnavailableError):
        Decoder.from_state_dict(state_dict, device="cpu", backend="cuda")


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_devices_that_torch_cannot_use_are_refused(device, state_dict):
    with pytest.raises(BackendUnavailableError, match=device):
        Decoder.from_state_dict(state_dict, device=device)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: list(tensors.items()), "must map names to tensors, not be a list"),
        (lambda tensors: tensors | {"decoder.conv_in.bias": [0.0]}, r"are none: decoder.conv_in.bias \(list\)"),
        (
            lambda tensors: tensors | {"decoder.conv_in.bias": tensors["decoder.conv_in.bias"].to_sparse()},
            r"not dense: decoder.conv_in.bias \(torch.sparse_coo\)",
        ),
    ],
)
def test_state_dicts_of_other_things_are_refused(change, reason, state_dict):
    changed = change(state_dict)
    with pytest.raises(WeightsError, match=reason) as refusal:
        Decoder.from_state_dict(changed)
    assert why_not(changed) == str(refusal.value)


def test_group_without_torch_distributed_is_refused(state_dict):
    with pytest.raises(InputError, match="init_process_group"):
        Decoder.from_state_dict(state_dict, group=object())


def test_defaults_on_a_cpu(state_dict):
    decoder = Decoder.from_state_dict(state_dict)
    assert (decoder.dtype, decoder.backend, decoder.device.type) == (torch.float32, "torch", "cpu")
    assert why_not(state_dict) is None


# Calls that are odd but right


def test_other_keys_of_a_state_dict_do_not_matter(state_dict):
    assert why_not(state_dict | {3: "three"}) is None


def test_numpy_integers_are_integers(state_dict):
    frames_per_pass = Decoder.from_state_dict(state_dict, frames_per_pass=np.int64(3)).frames_per_pass
    assert (frames_per_pass, type(frames_per_pass)) == (3, int)


def test_cpu_has_no_index(state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict, device="cpu:0")
    assert decoder.device == torch.device("cpu")
    assert decoder.decode(latents(1, 1, 1).float()).shape == (1, 3, 1, 16, 16)


def test_default_device_does_not_matter(state_dict, decoder, latents):
    z = latents(2, 2, 2).float()
    ops = TorchBackend(torch.device("cpu"), torch.float32, winograd_levels={1: WinogradForm(3)})
    expected = decoder.decode(z), Decoder.from_state_dict(state_dict, backend=ops).decode(z)
    with torch.device("meta"):
        plain = Decoder.from_state_dict(state_dict, frames_per_pass=2)
        tiles = Decoder.from_state_dict(state_dict, backend=ops)
        videos = plain.decode(z), tiles.decode(z)
    assert all(torch.equal(video, right) for video, right in zip(videos, expected, strict=True))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda decoder: pickle.loads(pickle.dumps(decoder))])
def test_copies_decode_alike(duplicate, state_dict, latents):
    loud = state_dict | {"decoder.conv_in.weight": 3000 * state_dict["decoder.conv_in.weight"]}
    decoder = Decoder.from_state_dict(loud, dtype="float16")
    # An overflow makes the weights again, from the copy's own tensors.
    z = 100 * latents(1, 2, 2).float()
    assert torch.equal(duplicate(decoder).decode(z), decoder.decode(z))


def test_strides_do_not_matter(decoder, latents):
    z = latents(3, 2, 4).float()
    expected = decoder.decode(z)
    strided = torch.zeros(1, 4, 6, 4, 12)[:, :, 1::2, ::2, 2::3]
    strided.copy_(z)
    assert torch.equal(decoder.decode(strided), expected)
    assert torch.equal(decoder.decode(z.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)), expected)
    expanded = z.expand(2, -1, -1, -1, -1)
    assert torch.equal(decoder.decode(expanded), decoder.decode(expanded.clone()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_latents_of_any_floating_type(dtype, decoder, latents):
    z = latents(2, 2, 2).to(dtype)
    assert torch.equal(decoder.decode(z), decoder.decode(z.float()))


def test_autocast_changes_nothing(decoder, latents):
    z = latents(3, 2, 2).float()
    expected = decoder.decode(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(decoder.decode(z), expected)


def test_autocast_around_construction_changes_nothing(state_dict, decoder, latents):
    z = latents(2, 2, 2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = Decoder.from_state_dict(state_dict, dtype="float32")
    assert torch.equal(other.decode(z), decoder.decode(z))


def test_inference_mode_inside_and_outside(state_dict, decoder, latents):
    z = latents(5, 2, 2).float()
    expected = decoder.decode(z)
    with torch.inference_mode():
        assert torch.equal(decoder.decode(z), expected)
        inner = Decoder.from_state_dict(state_dict, dtype="float32", frames_per_pass=2)
        stream = inner.stream(z.clone())
        parts = [next(stream)]
    parts += list(stream)
    assert torch.equal(torch.cat(parts, dim=2), expected)
    assert torch.equal(inner.decode(z), expected)


def test_gradient_mode_leaves_no_graph(decoder, latents):
    z = latents(1, 2, 2).float()
    assert not decoder.decode(z).requires_grad
    with torch.no_grad():
        assert torch.equal(decoder.decode(z.clone().requires_grad_()), decoder.decode(z))
    for part in decoder.stream(z):
        assert torch.is_grad_enabled()
        assert not part.requires_grad


def test_parameters_may_require_gradients(state_dict, decoder, latents):
    z = latents(1, 2, 2).float()
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in state_dict.items()}
    assert torch.equal(Decoder.from_state_dict(parameters, dtype="float32").decode(z), decoder.decode(z))


def test_latents_are_not_written(decoder, latents):
    z = latents(3, 2, 2).float()
    before = z.clone()
    decoder.decode(z)
    assert torch.equal(z, before)


def test_interrupted_decode_leaves_the_next_one_right(decoder, latents, monkeypatch):
    z = latents(5, 2, 2).float()
    expected = decoder.decode(z)
    stream = decoder.stream(z)
    next(stream)
    stream.close()

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(decoder._ops), "output_head", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(z)
    assert torch.equal(decoder.decode(z), expected)


def test_two_threads_share_a_decoder(decoder, latents):
    from concurrent.futures import ThreadPoolExecutor

    clips = [latents(5, 2, 2, seed=seed).float() for seed in range(4)]
    expected = [decoder.decode(z) for z in clips]
    with ThreadPoolExecutor(2) as pool:
        videos = list(pool.map(decoder.decode, clips))
    assert all(torch.equal(video, right) for video, right in zip(videos, expected, strict=True))


class Picky(TorchBackend):
    """Kernels that find out from the weights that they cannot take them."""

    name = "cuda"

    def adopt(self, weights):
        raise BackendUnavailableError("these widths have no kernels")


def test_auto_takes_torch_when_the_kernels_refuse_the_weights(state_dict, latents, monkeypatch, caplog):
    create = backends.create
    monkeypatch.setattr(
        backends, "create", lambda name, *place: Picky(*place) if name == "cuda" else create(name, *place)
    )
    log.forget()
    decoder = Decoder.from_state_dict(state_dict)
    assert decoder.backend == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "decoding with torch instead of the cuda kernels: these widths have no kernels"
    ]
    assert decoder.decode(latents(1, 1, 1).float()).shape == (1, 3, 1, 16, 16)
    with pytest.raises(BackendUnavailableError, match="no kernels"):
        Decoder.from_state_dict(state_dict, backend="cuda")
