# SPDX-License-Identifier: Apache-2.0
"""A pass never holds more than the documented formula, and passes shrink to what fits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wan22_vae_decode import Decoder, OutOfMemoryError, memory, weights, winograd
from wan22_vae_decode.backends.base import Halo, OpShape
from wan22_vae_decode.backends.cuda import heuristics
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.backends.cuda.targets import HOPPER
from wan22_vae_decode.backends.torch import TorchBackend, _free_host_bytes
from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.layers import UpsampleConv, WinogradConv, WinogradForm

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the storages that ops return and that are still alive; ``peak`` is the most after any op."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("frames_per_pass", "batch", "rows", "cols", "winograd_levels", "upsample_winograd"),
    [
        (1, 1, 4, 6, {}, ()),
        (4, 1, 4, 6, {}, ()),
        (2, 2, 3, 5, {}, ()),
        (4, 1, 8, 12, {}, ()),
        (4, 1, 8, 12, {}, (0, 1, 2)),
        (1, 1, 4, 6, {0: WinogradForm(4), 1: WinogradForm(4), 2: WinogradForm(3), 3: WinogradForm(3, True)}, ()),
        (2, 2, 3, 5, {1: WinogradForm(3), 2: WinogradForm(4), 3: WinogradForm(4)}, (1, 2)),
    ],
)
def test_pass_holds_no_more_than_the_formula(
    dtype, frames_per_pass, batch, rows, cols, winograd_levels, upsample_winograd, state_dict, latents
):
    ops = TorchBackend(CPU, dtype, winograd_levels, upsample_winograd)
    decoder = Decoder.from_state_dict(state_dict, backend=ops, dtype=dtype, frames_per_pass=frames_per_pass)
    frames = 2 * frames_per_pass + 1
    z = latents(frames, rows, cols, batch).float()
    plan = memory.plans(frames_per_pass)[0]
    predicted = memory.pass_bytes(ops, decoder.arch, memory.Extent(batch, rows, rows, cols), plan)
    with LiveBytes() as live:
        video = decoder.decode(z)
    held = live.peak - video.nbytes
    assert held <= predicted
    assert held >= 0.75 * predicted, f"the formula ({predicted}) is far above what was held ({held})"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("float_products", [False, True])
@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize(
    "size",
    [
        OpShape(1, 4, 16, 24, 32, 32, row_halo=False),
        OpShape(1, 4, 13, 22, 16, 64, row_halo=True),
        OpShape(2, 1, 15, 23, 64, 8, row_halo=False),
    ],
    ids=["square", "halo", "narrowing"],
)
def test_winograd_conv_holds_no_more_than_the_formula(size, columns, float_products, dtype):
    ops = TorchBackend(CPU, dtype)
    x = torch.randn(size.batch, size.frames, size.rows, size.cols, size.c_in).to(dtype)
    out = x.new_zeros(size.batch, size.frames, size.rows, size.cols, size.c_out)
    halo = Halo(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous()) if size.row_halo else None
    form = WinogradForm(columns, float_products)
    weight = torch.randn(winograd.components(columns), size.c_out, 3, size.c_in).to(dtype)
    conv = WinogradConv(weight, torch.zeros(size.c_out), form)
    source, _ = ops.causal_pad(x, None, halo, conv)
    predicted = ops.workspace_bytes("winograd_conv3d", replace(size, winograd=form))
    with LiveBytes() as live:
        ops.winograd_conv3d(source, conv, residual=out, out=out)
    assert 0.9 * predicted <= live.peak <= predicted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "size",
    [
        OpShape(1, 4, 16, 24, 32, 32, row_halo=False),
        OpShape(1, 4, 13, 22, 16, 64, row_halo=True),
        OpShape(2, 1, 14, 23, 64, 8, row_halo=True),
    ],
    ids=["square", "halo", "narrowing"],
)
def test_upsampling_conv_holds_no_more_than_the_formula(size, dtype):
    ops = TorchBackend(CPU, dtype)
    x = torch.randn(size.batch, size.frames, size.rows, size.cols, size.c_in).to(dtype)
    edge = x[:, :, :2].contiguous()
    # Where a band of so many rows has the most rows of tiles.
    halo = Halo(edge, edge, first_row=-size.rows % 3) if size.row_halo else None
    components = torch.randn(winograd.UPSAMPLE_COMPONENTS, 2, 2, size.c_out, size.c_in).to(dtype)
    up = UpsampleConv(None, components, torch.zeros(size.c_out))
    shortcut = torch.zeros(*x.shape[:4], size.c_out, dtype=dtype)
    predicted = ops.workspace_bytes("upsample_conv2x", replace(size, upsample_method="winograd"))
    with LiveBytes() as live:
        out = ops.upsample_conv2x(x, up, shortcut, 0, halo)
    assert 0.9 * predicted <= live.peak - out.nbytes <= predicted


class Allocating(CudaBackend):
    """The CUDA backend with launches that do nothing: what it allocates is all that is looked at."""

    def __init__(self, dtype):
        super().__init__(CPU, dtype, Kernels(lambda *launch: None, HOPPER, 132))

    def free_bytes(self):
        return None

    def reserve(self, nbytes):
        pass


@pytest.mark.parametrize(("scratch", "upsample"), [(None, "phases"), (None, "winograd"), (1, "winograd")])
@pytest.mark.parametrize(("frames_per_pass", "batch", "rows", "cols"), [(1, 1, 4, 6), (4, 1, 8, 12), (2, 2, 3, 5)])
def test_cuda_pass_holds_no_more_than_the_formula(
    scratch, upsample, frames_per_pass, batch, rows, cols, make_state_dict, latents, monkeypatch
):
    """With Winograd at the levels that bfloat16 uses it on, in as few bands as allowed or in as many as possible."""
    if scratch is not None:
        monkeypatch.setattr(heuristics, "WINOGRAD_BYTES", scratch)
        monkeypatch.setattr(heuristics, "SCRATCH_BYTES", scratch)
    monkeypatch.setattr(heuristics, "upsample_method", lambda dtype, level: upsample)
    ops = Allocating(torch.bfloat16)
    decoder = Decoder.from_state_dict(
        make_state_dict(latent=8), device="cpu", backend=ops, dtype=torch.bfloat16, frames_per_pass=frames_per_pass
    )
    z = latents(2 * frames_per_pass + 1, rows, cols, batch, channels=8).bfloat16()
    plan = memory.plans(frames_per_pass)[0]
    predicted = memory.pass_bytes(ops, decoder.arch, memory.Extent(batch, rows, rows, cols), plan)
    with LiveBytes() as live:
        video = decoder.decode(z)
    held = live.peak - video.nbytes
    # Flags and indices, whatever the size of the video.
    assert held <= predicted + 4096
    assert held >= 0.75 * predicted, f"the formula ({predicted}) is far above what was held ({held})"


@pytest.mark.parametrize("scratch", [1, 20000, None])
@pytest.mark.parametrize("first_row", [None, 0, 1, 2])
@pytest.mark.parametrize("rows", [3, 4, 5, 13])
def test_cuda_upsampling_conv_holds_what_the_formula_says(rows, first_row, scratch, monkeypatch):
    """Also of a band, wherever it begins, which the formula does not know."""
    if scratch is not None:
        monkeypatch.setattr(heuristics, "SCRATCH_BYTES", scratch)
    ops = Allocating(torch.float16)
    x, shortcut = torch.zeros(2, 4, rows, 5, 8).half(), torch.zeros(2, 4, rows, 5, 16).half()
    edge = x[:, :, :2].contiguous()
    halo = None if first_row is None else Halo(edge, edge, first_row)
    up = UpsampleConv(None, torch.zeros(winograd.UPSAMPLE_COMPONENTS, 2, 2, 16, 8).half(), torch.zeros(16))
    shape = OpShape(2, 4, rows, 5, 8, 16, row_halo=halo is not None, upsample_method="winograd")
    with LiveBytes() as live:
        out = ops.upsample_conv2x(x, up, shortcut, 0, halo)
    assert live.peak - out.nbytes == ops.workspace_bytes("upsample_conv2x", shape)


def test_documented_peak_at_704x1248():
    """The README's figures for the reference ops in float16."""
    ops = TorchBackend(CPU, torch.float16)
    extent = memory.Extent(1, 44, 44, 78)
    peak = memory.pass_bytes(ops, Architecture(), extent, memory.Plan(4, 2)) / 2**30
    assert 8.7 < peak < 9.7
    assert memory.pass_bytes(ops, Architecture(), extent, memory.Plan(1, 1)) / 2**30 < 7


@pytest.mark.parametrize("world", [2, 3])
def test_a_band_needs_less_than_the_whole(world):
    ops = TorchBackend(CPU, torch.float16)
    plan = memory.Plan(4 * world, 2 * world)
    whole = memory.pass_bytes(ops, Architecture(), memory.Extent(1, 44, 44, 78), plan)
    rows = -(-44 // world)
    band = memory.pass_bytes(ops, Architecture(), memory.Extent(1, rows, 44, 78, world), plan)
    assert whole / world < band < 1.1 * whole / world + 2**30


def test_second_halo_rows_are_counted(monkeypatch):
    """Sent and received on both sides of a band, for the upsampling convs in Winograd form."""
    monkeypatch.setattr(TorchBackend, "workspace_bytes", lambda *arguments: 0)
    plan, arch = memory.Plan(4, 4), Architecture(8, 4)
    direct, tiled = (
        dict(memory.steps(TorchBackend(CPU, torch.float16, {}, levels), arch, memory.Extent(1, 2, 4, 6, 2), plan))
        for levels in ((), (1, 2))
    )
    more = {name: tiled[name] - nbytes for name, nbytes in direct.items() if tiled[name] != nbytes}
    # 16 frames at both levels, of 12 columns and 32 channels, of 24 and 16.
    assert more == {"up_blocks.1.upsample": 4 * 16 * 12 * 32 * 2, "up_blocks.2.upsample": 4 * 16 * 24 * 16 * 2}


class Limited(TorchBackend):
    """Reports a fixed amount of free memory."""

    limit = 0

    def free_bytes(self):
        return self.limit


@pytest.fixture
def limited(state_dict):
    def make(frames_per_pass, plan=None, extent=None):
        ops = Limited(CPU, torch.float32)
        decoder = Decoder.from_state_dict(state_dict, backend=ops, frames_per_pass=frames_per_pass)
        if plan is None:
            ops.limit = 1
        else:
            # A streamed pass is new memory: 4 float32 frames of 16x16 RGB pixels for each latent.
            pixels = plan.frames * extent.rows * extent.cols * 4 * 256 * 3 * 4
            ops.limit = memory.pass_bytes(ops, decoder.arch, extent, plan) + pixels
        return decoder

    return make


@pytest.mark.parametrize("fitting", [1, 2, 5])
def test_auto_takes_the_largest_pass_that_fits(fitting, limited, latents):
    extent = memory.Extent(1, 2, 2, 3)
    decoder = limited("auto", memory.Plan(fitting, 1), extent)
    sizes = [item.shape[2] for item in decoder.stream(latents(7, 2, 3).float())]
    assert sizes[0] == 4 * fitting - 3


def test_pass_shrinks_with_one_line_that_says_what_fits(limited, latents, caplog):
    from wan22_vae_decode import log

    log.forget()
    z = latents(9, 2, 3).float()
    decoder = limited(4, memory.Plan(2, 1), memory.Extent(1, 2, 2, 3))
    sizes = [item.shape[2] for item in decoder.stream(z)]
    assert sizes == [5, 8, 8, 8, 4]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "a pass of 4 latent frames needs" in lines[0]
    assert "using 2" in lines[0]


def test_no_pass_fits(limited, latents):
    with pytest.raises(OutOfMemoryError, match=r"a pass of 1 latent frames needs .* are free"):
        limited(4).decode(latents(2, 2, 2).float())


def test_a_cpu_without_memory_refuses_before_the_decode(state_dict, latents, monkeypatch):
    decoder = Decoder.from_state_dict(state_dict, device="cpu")
    z = latents(1, 2, 3)
    decoder.decode(z)
    monkeypatch.setattr("wan22_vae_decode.backends.torch._free_host_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"a pass of 1 latent frames needs .* on cpu"):
        decoder.decode(z)
    assert not Path("/proc/meminfo").exists() or _free_host_bytes() > 2**20


class Failing(TorchBackend):
    """Runs out of memory in the head once, in the middle of a decode."""

    heads = 0
    fail_at = 2
    error: BaseException = torch.OutOfMemoryError("no more memory")

    def output_head(self, *args):
        self.heads += 1
        if self.heads == self.fail_at:
            raise self.error
        super().output_head(*args)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no more memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_running_out_in_a_pass_goes_on_with_a_smaller_one(error, state_dict, latents):
    z = latents(9, 2, 2)
    expected = Decoder.from_state_dict(state_dict, dtype="float64").decode(z, torch.float64)
    ops = Failing(CPU, torch.float64)
    ops.error = error
    decoder = Decoder.from_state_dict(state_dict, backend=ops, dtype="float64", frames_per_pass=4)
    video = decoder.decode(z, torch.float64)
    assert ops.heads > ops.fail_at
    assert (video - expected).abs().max() < 1e-13


def test_other_errors_in_a_pass_stay_what_they_are(state_dict, latents):
    ops = Failing(CPU, torch.float64)
    ops.error = RuntimeError("something else")
    decoder = Decoder.from_state_dict(state_dict, backend=ops, dtype="float64", frames_per_pass=4)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        decoder.decode(latents(9, 2, 2))


@pytest.mark.parametrize(
    ("dtype", "sentence"),
    [("float32", "1 frames of pixels do not fit"), ("float16", "the check for finite latents does not fit")],
)
def test_sizes_beyond_the_memory_of_a_cpu_are_an_error(dtype, sentence, state_dict):
    # What torch asks for at once here, no machine has.
    z = torch.zeros(1).expand(1, 4, 1, 2**22, 2**22)
    decoder = Decoder.from_state_dict(state_dict, dtype=dtype)
    with pytest.raises(OutOfMemoryError, match=sentence):
        decoder.decode(z)


def test_running_out_with_nothing_smaller_left_is_an_error(state_dict, latents):
    ops = Failing(CPU, torch.float32)
    ops.fail_at = 1
    decoder = Decoder.from_state_dict(state_dict, backend=ops, dtype="float32", frames_per_pass=1)
    with pytest.raises(OutOfMemoryError, match="a pass of 1 latent frames needs"):
        decoder.decode(latents(2, 2, 2).float())


def test_replay_that_does_not_fit_is_an_error(state_dict, latents):
    class Exhausted(Failing):
        @property
        def fail_at(self):
            return max(self.heads, 3)

    ops = Exhausted(CPU, torch.float32)
    decoder = Decoder.from_state_dict(state_dict, backend=ops, dtype="float32", frames_per_pass=2)
    with pytest.raises(OutOfMemoryError, match="the passes before latent frame 4, which are computed again, do not"):
        decoder.decode(latents(6, 2, 2).float())


def test_video_that_does_not_fit_is_an_error(state_dict, latents, monkeypatch):
    def empty(*args, **options):
        raise torch.OutOfMemoryError("no more memory")

    decoder = Decoder.from_state_dict(state_dict)
    z = latents(2, 2, 2).float()
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(OutOfMemoryError, match="5 frames of pixels do not fit"):
        decoder.decode(z)


def test_weights_that_do_not_fit_are_an_error(state_dict, monkeypatch):
    def prepare(*args, **options):
        raise torch.OutOfMemoryError("no more memory")

    monkeypatch.setattr(weights, "prepare", prepare)
    with pytest.raises(OutOfMemoryError, match=r"the weights in torch\.float16 do not fit"):
        Decoder.from_state_dict(state_dict, dtype="float16")
