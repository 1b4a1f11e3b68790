# SPDX-License-Identifier: Apache-2.0
"""One rank of ``test_parallel_decode``: runs every scenario and writes what it saw as JSON.

    python parallel_worker.py SCENARIO FOLDER        with RANK and WORLD_SIZE set, and DEVICE=cuda for NCCL

The state dict comes from FOLDER; results go to FOLDER/rank<r>.json. A process of its own for each rank, because
ranks share nothing.
"""

import json
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from wan22_vae_decode import (
    BackendUnavailableError,
    Decoder,
    OutOfMemoryError,
    backends,
    host,
    memory,
    parallel,
    weights,
)
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.layers import WinogradForm

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK) if os.environ.get("DEVICE") == "cuda" else torch.device("cpu")
BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"


def latents(frames, rows, cols=2, batch=1, scale=1.0):
    generator = torch.Generator().manual_seed(frames + 100 * rows)
    return scale * torch.randn(batch, 4, frames, rows, cols, generator=generator).to(DEVICE)


def outcome(action):
    """What a call did: its error's class and text, or the text "done"; and how long it took."""
    start = time.monotonic()
    try:
        action()
        error, text = "done", ""
    except BaseException as failure:
        error, text = type(failure).__name__, str(failure)
    return {"error": error, "text": text, "seconds": time.monotonic() - start}


class Lines(logging.Handler):
    """Keeps the package's log lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def take(self):
        taken, self.lines = self.lines, []
        return taken


class Limited(TorchBackend):
    limit = None

    def free_bytes(self):
        return self.limit


class Kernels(TorchBackend):
    """Stands for kernels that only some ranks have."""

    name = "cuda"


class Faulty(TorchBackend):
    """Fails in the middle of the graph after some calls."""

    calls = 0
    fail_at = -1

    def time_double(self, *args):
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("injected fault")
        super().time_double(*args)


class Upsampling(TorchBackend):
    """Keeps where the bands of upsampling convs began."""

    def __init__(self, *options, **more):
        super().__init__(*options, **more)
        self.first_rows = []

    def upsample_conv2x(self, x, up, shortcut, skip_frames, halo):
        if halo is not None:
            self.first_rows.append(halo.first_row)
        return super().upsample_conv2x(x, up, shortcut, skip_frames, halo)


class Ranks:
    """Both decoders of a scenario: of all ranks, and of one."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.lines = Lines()
        logging.getLogger("wan22_vae_decode").addHandler(self.lines)

    def together(self, **options):
        return Decoder.from_state_dict(self.tensors, device=DEVICE, group=dist.group.WORLD, **options)

    def alone(self, z, out_dtype=torch.float32, **options):
        """The video of one rank: rank 0 decodes it, everybody gets it."""
        video = [None]
        if RANK == 0:
            video = [Decoder.from_state_dict(self.tensors, device=DEVICE, **options).decode(z, out_dtype).cpu()]
        dist.broadcast_object_list(video, src=0)
        return video[0].to(DEVICE)


def equality(ranks):
    """Videos of all ranks against one rank's, and what was sent for them."""
    seen = []
    cases = [
        # frames, rows, batch, frames_per_pass
        (1, 2 * WORLD + 1, 1, 4),
        (2 * WORLD + 2, WORLD, 1, 2),
        (2 * WORLD + 1, 2 * WORLD, 2, 1),
        (min(8 + 2 * WORLD, 20), WORLD + 1, 1, 2),
    ]
    for frames, rows, batch, per_pass in cases:
        z = latents(frames, rows, batch=batch)
        decoder = ranks.together(dtype="float32", frames_per_pass=per_pass)
        video = decoder.decode(z)
        expected = ranks.alone(z, dtype="float32", frames_per_pass=per_pass)
        stats = decoder.stats
        seen.append(
            {
                "case": [frames, rows, batch, per_pass],
                "error": (video - expected).abs().max().item(),
                "range": expected.abs().max().item(),
                "counts": stats.counts,
                "bytes": stats.bytes,
            }
        )
    return seen


def outputs(ranks):
    """Other types, one receiver, streaming, float16, Winograd tiles."""
    z = latents(3, 2 * WORLD + 2)
    decoder = ranks.together(dtype="float32")
    expected = ranks.alone(z, dtype="float32")
    last = decoder.decode(z, to=WORLD - 1)
    items = list(decoder.stream(z, torch.uint8))
    pixels = ranks.alone(z, torch.uint8, dtype="float32")
    steps = (torch.cat(items, dim=2).int() - pixels.int()).abs().max().item()
    half = ranks.together(dtype="float16").decode(z) - ranks.alone(z, dtype="float16")
    tiles = []
    # Two latent rows or more a rank, and down to one.
    for rows in (2 * WORLD + 2, WORLD + 1):
        z = latents(3, rows)
        forms = {level: WinogradForm(columns) for level, columns in enumerate((4, 3, 4, 4))}
        backend = Upsampling(DEVICE, torch.float32, forms, upsample_winograd=(1, 2))
        decoder = ranks.together(backend=backend, dtype="float32")
        video = decoder.decode(z)
        error = (video - ranks.alone(z, backend=backend, dtype="float32")).abs().max().item()
        sent = decoder.stats.bytes["halo"]
        tiles.append({"rows": rows, "error": error, "first_rows": backend.first_rows, "halo_bytes": sent})
    return {
        "shape_of_last": list(last.shape),
        "error_of_last": (last - expected).abs().max().item() if last.numel() else None,
        "items": [item.shape[2] for item in items],
        "steps": steps,
        "half_psnr": -10 * (half.square().mean() / 4).clamp_min(1e-20).log10().item(),
        "winograd": tiles,
    }


def agreement(ranks):
    """Failures of one rank before anything is exchanged."""
    z = latents(2, WORLD + 1)
    seen = {}
    broken = dict(ranks.tensors)
    if RANK == 1:
        del broken["decoder.conv_in.bias"]
    seen["weights"] = outcome(lambda: Decoder.from_state_dict(broken, group=dist.group.WORLD))
    seen["options"] = outcome(lambda: ranks.together(frames_per_pass=1 + RANK))

    original = backends.create

    def create(name, device, dtype):
        if name != "cuda":
            return original(name, device, dtype)
        if RANK == 1:
            raise BackendUnavailableError("no kernels on this rank")
        return Kernels(device, dtype)

    backends.create = create
    ranks.lines.take()
    chosen = ranks.together()
    seen["mixed backend"] = chosen.backend
    seen["mixed lines"] = ranks.lines.take()
    seen["named backend"] = outcome(lambda: ranks.together(backend="cuda"))
    backends.create = original

    exchange, peers = dist.batch_isend_irecv, set()

    def recorded(operations):
        peers.update((operation.op.__name__, operation.peer) for operation in operations)
        return exchange(operations)

    dist.batch_isend_irecv = recorded
    decoder = ranks.together(dtype="float32")
    dist.batch_isend_irecv = exchange
    seen["connected"] = sorted(peers)
    bad = torch.zeros(1, 5, 2, WORLD + 1, 2) if RANK == 0 else z
    seen["latents"] = outcome(lambda: decoder.decode(bad))
    other = latents(2 + RANK, WORLD + 1)
    seen["shapes"] = outcome(lambda: decoder.decode(other))
    seen["too few rows"] = outcome(lambda: decoder.decode(latents(1, WORLD - 1)))
    seen["rank out of range"] = outcome(lambda: decoder.decode(z, to=WORLD))

    allocated = []

    def target(pixels):
        allocated.append(pixels)
        if len(allocated) == 2:
            raise OutOfMemoryError("no pinned memory")

    host.target = target
    streaming = ranks.together(dtype="float32", frames_per_pass=1)
    # Only one rank wants the pixels on the host, and has no memory for those of the second pass.
    seen["host memory"] = outcome(lambda: list(streaming.stream(latents(2 * WORLD, WORLD), on_host=RANK == 1)))
    seen["host memory"]["passes"] = len(allocated)
    seen["afterwards"] = (decoder.decode(z) - ranks.alone(z, dtype="float32")).abs().max().item()
    return seen


def shrinking(ranks):
    """One rank has less memory than the others."""
    z = latents(2 * WORLD + 1, 2 * WORLD)
    ops = Limited(DEVICE, torch.float32)
    decoder = ranks.together(backend=ops, dtype="float32", frames_per_pass=2)
    if RANK == WORLD - 1:
        extent = memory.Extent(1, 2, 2 * WORLD, 2, WORLD)
        # All float32 pixels twice, new and as they come in, and this rank's two rows to send.
        pixels = WORLD * (2 * 2 * WORLD + 2) * 2 * 4 * 256 * 3 * 4
        ops.limit = memory.pass_bytes(ops, decoder.arch, extent, memory.Plan(WORLD, 1)) + pixels
    items = list(decoder.stream(z))
    expected = ranks.alone(z, dtype="float32")
    result = {
        "items": [item.shape[2] for item in items],
        "error": (torch.cat(items, dim=2) - expected).abs().max().item(),
    }
    if RANK == WORLD - 1:
        ops.limit = 1
    result["hopeless"] = outcome(lambda: decoder.decode(z))
    return result


def overflow(ranks):
    """The guard's flag is shared: every rank goes on in bfloat16 from the same pass."""
    tensors = dict(ranks.tensors)
    tensors["decoder.conv_in.weight"] = 3000 * tensors["decoder.conv_in.weight"]
    loud = Ranks(tensors)
    z = latents(2 * WORLD + 2, WORLD)
    z[:, :, -1] *= 100
    ranks.lines.take()
    video = loud.together(dtype="float16", frames_per_pass=1).decode(z)
    lines = ranks.lines.take()
    expected = loud.together(dtype="bfloat16", frames_per_pass=1).decode(z)
    seam = 8 * WORLD - 3
    return {
        "lines": lines,
        "equal": torch.equal(video[:, :, seam:], expected[:, :, seam:]),
        "differs before": not torch.equal(video[:, :, :seam], expected[:, :, :seam]),
    }


def impatient():
    """From here on, decoders wait for a silent rank only as long as the test can."""
    os.environ[parallel.TIMEOUT_VARIABLE] = os.environ["FAULT_TIMEOUT"]
    parallel._communicators.clear()


def disagreement(ranks):
    """Ranks that differ in what they decode with or where they are, or that are interrupted."""
    impatient()
    z = latents(3, WORLD)
    seen = {}
    other = dict(ranks.tensors)
    if RANK == 1:
        other["decoder.conv_out.bias"] = other["decoder.conv_out.bias"] + 0.25
    seen["other weights"] = outcome(lambda: Decoder.from_state_dict(other, group=dist.group.WORLD))

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    prepare = weights.prepare
    if RANK == 1:
        weights.prepare = interrupted
    seen["interrupted setup"] = outcome(lambda: ranks.together())
    weights.prepare = prepare

    decoder = ranks.together(dtype="float32", frames_per_pass=1)
    parts = list(decoder.stream(z))
    within = decoder.stream(z)
    next(within)
    seen["within a stream"] = torch.equal(decoder.decode(z), torch.cat(parts, dim=2))
    within.close()

    # Two decoders in two threads: the main thread's begins first on every rank.
    second = ranks.together(dtype="float32", frames_per_pass=1)
    stream = decoder.stream(z)
    pixels = [next(stream)]
    with ThreadPoolExecutor(1) as pool:
        other_thread = pool.submit(second.decode, z)
        pixels += list(stream)
        seen["two threads"] = torch.equal(other_thread.result(), torch.cat(pixels, dim=2))

    communicator = decoder._comm
    communicator.broken = None
    if RANK == 1:
        communicator._all_gather = interrupted
    seen["interrupted agreement"] = outcome(lambda: decoder.decode(z))
    seen["after the interruption"] = decoder.why_not(z)
    # The interrupted rank knows at once, the other after its timeout.
    dist.barrier()

    decoder = ranks.together(dtype="float32", frames_per_pass=1)
    stream = decoder.stream(z)
    next(stream)
    if RANK == 1:
        # This rank leaves the stream early.
        seen["left"] = outcome(lambda: decoder.decode(z))
    else:
        seen["left"] = outcome(lambda: list(stream))
    stream.close()
    seen["after leaving"] = decoder.why_not(z)

    outsider = dist.new_group([0])
    seen["outside the group"] = outcome(lambda: Decoder.from_state_dict(ranks.tensors, group=outsider))
    return seen


def new_world(ranks):
    """The groups of a world that was destroyed are not used in the next."""
    ranks.together(dtype="float32")
    folder = Path(sys.argv[2])
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, init_method=f"file://{folder}/second", rank=RANK, world_size=WORLD)
    z = latents(2, WORLD)
    return (ranks.together(dtype="float32").decode(z) - ranks.alone(z, dtype="float32")).abs().max().item()


def fault(ranks):
    """A rank fails in the middle of the second pass, while its neighbours wait for its rows."""
    impatient()
    z = latents(2 * WORLD, WORLD)
    ops = Faulty(DEVICE, torch.float32)
    decoder = ranks.together(backend=ops, dtype="float32", frames_per_pass=1)
    if RANK == 1:
        ops.fail_at = 3
    seen = {"fault": outcome(lambda: decoder.decode(z))}
    seen["again"] = outcome(lambda: decoder.decode(z))
    seen["why_not"] = decoder.why_not(z)
    fresh = ranks.together(dtype="float32", frames_per_pass=1)
    seen["fresh decoder"] = (fresh.decode(z) - ranks.alone(z, dtype="float32")).abs().max().item()
    return seen


def vanish(ranks):
    """A rank's process ends in the middle of a pass."""
    impatient()
    ops = Faulty(DEVICE, torch.float32)
    decoder = ranks.together(backend=ops, dtype="float32", frames_per_pass=1)
    if RANK == 1:
        ops.time_double = lambda *args: os._exit(0)
    return outcome(lambda: decoder.decode(latents(3, WORLD)))


def once(ranks):
    """One decode, for what it logs."""
    ranks.together(dtype="float32").decode(latents(1, WORLD))
    print("\n".join(ranks.lines.take()), flush=True)


SCENARIOS = {
    "once": (once,),
    "nccl": (equality, fault),
    "all": (equality, outputs, agreement, shrinking, overflow, fault),
    "disagreement": (new_world, disagreement),
    "vanish": (vanish,),
}


def main():
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(BACKEND, init_method=f"file://{folder}/store", rank=RANK, world_size=WORLD)
    ranks = Ranks(torch.load(folder / "weights.pt"))
    seen = {}
    for part in SCENARIOS[scenario]:
        start = time.monotonic()
        seen[part.__name__] = part(ranks)
        print(RANK, part.__name__, round(time.monotonic() - start, 1), flush=True)
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))
    # A broken group's threads would wait for their timeouts at a regular exit.
    os._exit(0)


if __name__ == "__main__":
    main()
