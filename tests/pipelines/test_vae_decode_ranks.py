# SPDX-License-Identifier: Apache-2.0
"""The decode over FastVideo's sequence-parallel ranks: the same video, and one path for all of them whatever fails."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

RANKS = (2, 4)
Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def expected(scripts) -> dict[str, torch.Tensor]:
    """FastVideo's own decode on one rank, with as many threads as each rank has."""
    tiny = SimpleNamespace(**runpy.run_path(str(scripts / "vae_tiny.py")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shapes = {"long": (9, 5), "short": (3, 5), "one row": (2, 1)}
    with torch.no_grad():
        videos = {name: tiny.tiny_vae().decode(tiny.tiny_latents(*shape)) for name, shape in shapes.items()}
    torch.set_num_threads(threads)
    return videos | {"latents": tiny.tiny_latents(*shapes["short"])}


@pytest.fixture(scope="module")
def seen(tmp_path_factory, run_python, scripts) -> dict[int, list[Outcomes]]:
    """By number of ranks: what each rank saw in every scenario of ``vae_ranks.py``."""
    out = tmp_path_factory.mktemp("ranks") / "seen"
    run_python(scripts / "vae_ranks.py", out, *map(str, RANKS))
    return {ranks: [torch.load(f"{out}.{ranks}.{rank}") for rank in range(ranks)] for ranks in RANKS}


@pytest.fixture(params=RANKS, ids="{} ranks".format)
def ranks(request, seen) -> list[Outcomes]:
    return seen[request.param]


def kernel_path(ranks: list[Outcomes]) -> str:
    return f"wan22_vae_decode, torch, float32, {len(ranks)} ranks"


@pytest.mark.parametrize("scenario", ["long", "short"])
def test_every_rank_has_the_full_video(scenario, ranks, expected):
    for outcomes in ranks:
        outcome = outcomes[scenario]
        torch.testing.assert_close(outcome["video"], expected[scenario], rtol=0, atol=1e-5)
        assert outcome["report"]["decode_path"] == kernel_path(ranks)
    assert [outcomes[scenario]["lines"] for outcomes in ranks] == [
        [f"Decoding with {kernel_path(ranks)}."] if scenario == "long" else [],
        *[[]] * (len(ranks) - 1),
    ]
    assert ranks[0]["long"]["prepared"] == 1
    assert ranks[0]["short"]["prepared"] == 0


@pytest.mark.parametrize("scenario", ["only the first", "each alone, only the first", "off, only the first"])
def test_only_the_writer_has_the_video(scenario, ranks, expected):
    first, *others = (outcomes[scenario] for outcomes in ranks)
    torch.testing.assert_close(first["video"], expected["short"], rtol=0, atol=1e-5)
    assert all(outcome["video"] is None and outcome["error"] is None for outcome in others)
    if scenario != "only the first":
        assert all(outcome["prepared"] == 0 for outcome in others), "nor do the others compute it"


def test_frames_for_a_file_are_shared_as_the_video_is(ranks, expected):
    first, *others = (outcomes["frames, only the first"] for outcomes in ranks)
    assert first["report"]["decode_path"] == f"{kernel_path(ranks)}, uint8 to the host"
    torch.testing.assert_close(2 * first["video"] - 1, expected["short"], rtol=0, atol=2 / 255 + 1e-5)
    assert all(outcome["video"] is None and outcome["error"] is None for outcome in others)


def test_ranks_that_are_not_to_share_decode_each_on_its_own(ranks, expected):
    for outcomes in ranks:
        assert outcomes["each alone"]["report"]["decode_path"] == "wan22_vae_decode, torch, float32"
        torch.testing.assert_close(outcomes["each alone"]["video"], expected["short"], rtol=0, atol=1e-5)
        assert torch.equal(outcomes["off"]["video"], expected["short"])


@pytest.mark.parametrize("scenario", ["tiles", "tiles, on"])
def test_tiles_that_upstream_shares_are_decoded_by_every_rank(scenario, ranks, expected):
    first, *others = (outcomes[scenario] for outcomes in ranks)
    torch.testing.assert_close(first["video"], len(ranks) * expected["latents"])
    assert all(outcome["video"] is None and outcome["error"] is None for outcome in others)
    assert first["report"]["decode_path"] == "FastVideo"


FAULTS = {
    "bad weights": "rank {last}: not a Wan2.2 decoder of base width 8: wrong shapes: decoder.norm_out.gamma",
    "no kernels": "rank {last}: no kernels for this GPU",
    "no memory to look at the weights": "rank {last}: CUDA out of memory",
    "no memory to prepare": "rank {last} failed to prepare its weights, so no rank does (OutOfMemoryError: CUDA out of",
    "no memory for a pass": "a pass of 1 latent frames needs",
    "one row": "1 latent rows cannot be split over {ranks} ranks; use at most 1 ranks",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_one_rank_before_the_first_exchange_is_upstream_s_decode_for_all(fault, ranks, expected):
    video = expected["one row" if fault == "one row" else "short"]
    for rank, outcomes in enumerate(ranks):
        outcome = outcomes[fault]
        assert outcome["report"]["decode_path"] == "FastVideo"
        assert outcome["seconds"] < 10
        if fault != "bad weights" or rank < len(ranks) - 1:
            assert torch.equal(outcome["video"], video)
    (line,) = ranks[0][fault]["lines"]
    reason = FAULTS[fault].format(last=len(ranks) - 1, ranks=len(ranks))
    assert line.startswith(f"Decoding with FastVideo's own decode: {reason}")
    assert not any(outcomes[fault]["lines"] for outcomes in ranks[1:]), "the first rank speaks for all"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "bad weights"])
def test_fault_is_told_once_and_only_the_writer_decodes(fault, ranks):
    video = ranks[0][fault]["video"]
    if fault != "one row":
        assert all(torch.equal(outcomes[f"{fault}, again"]["video"], video) for outcomes in ranks)
        assert not any(outcomes[f"{fault}, again"]["lines"] for outcomes in ranks)
    assert torch.equal(ranks[0][f"{fault}, only the first"]["video"], video)
    assert all(outcomes[f"{fault}, only the first"]["video"] is None for outcomes in ranks[1:])


def test_fault_in_the_middle_of_a_pass_raises_on_every_rank_in_time(ranks):
    *healthy, failed = (outcomes["in the middle"] for outcomes in ranks)
    assert failed["error"].startswith("OutOfMemoryError: a pass of 3 latent frames needs")
    last = len(ranks) - 1
    assert all(o["error"].startswith(f"CommunicationError: rank {last} failed in the middle") for o in healthy)
    assert all(outcomes["in the middle"]["seconds"] < 30 for outcomes in ranks)


@pytest.mark.parametrize(
    "scenario",
    [
        "good weights again",
        *(f"{fault}, mended" for fault in FAULTS if fault.startswith("no ")),
        "in the middle, mended",
    ],
)
def test_next_decode_without_the_fault_runs_in_parallel(scenario, ranks, expected):
    for outcomes in ranks:
        assert outcomes[scenario]["report"]["decode_path"] == kernel_path(ranks)
        torch.testing.assert_close(outcomes[scenario]["video"], expected["short"], rtol=0, atol=1e-5)


def test_all_ranks_prepare_anew_when_one_has_to(ranks, expected):
    for outcomes in ranks:
        assert outcomes["replaced on one rank"]["prepared"] == 1
        torch.testing.assert_close(outcomes["replaced on one rank"]["video"], expected["short"], rtol=0, atol=1e-5)
