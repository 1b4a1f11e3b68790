# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's host side on a CPU: launchers emulated from their raw arguments compute what the torch ops do.

The emulated launchers see only what the real ones see (addresses, strides, extents), so a wrong stride, offset or
extent shows up as a wrong result here, without a GPU.
"""

import ctypes
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from wan22_vae_decode.backends.cuda import heuristics, library, selftest
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.backends.cuda.selftest import Case
from wan22_vae_decode.decoder import Decoder
from wan22_vae_decode.errors import BackendUnavailableError

ELEMENTS = {0: torch.float16, 1: torch.bfloat16, 2: torch.float32, 3: torch.uint8}
CPU = torch.device("cpu")


def at(address, dtype, shape, strides=None):
    """A tensor of the memory at an address."""
    if strides is None:
        strides = [1] * len(shape)
        for axis in reversed(range(len(shape) - 1)):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    memory = (ctypes.c_uint8 * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class Emulator:
    """Stands in for `Library.launch`; keeps what it was asked."""

    def __init__(self):
        self.launched = []

    def __call__(self, symbol, arguments, like):
        self.launched.append((symbol, arguments))
        raw = [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        name, _, element = symbol.removeprefix("wan_").rpartition("_")
        if name in ("conv3d", "tap_gemm"):
            getattr(self, name)({"fp16": torch.float16, "bf16": torch.bfloat16}[element], *raw)
        else:
            getattr(self, symbol.removeprefix("wan_"))(*raw)

    def conv3d(self, dtype, p, x, w, bias, residual, y, tile):
        assert tile in heuristics.TILE_COST
        x = at(
            x,
            dtype,
            (p.batch, p.frames, p.rows, p.columns, p.c_in),
            (p.stride_batch, p.stride_frame, p.stride_row, p.c_in, 1),
        )
        w = at(w, dtype, (p.c_out, p.taps_t, p.taps_h, p.taps_w, p.c_in)).float()
        padded = F.pad(x.float(), (0, 0, p.pad_left, p.pad_right, p.pad_top, p.pad_bottom))
        out = F.conv3d(padded.permute(0, 4, 1, 2, 3), w.permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)
        self.epilogue(dtype, out, bias, residual, y, out.stride() if out.is_contiguous() else None)

    def tap_gemm(self, dtype, p, a, b, bias, residual, d, tile):
        assert tile in heuristics.TILE_COST
        for field, kind in p._fields_:
            if kind is ctypes.c_int64:
                assert getattr(p, field) % 8 == 0, field
        a = at(a, dtype, (p.batch, p.m, p.taps, p.channels), (p.a_stride_batch, p.a_stride_m, p.a_stride_tap, 1))
        b = at(b, dtype, (p.batch, p.n, p.taps, p.channels), (p.b_stride_batch, p.b_stride_n, p.b_stride_tap, 1))
        out = torch.einsum("lmtc,lntc->lmn", a.float(), b.float())
        self.epilogue(dtype, out, bias, residual, d, (p.d_stride_batch, p.d_stride_m, 1))

    def epilogue(self, dtype, out, bias, residual, address, strides):
        if bias is not None:
            out = out + at(bias, torch.float32, out.shape[-1:])
        if residual is not None:
            out = out + at(residual, dtype, out.shape, strides).float()
        at(address, dtype, out.shape, strides).copy_(out)

    def norm_silu_pad(self, p, x, above, below, history, gamma, y, following, dtype):
        dtype = ELEMENTS[dtype]
        row = p.columns * p.channels
        shape = (p.frames, p.rows, p.columns, p.channels)
        source = at(x, dtype, shape, (p.x_stride_frame, row, p.channels, 1)).float()
        if p.halo:
            edges = [at(edge, dtype, (p.frames, 1, *shape[2:])).float() for edge in (above, below)]
            source = torch.cat([edges[0], source, edges[1]], 1)
        if gamma is not None:
            length = source.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            source = source / length * at(gamma, torch.float32, (p.channels,))
            source = F.silu(source) if p.silu else source
        out = at(y, dtype, (p.history_frames + p.frames, *source.shape[1:]))
        if p.history_frames:
            before = out[: p.history_frames]
            before.copy_(torch.zeros_like(before) if history is None else at(history, dtype, before.shape))
        out[p.history_frames :] = source
        if following is not None:
            kept = at(following, dtype, (2, *source.shape[1:]))
            kept[-min(2, p.frames) :] = out[-min(2, p.frames) :]

    def upsample_combine(self, p, phases, bias, shortcut, y, dtype):
        dtype = ELEMENTS[dtype]
        phases = at(phases, dtype, (2, 2, p.frames, p.rows, p.columns, p.channels)).float()
        bias = at(bias, torch.float32, (p.channels,))
        last = (p.first_frame + p.frames - 1) // p.time_factor
        shortcut = at(shortcut, dtype, (last + 1, p.rows, p.columns, p.shortcut_channels)).float()
        out = at(y, dtype, (p.frames, 2 * p.rows, 2 * p.columns, p.channels))
        repeats = p.channels * 4 * p.time_factor // p.shortcut_channels
        for frame in range(p.frames):
            source, phase = divmod(p.first_frame + frame, p.time_factor)
            for row in range(2):
                for col in range(2):
                    position = torch.arange(p.channels) * 4 * p.time_factor + 4 * phase + 2 * row + col
                    extra = shortcut[source, :, :, position // repeats]
                    out[frame, row::2, col::2] = phases[row, col, frame] + bias + extra

    def output_head(self, p, part, bias, video, nonfinite, dtype, out_dtype):
        rows = p.rows + 2 * p.halo
        part = at(part, ELEMENTS[dtype], (p.frames, rows, p.columns, 112)).float()
        edge = 0 if p.halo else 1
        part = F.pad(part, (0, 0, 1, 1, edge, edge))
        values = at(bias, torch.float32, (12,)).clone()
        for tap in range(9):
            i, j = divmod(tap, 3)
            values = values + part[:, i : i + p.rows, j : j + p.columns, 12 * tap : 12 * tap + 12]
        if not values.isfinite().all():
            at(nonfinite, torch.int32, (1,)).fill_(1)
        strides = (p.stride_channel, p.stride_frame, p.stride_row, 1)
        out = at(video, ELEMENTS[out_dtype], (3, p.frames, 2 * p.rows, 2 * p.columns), strides)
        for channel in range(3):
            for q in range(2):
                for r in range(2):
                    value = values[..., 4 * channel + 2 * r + q].clamp(-1, 1)
                    if out.dtype == torch.uint8:
                        value = ((value / 2 + 0.5) * 255).nan_to_num(0)
                    out[channel, :, q::2, r::2] = value

    def strided_copy(self, source, target, source_stride, target_stride, nbytes, count):
        for piece in range(count):
            ctypes.memmove(target + piece * target_stride, source + piece * source_stride, nbytes)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills fresh tensors with NaN, so that an output element that nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


class EmulatedBackend(CudaBackend):
    """The CUDA backend without a driver to ask for memory."""

    def with_dtype(self, dtype):
        return EmulatedBackend(self.device, dtype, self.kernels)

    def free_bytes(self):
        return None

    def reserve(self, nbytes):
        pass


@pytest.fixture
def emulator():
    return Emulator()


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def backend(request, emulator):
    return EmulatedBackend(CPU, request.param, Kernels(emulator, 132))


CASES = [
    *selftest.CASES,
    Case("causal_conv3d", batch=2, frames=1, rows=1, cols=1, c_in=8, c_out=16),
    Case("causal_conv3d", batch=2, frames=1, rows=2, cols=3, c_in=24, c_out=8, history=True, halo=True),
    Case("causal_conv3d", batch=2, frames=4, rows=4, cols=5, c_in=16, c_out=16, history=True),
    Case("winograd_conv3d", batch=2, frames=2, rows=6, cols=9, c_in=16, c_out=24, halo=True),
    Case("pointwise_conv", batch=2, frames=2, rows=1, cols=3, c_in=48, c_out=48),
    Case("attention", batch=2, frames=9, rows=3, cols=3, c_in=16),
    Case("time_double", batch=2, frames=1, rows=1, cols=2, c_in=16),
    Case("time_double", batch=2, frames=4, rows=3, cols=4, c_in=24, history=True),
    Case("upsample_conv2x", batch=2, frames=5, rows=1, cols=1, c_in=16, c_out=16),
    Case("upsample_conv2x", batch=2, frames=4, rows=3, cols=2, c_in=16, c_out=16, history=True, halo=True),
    Case("upsample_conv2x", batch=1, frames=2, rows=4, cols=3, c_in=32, c_out=16, history=True),
    Case("upsample_conv2x", batch=2, frames=1, rows=2, cols=5, c_in=64, c_out=16, history=True, halo=True),
    Case("output_head", batch=2, frames=3, rows=1, cols=1, c_in=16),
    Case("output_head", batch=2, frames=2, rows=3, cols=5, c_in=16, history=True, halo=True),
    Case("row_movement", batch=1, frames=2, rows=2, cols=3, c_in=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_host_side_computes_the_torch_op(backend, case):
    assert selftest.compare(backend, case) <= selftest.tolerance(case, backend.dtype)


@pytest.mark.parametrize(("frames", "rows", "cols", "batch"), [(1, 1, 1, 1), (4, 3, 2, 2)])
def test_a_whole_decode_follows_the_reference(backend, make_state_dict, latents, frames, rows, cols, batch):
    state_dict = make_state_dict(latent=8)
    inputs = latents(frames, rows, cols, batch, channels=8)
    exact = Decoder.from_state_dict(state_dict, device="cpu", dtype=torch.float64, backend="torch").decode(inputs)
    decoder = Decoder.from_state_dict(state_dict, device="cpu", dtype=backend.dtype, backend=backend, frames_per_pass=2)
    # Dozens of layers round one after the other.
    limit = {torch.float16: 1e-2, torch.bfloat16: 8e-2}[backend.dtype]
    assert selftest.relative_error(decoder.decode(inputs), exact) < limit
    other = Decoder.from_state_dict(state_dict, device="cpu", dtype=backend.dtype, backend=backend, frames_per_pass=3)
    assert torch.equal(other.decode(inputs), decoder.decode(inputs))


def test_widths_that_the_kernels_cannot_take_are_refused(backend, make_state_dict):
    with pytest.raises(BackendUnavailableError, match="multiples of 8"):
        Decoder.from_state_dict(make_state_dict(latent=4), device="cpu", dtype=backend.dtype, backend=backend)


@pytest.mark.parametrize("op", ["upsample_conv2x", "output_head"])
def test_slabs_do_not_change_the_result(backend, emulator, monkeypatch, op):
    case = Case(op, batch=2, frames=5, rows=3, cols=4, c_in=16, c_out=16, history=True, halo=True)
    case = replace(case, frames=4) if op == "upsample_conv2x" else case
    selftest.compare(backend, case)
    whole = len(emulator.launched)
    monkeypatch.setattr(heuristics, "SCRATCH_BYTES", 1)
    emulator.launched.clear()
    assert selftest.compare(backend, case) <= selftest.tolerance(case, backend.dtype)
    assert len(emulator.launched) > whole


def test_an_unwritten_output_is_seen(backend, emulator, monkeypatch):
    case = Case("upsample_conv2x", frames=3, c_in=16, c_out=16)
    monkeypatch.setattr(emulator, "upsample_combine", lambda *arguments: None)
    assert selftest.compare(backend, case) > selftest.tolerance(case, backend.dtype)


def test_tile_choice():
    # A wide tile where columns fill it, a narrow one for narrow outputs and for problems too small to fill the card.
    assert heuristics.tile_n(3_514_368, 256, 1, 132) == 256
    assert heuristics.tile_n(109_824, 1024, 1, 132) == 256
    assert heuristics.tile_n(3_514_368, 112, 1, 132) == 128
    assert heuristics.tile_n(3_432, 48, 1, 132) == 128
    assert heuristics.tile_n(256, 256, 1, 132) == 128


@pytest.mark.parametrize(("frames", "size", "expected"), [(16, 1, 16), (16, 200 << 20, 2), (5, 1 << 40, 1), (1, 1, 1)])
def test_slab_choice(frames, size, expected):
    assert heuristics.frames_per_slab(frames, size) == expected


def test_structures_match_the_sources():
    """Field order and types of the ctypes structures are those of the C structures."""
    texts = "\n".join(path.read_text() for path in sorted(library.SOURCES.glob("*.cu")))
    kinds = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}
    for structure in (
        library.Conv3dProblem,
        library.TapGemmProblem,
        library.PadProblem,
        library.UpsampleProblem,
        library.HeadProblem,
    ):
        body = re.search(rf"struct {structure.__name__} {{(.*?)\n}};", texts, re.DOTALL)[1]
        declared = []
        for kind, names in re.findall(r"(int\d+_t) ([^;]+);", body):
            declared += [(name.strip(), kinds[kind]) for name in names.split(",")]
        assert declared == list(structure._fields_)
