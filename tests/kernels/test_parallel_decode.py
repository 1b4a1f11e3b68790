# SPDX-License-Identifier: Apache-2.0
"""World sizes 2, 3, 4 and 8 over gloo decode what one rank decodes, and no failure makes a rank hang.

Each world runs once, one process a rank (``parallel_worker.py``), and the tests look at what the ranks saw.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wan22_vae_decode import geometry, parallel

BASE, COLS = 4, 2
TIMEOUT = 6.0
WORKER = Path(__file__).parent / "parallel_worker.py"


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory, make_state_dict):
    """Starts one process a rank and returns what each saw (None for a rank that wrote nothing) and what it printed."""

    def run(world, scenario, limit, **environment):
        folder = tmp_path_factory.mktemp(f"{scenario}{world}")
        torch.save({name: tensor.float() for name, tensor in make_state_dict(BASE).items()}, folder / "weights.pt")
        environment |= {"OMP_NUM_THREADS": "1", "FAULT_TIMEOUT": str(TIMEOUT), "WORLD_SIZE": str(world)}
        command = [sys.executable, str(WORKER), scenario, str(folder)]
        outputs = [(folder / f"output{rank}").open("w+") for rank in range(world)]
        processes = [
            subprocess.Popen(
                command, env={**os.environ, **environment, "RANK": str(rank)}, stdout=output, stderr=output
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            for process in processes:
                process.wait(limit)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
            output.close()
        files = [folder / f"rank{rank}.json" for rank in range(world)]
        seen = [json.loads(file.read_text()) if file.exists() else None for file in files]
        return seen, texts

    return run


@pytest.fixture(scope="module", params=[2, 3, 4, 8], ids=lambda world: f"world{world}")
def ranks(request, run_ranks):
    seen, texts = run_ranks(request.param, "all", limit=200)
    assert all(result is not None for result in seen), "\n".join(texts)
    return seen


def test_videos_are_those_of_one_rank(ranks):
    for seen in ranks:
        for case in seen["equality"]:
            assert case["range"] > 0.1
            assert case["error"] < 1e-5, case["case"]


# Convs of a pass that need a halo: level, channels in multiples of the base, frames per latent frame, how many.
HALOS = [
    (0, 4, 1, 2),  # mid block's resnet 1
    (0, 4, 1, 6),  # up block 0
    (0, 4, 2, 1),  # its upsampler, after the time doubling
    (1, 4, 2, 6),  # up block 1
    (1, 4, 4, 1),  # its upsampler
    (2, 4, 4, 1),  # up block 2
    (2, 2, 4, 5),
    (2, 2, 4, 1),  # its upsampler
    (3, 2, 4, 1),  # up block 3
    (3, 1, 4, 5),
    (3, 1, 4, 1),  # head
]


def frames_of(passes, rate):
    """Frames of all passes where each latent frame gives ``rate``, but the video's first only one."""
    return rate * sum(stop - start for start, stop in passes) - (rate - 1)


# The upsamplers of up blocks 1 and 2 again: in Winograd form they need a second row.
SECOND_ROWS = [(1, 4, 4, 1), (2, 2, 4, 1)]


def halo_bytes(convs, passes, batch=1):
    """What a rank sends to one neighbour in float32."""
    values = sum(
        count * frames_of(passes, rate) * (COLS << level) * width * BASE for level, width, rate, count in convs
    )
    return 4 * batch * values


def test_bytes_are_those_of_the_formula(ranks):
    world = len(ranks)
    for rank, seen in enumerate(ranks):
        for case in seen["equality"]:
            frames, rows, batch, per_pass = case["case"]
            step = min(per_pass * world, frames)
            passes = [(start, min(start + step, frames)) for start in range(0, frames, step)]
            bands = geometry.row_bands(rows, world)
            own = bands[rank][1] - bands[rank][0]
            neighbours = (rank > 0) + (rank < world - 1)
            assert case["bytes"]["halo"] == neighbours * halo_bytes(HALOS, passes, batch)
            pixels = 3 * (4 * frames - 3) * 16 * own * 16 * COLS
            assert case["bytes"]["pixels"] == 4 * batch * pixels * (world - 1)
            split = [parallel.frame_intervals(*interval, world) for interval in passes]
            sent = sum((i[rank][1] - i[rank][0]) * (rows - own) for i in split if i)
            assert case["bytes"].get("prefix", 0) == 4 * batch * sent * COLS * 4 * BASE
            assert case["counts"]["pixels"] == len(passes)
            assert case["counts"].get("prefix", 0) == sum(1 for i in split if i)


def test_both_ways_through_the_prefix_were_taken(ranks):
    prefixes = [case["counts"].get("prefix", 0) for case in ranks[0]["equality"]]
    assert prefixes[0] == 0, "too short to split"
    assert prefixes[1] == 1, "split, then a short rest"


def test_one_receiver_gets_the_video_and_the_others_nothing(ranks):
    world = len(ranks)
    for rank, seen in enumerate(ranks):
        outputs = seen["outputs"]
        if rank == world - 1:
            assert outputs["shape_of_last"] == [1, 3, 9, 16 * (2 * world + 2), 16 * COLS]
            assert outputs["error_of_last"] < 1e-5
        else:
            assert outputs["shape_of_last"] == [1, 3, 0, 16 * (2 * world + 2), 16 * COLS]


def test_other_types_stay_within_their_tolerance(ranks):
    for seen in ranks:
        outputs = seen["outputs"]
        assert outputs["items"] == [9]
        assert outputs["steps"] <= 1
        assert outputs["half_psnr"] >= 90


def test_winograd_tiles_lie_as_on_one_rank(ranks):
    world = len(ranks)
    for rank, seen in enumerate(ranks):
        neighbours = (rank > 0) + (rank < world - 1)
        for case in seen["outputs"]["winograd"]:
            assert case["error"] < 1e-5
            top, _ = geometry.row_bands(case["rows"], world)[rank]
            assert case["first_rows"] == [top, 2 * top, 4 * top]
            assert case["halo_bytes"] == neighbours * halo_bytes(HALOS + SECOND_ROWS, [(0, 3)])


def test_failure_before_the_first_exchange_is_everybodys(ranks):
    causes = {
        "weights": (1, "WeightsError"),
        "named backend": (1, "BackendUnavailableError"),
        "latents": (0, "InputError"),
        "host memory": (1, "OutOfMemoryError"),
    }
    for rank, seen in enumerate(ranks):
        for case, (culprit, error) in causes.items():
            result = seen["agreement"][case]
            assert result["error"] == (error if rank == culprit else "PeerError"), case
            if rank != culprit:
                assert f"rank {culprit} failed to" in result["text"]
                assert error in result["text"]
            assert result["seconds"] < TIMEOUT
        assert seen["agreement"]["host memory"]["passes"] == (2 if rank == 1 else 0)


def test_ranks_that_want_different_things_are_refused(ranks):
    for seen in ranks:
        for case in ("options", "shapes"):
            assert seen["agreement"][case]["error"] == "InputError"
            assert "differ" in seen["agreement"][case]["text"]


def test_more_ranks_than_rows_are_refused(ranks):
    world = len(ranks)
    for seen in ranks:
        refusal = seen["agreement"]["too few rows"]
        assert refusal["error"] == "InputError"
        assert f"{world - 1} latent rows cannot be split over {world} ranks" in refusal["text"]
        assert seen["agreement"]["rank out of range"]["error"] == "InputError"


def test_kernels_on_some_ranks_only_are_used_on_none(ranks):
    for seen in ranks:
        assert seen["agreement"]["mixed backend"] == "torch"
        assert any("all of them use torch" in line for line in seen["agreement"]["mixed lines"])


def test_decoder_is_connected_to_every_rank_before_its_first_pass(ranks):
    for rank, seen in enumerate(ranks):
        others = [peer for peer in range(len(ranks)) if peer != rank]
        assert seen["agreement"]["connected"] == [[kind, peer] for kind in ("irecv", "isend") for peer in others]


def test_group_works_on_after_refusals(ranks):
    for seen in ranks:
        assert seen["agreement"]["afterwards"] < 1e-5


def test_pass_shrinks_on_all_ranks_together(ranks):
    world = len(ranks)
    for seen in ranks:
        assert seen["shrinking"]["items"] == [4 * world - 3, 4 * world, 4]
        assert seen["shrinking"]["error"] < 1e-5
        assert seen["shrinking"]["hopeless"]["error"] == "OutOfMemoryError"


def test_overflow_on_any_rank_moves_all_to_bfloat16(ranks):
    world = len(ranks)
    for seen in ranks:
        assert seen["overflow"]["lines"] == [
            f"float16 overflowed in latent frames {2 * world} to {2 * world + 1}; this decode goes on in bfloat16"
        ]
        assert seen["overflow"]["equal"]
        assert seen["overflow"]["differs before"]


def assert_fault_raised_in_time(ranks):
    for rank, seen in enumerate(ranks):
        result = seen["fault"]["fault"]
        if rank == 1:
            assert (result["error"], result["text"]) == ("RuntimeError", "injected fault")
        else:
            assert result["error"] == "CommunicationError"
            assert "rank 1 failed in the middle of a pass (RuntimeError: injected fault)" in result["text"]
        assert result["seconds"] < 3 * TIMEOUT


def test_fault_in_a_pass_raises_on_every_rank_in_time(ranks):
    assert_fault_raised_in_time(ranks)


def test_broken_decoder_says_so_and_a_new_one_works(ranks):
    for seen in ranks:
        assert seen["fault"]["again"]["error"] == "CommunicationError"
        assert seen["fault"]["again"]["seconds"] < 1
        assert "make a new decoder" in seen["fault"]["why_not"]
        assert seen["fault"]["fresh decoder"] < 1e-5


def test_rank_that_vanishes_does_not_make_the_others_hang(run_ranks):
    seen, texts = run_ranks(3, "vanish", limit=60)
    assert seen[1] is None
    for rank in (0, 2):
        assert seen[rank] is not None, texts[rank]
        assert seen[rank]["vanish"]["error"] == "CommunicationError"
        assert seen[rank]["vanish"]["seconds"] < 5 * TIMEOUT


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
def test_nccl_gives_one_gpu_s_video_and_ends_after_a_fault(world, run_ranks):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, torch sees {torch.cuda.device_count()}")
    seen, texts = run_ranks(world, "nccl", limit=200, DEVICE="cuda")
    assert all(result is not None for result in seen), "\n".join(texts)
    for result in seen:
        assert all(case["error"] < 1e-5 for case in result["equality"])
        assert result["fault"]["fresh decoder"] < 1e-5
    assert_fault_raised_in_time(seen)


def test_statistics_are_logged_only_when_asked_for(run_ranks):
    for value in ("0", "1"):
        _, texts = run_ranks(2, "once", limit=60, WAN22_VAE_DECODE_STATS=value)
        for rank, text in enumerate(texts):
            assert (f"rank {rank} of 2 sent: halo 30 (" in text) == (value == "1")


@pytest.fixture(scope="module")
def disagreeing(run_ranks):
    seen, texts = run_ranks(2, "disagreement", limit=100)
    assert all(result is not None for result in seen), "\n".join(texts)
    return seen


def test_ranks_with_other_weights_are_refused(disagreeing):
    for seen in disagreeing:
        refusal = seen["disagreement"]["other weights"]
        assert refusal["error"] == "InputError"
        assert "their weights (by their checksums) differ" in refusal["text"]


def test_interrupt_of_one_rank_s_setup_is_told_to_the_others(disagreeing):
    results = [seen["disagreement"]["interrupted setup"] for seen in disagreeing]
    assert [result["error"] for result in results] == ["PeerError", "KeyboardInterrupt"]
    assert "rank 1 failed to prepare its weights" in results[0]["text"]
    assert all(result["seconds"] < TIMEOUT for result in results)


def test_interrupt_in_an_agreement_breaks_the_communicator(disagreeing):
    results = [seen["disagreement"] for seen in disagreeing]
    assert results[1]["interrupted agreement"]["error"] == "KeyboardInterrupt"
    assert results[0]["interrupted agreement"]["error"] == "CommunicationError"
    assert "lost contact with a rank" in results[0]["interrupted agreement"]["text"]
    assert all("make a new decoder on every rank" in result["after the interruption"] for result in results)


def test_decoders_of_a_group_take_turns(disagreeing):
    for seen in disagreeing:
        assert seen["disagreement"]["within a stream"], "a thread may decode while it iterates over a stream"
        assert seen["disagreement"]["two threads"]


def test_stream_that_one_rank_leaves_early_is_noticed(disagreeing):
    for seen in disagreeing:
        left = seen["disagreement"]["left"]
        assert left["error"] == "CommunicationError"
        assert "the ranks are at different places" in left["text"]
        assert left["seconds"] < TIMEOUT
        assert "make a new decoder on every rank" in seen["disagreement"]["after leaving"]


def test_rank_outside_the_group_is_refused(disagreeing):
    outside = [seen["disagreement"]["outside the group"] for seen in disagreeing]
    assert outside[0]["error"] == "done"
    assert outside[1]["error"] == "InputError"
    assert "not a rank of the group" in outside[1]["text"]


def test_new_world_has_new_groups(disagreeing):
    assert all(seen["new_world"] < 1e-5 for seen in disagreeing)
