# SPDX-License-Identifier: Apache-2.0
"""The study of roundings: without any it is the float32 decode, each of them changes it, and all rows are written."""

import importlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from wan22_vae_decode import weights, winograd
from wan22_vae_decode.accuracy import distance
from wan22_vae_decode.backends.cuda import heuristics
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.layers import WinogradForm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def rounding(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("rounding")


@pytest.fixture
def decode(rounding, make_state_dict, latents):
    """Decodes a case with small weights of their own; None is the float32 torch backend."""
    state = {name: tensor.float() for name, tensor in make_state_dict().items()}
    arch = weights.check(state)
    prepared = rounding.Weights(state, arch)
    video = latents(2, 3, 5).float()

    def run(case):
        if case is None:
            plain = TorchBackend(torch.device("cpu"), torch.float32)
            return rounding.decoded(video, weights.prepare(state, arch, plain), arch, plain)
        with torch.no_grad(), mock.patch.dict(winograd.POINTS, {2: rounding.F23}):
            return rounding.decoded(video, prepared.of(case), arch, rounding.RoundingBackend(case))

    return run


def test_without_any_rounding_it_is_the_float32_decode(rounding, decode):
    everything = frozenset(rounding.SOURCES)
    reference = decode(None)
    for forms, upsample in ((heuristics.WINOGRAD_FORMS, (1, 2)), ({0: WinogradForm(2)}, ()), ({}, ())):
        case = rounding.Case("exact", forms, upsample, everything)
        assert distance(decode(case), reference).psnr_db > 110


@pytest.mark.parametrize("levels", [(1,), (1, 2, 3)])
def test_taps_in_time_give_the_same_video_but_for_rounding(levels, rounding, decode):
    everything = frozenset(rounding.SOURCES) - {"weights"}
    case = rounding.Case("in time", exact=everything, temporal=levels)
    assert distance(decode(case), decode(None)).psnr_db > 65


def test_every_rounding_is_made_and_can_be_left_out(rounding, decode):
    everything = frozenset(rounding.SOURCES)
    exact = decode(rounding.Case("exact", exact=everything))
    # Sums are a part of the stream: exact, they leave the rest of it rounded.
    for name in everything - {"sums"}:
        left = {name, "sums"} if name == "stream" else {name}
        psnr = distance(decode(rounding.Case(name, exact=everything - left)), exact).psnr_db
        assert 60 < psnr < 110, name
    stream = everything - {"stream", "sums"}
    assert not torch.equal(
        decode(rounding.Case("", exact=stream | {"sums"})),
        decode(rounding.Case("", exact=stream)),
    )


def test_products_can_be_float32_at_one_level_only(rounding, decode):
    everything = frozenset(rounding.SOURCES) - {"products"}
    half, mixed = ({1: WinogradForm(3, float_products), 2: WinogradForm(4)} for float_products in (False, True))
    exact = decode(rounding.Case("", half, exact=everything | {"products"}))
    some = decode(rounding.Case("", mixed, exact=everything))
    none = decode(rounding.Case("", half, exact=everything))
    assert 0 < (some - exact).square().mean() < (none - exact).square().mean()


def test_script_writes_every_case(rounding, tmp_path, capsys):
    assert rounding.main(["--width", "8", "--latents", "1", "2", "2", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "rounding.json").read_text())
    assert [row["name"] for row in report["rows"]] == [case.name for case in rounding.cases()]
    assert all(40 < row["psnr_db"] < 100 for row in report["rows"])
    assert report["device"] == "CPU"
    assert "as decoded" in capsys.readouterr().out
