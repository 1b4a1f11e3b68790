# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend on a CPU: launchers emulated from their raw arguments compute what the torch ops do.

The emulated launchers see only what the real ones see (addresses, strides, extents), so a wrong stride, offset or
extent shows up as a wrong result here, without a GPU. The kernels that are plain CUDA run as they are written, thread
by thread, compiled for the CPU (`cuda_on_cpu.h`); where that is not possible, and for the tensor-core kernels, torch
stands in for them.
"""

import copy
import ctypes
import pickle
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from wan22_vae_decode import layers, weights, winograd
from wan22_vae_decode.backends.base import Halo
from wan22_vae_decode.backends.cuda import heuristics, library, selftest, winograd_matrices
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.backends.cuda.selftest import Case
from wan22_vae_decode.backends.cuda.targets import HOPPER
from wan22_vae_decode.decoder import Decoder
from wan22_vae_decode.errors import BackendUnavailableError
from wan22_vae_decode.jit import toolchain

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
        assert tile in HOPPER.tile_cost
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

    def tap_gemm(self, dtype, p, a, b, bias, residual, d, d_dtype, tile):
        assert tile in HOPPER.tile_cost
        for field, kind in p._fields_:
            if kind is ctypes.c_int64:
                assert getattr(p, field) % 8 == 0, field
        a = at(a, dtype, (p.batch, p.m, p.taps, p.channels), (p.a_stride_batch, p.a_stride_m, p.a_stride_tap, 1))
        b = at(b, dtype, (p.batch, p.n, p.taps, p.channels), (p.b_stride_batch, p.b_stride_n, p.b_stride_tap, 1))
        out = torch.einsum("lmtc,lntc->lmn", a.float(), b.float())
        d_dtype = ELEMENTS[d_dtype]
        assert d_dtype == dtype or (d_dtype == torch.float32 and bias is residual is None)
        self.epilogue(d_dtype, out, bias, residual, d, (p.d_stride_batch, p.d_stride_m, 1))

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

    def winograd_input(self, p, x, above, below, history, gamma, v, next_history, dtype):
        dtype = ELEMENTS[dtype]
        rows = p.rows + 2 * p.halo
        padded = torch.empty(p.frames + 2, rows, p.columns, p.channels, dtype=dtype)
        problem = library.PadProblem(
            p.rows * p.columns * p.channels, 2, p.frames, p.rows, p.columns, p.channels, p.halo, 1
        )
        number = {element: number for number, element in ELEMENTS.items()}[dtype]
        self.norm_silu_pad(problem, x, above, below, history, gamma, padded.data_ptr(), None, number)
        # Of the next history, each launch writes the rows of its tiles, and the halo rows beside them.
        first, end = 4 * p.first_tile_row, 4 * (p.first_tile_row + p.tile_rows)
        kept = slice(first + p.halo if first else 0, rows if end >= p.rows else end + p.halo)
        at(next_history, dtype, (2, *padded.shape[1:]))[:, kept] = padded[-2:, kept]
        edge = 0 if p.halo else 1
        width = p.tile_columns
        down, across = -(-p.rows // 4), -(-p.columns // width)
        padded = F.pad(padded, (0, 0, 1, 1 + -p.columns % width, edge, edge + -p.rows % 4)).float()
        tiles = padded.unfold(1, 6, 4).unfold(2, width + 2, width)[:, p.first_tile_row :][:, : p.tile_rows]
        b_down, b_across = (matrices.input.float() for matrices in winograd.tile_transforms(width))
        assert tiles.shape[1:3] == (p.tile_rows, across)
        assert p.first_tile_row + p.tile_rows <= down
        out = at(v, dtype, (6, width + 2, p.frames + 2, p.tile_rows, across, p.channels))
        out.copy_(torch.einsum("im,jn,tyxcmn->ijtyxc", b_down, b_across, tiles))

    def winograd_output(self, p, m, bias, residual, y, m_dtype, dtype):
        m_dtype, dtype = ELEMENTS[m_dtype], ELEMENTS[dtype]
        assert m_dtype in (dtype, torch.float32)
        across = -(-p.columns // p.tile_columns)
        products = at(m, m_dtype, (6, p.tile_columns + 2, p.frames, p.tile_rows, across, p.channels)).float()
        a_down, a_across = (matrices.output.float() for matrices in winograd.tile_transforms(p.tile_columns))
        whole = torch.einsum("pi,qj,ijtyxo->typxqo", a_down, a_across, products).flatten(3, 4).flatten(1, 2)
        rows = slice(4 * p.first_tile_row, min(p.rows, 4 * (p.first_tile_row + p.tile_rows)))
        shape = (p.frames, p.rows, p.columns, p.channels)
        out = at(y, dtype, shape)[:, rows]
        whole = whole[:, : out.shape[1], : p.columns] + at(bias, torch.float32, (p.channels,))
        if residual is not None:
            whole = whole + at(residual, dtype, shape)[:, rows].float()
        out.copy_(whole)

    def upsample_input(self, p, x, above, below, v, dtype):
        dtype = ELEMENTS[dtype]
        shape = (p.frames, p.rows, p.columns, p.channels)
        edge = (p.frames, 2, *shape[2:])
        rims = [at(rim, dtype, edge) if p.halo else torch.zeros(edge, dtype=dtype) for rim in (above, below)]
        source = torch.cat([rims[0], at(x, dtype, shape), rims[1]], 1).float()
        tiles = winograd.upsample_tiles(p.rows, p.first_row)
        assert tiles.start <= p.first_tile_row
        assert p.first_tile_row + p.tile_rows <= tiles.stop
        # Two rows and five more: as many as any tile reaches out of the band.
        source = F.pad(source, (0, 0, 1, 5, 5, 5))[:, 7 + 3 * p.first_tile_row - 1 - p.first_row :]
        windows = source.unfold(1, 4, 3)[:, : p.tile_rows].unfold(2, 4, 3)[:, :, : p.columns // 3 + 1]
        b = winograd.upsample_transforms().input.float()
        out = at(v, dtype, (4, 4, p.frames, p.tile_rows, p.columns // 3 + 1, p.channels))
        out.copy_(torch.einsum("im,jn,tyxcmn->ijtyxc", b, b, windows))

    def upsample_output(self, p, m, bias, shortcut, y, dtype):
        dtype = ELEMENTS[dtype]
        across = p.columns // 3 + 1
        products = at(m, dtype, (4, 4, p.frames, p.tile_rows, across, 2, 2, p.channels)).float()
        a = winograd.upsample_transforms().output.float()
        values = torch.einsum("pi,qj,ijtyxrco->typxqrco", a, a, products).flatten(3, 4).flatten(1, 2)
        enlarged = self.enlarged_shortcut(p, dtype, shortcut) + at(bias, torch.float32, (p.channels,))
        out = at(y, dtype, (p.frames, 2 * p.rows, 2 * p.columns, p.channels))
        for row in range(2):
            first = 3 * p.first_tile_row - row - p.first_row
            band = slice(max(0, first), max(0, min(p.rows, first + 3 * p.tile_rows)))
            for col in range(2):
                phase = values[:, band.start - first : band.stop - first, col : col + p.columns, row, col]
                target = out[:, row::2, col::2][:, band]
                target.copy_(phase + enlarged[:, row::2, col::2][:, band])

    def upsample_combine(self, p, phases, bias, shortcut, y, dtype):
        dtype = ELEMENTS[dtype]
        phases = at(phases, dtype, (2, 2, p.frames, p.rows, p.columns, p.channels)).float()
        enlarged = self.enlarged_shortcut(p, dtype, shortcut) + at(bias, torch.float32, (p.channels,))
        out = at(y, dtype, (p.frames, 2 * p.rows, 2 * p.columns, p.channels))
        for row in range(2):
            for col in range(2):
                out[:, row::2, col::2] = phases[row, col] + enlarged[:, row::2, col::2]

    def enlarged_shortcut(self, p, dtype, shortcut):
        last = (p.first_frame + p.frames - 1) // p.time_factor
        shortcut = at(shortcut, dtype, (last + 1, p.rows, p.columns, p.shortcut_channels)).float()
        out = torch.empty(p.frames, 2 * p.rows, 2 * p.columns, p.channels)
        repeats = p.channels * 4 * p.time_factor // p.shortcut_channels
        for frame in range(p.frames):
            source, phase = divmod(p.first_frame + frame, p.time_factor)
            for row in range(2):
                for col in range(2):
                    position = torch.arange(p.channels) * 4 * p.time_factor + 4 * phase + 2 * row + col
                    out[frame, row::2, col::2] = shortcut[source, :, :, position // repeats]
        return out

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


# What is not C++ for a CPU, and what stands for it in `cuda_on_cpu.h`.
REWRITES = (
    (r"([\w:]+(?:<[\w:, ]+>)?)<<<(.*?), stream>>>\(", r"on_cpu::launch(\1, \2, "),
    (r"extern __shared__ uint4 (\w+)\[\];", r"uint4* \1 = on_cpu::shared_memory();"),
    (r"(?<!extern )__shared__ ", "static "),  # blocks run one after the other
    (r'#include "shared_memory\.cuh"', ""),
    (r'asm\("ex2\.[^;]*;"[^;]*;', "y = exp2f(x);"),
    (r'asm\("rcp\.[^;]*;"[^;]*;', "y = 1.0f / x;"),
    (r'asm\("rsqrt\.[^;]*;" : "=f"\(y\) : "f"\((.*)\)\);', r"y = 1.0f / std::sqrt(\1);"),
)

ON_CPU = (
    "norm_silu_pad",
    "winograd_input",
    "winograd_output",
    "upsample_combine",
    "upsample_input",
    "upsample_output",
    "strided_copy",
)


@pytest.fixture(scope="module")
def kernels_on_cpu(tmp_path_factory):
    """The plain CUDA kernels compiled for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    roots = [path.resolve().parents[1] for path in toolchain._nvcc_candidates()]
    include = next((root / "include" for root in roots if (root / "include" / "cuda_fp16.h").exists()), None)
    if include is None:
        pytest.skip("no CUDA headers beside any nvcc")
    folder = tmp_path_factory.mktemp("on_cpu")
    for path in library.SOURCES.glob("*.cu*"):
        text = path.read_text()
        for pattern, replacement in REWRITES:
            text = re.sub(pattern, replacement, text)
        (folder / path.name).write_text(text)
    (folder / winograd_matrices.NAME).write_text(winograd_matrices.header())
    unit = folder / "kernels.cpp"
    unit.write_text("\n".join(['#include "cuda_on_cpu.h"', *(f'#include "{name}.cu"' for name in ("launch", *ON_CPU))]))
    built = folder / "kernels.so"
    includes = [f"-I{path}" for path in (folder, Path(__file__).parent, include)]
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *includes, "-o", str(built), str(unit)]
    subprocess.run(command, check=True)
    handle = ctypes.CDLL(str(built))
    handle.wan_last_error.restype = ctypes.c_char_p
    for name in ON_CPU:
        getattr(handle, f"wan_{name}").argtypes = [*library._signatures()[f"wan_{name}"], ctypes.c_int, ctypes.c_void_p]
    return handle


class KernelsOnCpu(Emulator):
    """Runs the kernels' own code where it is plain CUDA."""

    def __init__(self, handle):
        super().__init__()
        self._handle = handle

    def __call__(self, symbol, arguments, like):
        if symbol.removeprefix("wan_") not in ON_CPU:
            super().__call__(symbol, arguments, like)
            return
        self.launched.append((symbol, arguments))
        status = getattr(self._handle, symbol)(*map(library._as_c, arguments), 0, None)
        assert status == 0, self._handle.wan_last_error().decode()


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


def test_copies_share_the_kernels_and_pickles_load_them_again(backend, monkeypatch):
    assert copy.deepcopy(backend) is backend
    made = []
    monkeypatch.setattr("wan22_vae_decode.backends.cuda.why_not", lambda *placement: None)
    monkeypatch.setattr("wan22_vae_decode.backends.cuda.create", lambda *placement: made.append(placement) or backend)
    assert pickle.loads(pickle.dumps(backend)) is backend
    assert made == [(CPU, backend.dtype)]


@pytest.fixture
def emulator():
    return Emulator()


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def backend(request, emulator):
    return EmulatedBackend(CPU, request.param, Kernels(emulator, HOPPER, 132))


CASES = [
    *selftest.CASES,
    Case("causal_conv3d", batch=2, frames=1, rows=1, cols=1, c_in=8, c_out=16),
    Case("causal_conv3d", batch=2, frames=1, rows=2, cols=3, c_in=24, c_out=8, history=True, halo=True),
    Case("causal_conv3d", batch=2, frames=4, rows=4, cols=5, c_in=16, c_out=16, history=True),
    Case("winograd_conv3d", batch=2, frames=2, rows=6, cols=9, c_in=16, c_out=24, halo=True),
    Case("winograd_conv3d", batch=2, frames=1, rows=1, cols=1, c_in=8, c_out=8),
    Case("winograd_conv3d", frames=1, rows=4, cols=3, c_in=24, c_out=16, history=True, halo=True),
    Case("winograd_conv3d", batch=2, frames=3, rows=9, cols=33, c_in=8, c_out=40, history=True),
    Case("winograd_conv3d", frames=2, rows=12, cols=8, c_in=8, c_out=8),
    Case("winograd_conv3d", frames=1, rows=29, cols=19, c_in=264, c_out=8, history=True, halo=True),
    Case("winograd_conv3d", frames=1, rows=17, cols=6, c_in=520, c_out=8, halo=True),
    Case("pointwise_conv", batch=2, frames=2, rows=1, cols=3, c_in=48, c_out=48),
    Case("attention", batch=2, frames=9, rows=3, cols=3, c_in=16),
    Case("time_double", batch=2, frames=1, rows=1, cols=2, c_in=16),
    Case("time_double", batch=2, frames=4, rows=3, cols=4, c_in=24, history=True),
    Case("upsample_conv2x", batch=2, frames=5, rows=1, cols=1, c_in=16, c_out=16),
    Case("upsample_conv2x", batch=2, frames=4, rows=3, cols=2, c_in=16, c_out=16, history=True, halo=True),
    Case("upsample_conv2x", batch=1, frames=2, rows=4, cols=3, c_in=32, c_out=16, history=True),
    Case("upsample_conv2x", batch=2, frames=1, rows=2, cols=5, c_in=64, c_out=16, history=True, halo=True),
    Case("upsample_winograd", batch=2, frames=5, rows=1, cols=1, c_in=16, c_out=16),
    Case("upsample_winograd", batch=2, frames=4, rows=3, cols=2, c_in=16, c_out=16, history=True, halo=True),
    Case("upsample_winograd", batch=1, frames=2, rows=4, cols=3, c_in=32, c_out=16, history=True),
    Case("upsample_winograd", batch=2, frames=1, rows=2, cols=5, c_in=64, c_out=16, history=True, halo=True),
    Case("upsample_winograd", frames=1, rows=7, cols=26, c_in=24, c_out=24, halo=True),
    Case("upsample_winograd", frames=1, rows=4, cols=6, c_in=272, c_out=136, history=True, halo=True),
    Case("upsample_winograd", frames=2, rows=1, cols=4, c_in=8, c_out=8, history=True, halo=True),
    Case("output_head", batch=2, frames=3, rows=1, cols=1, c_in=16),
    Case("output_head", batch=2, frames=2, rows=3, cols=5, c_in=16, history=True, halo=True),
    Case("row_movement", batch=1, frames=2, rows=2, cols=3, c_in=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_host_side_computes_the_torch_op(backend, case):
    assert selftest.compare(backend, case) <= selftest.tolerance(case, backend.dtype)


@pytest.mark.parametrize("case", [case for case in CASES if case.op not in ("attention", "row_movement")], ids=str)
def test_kernels_compute_the_torch_op(kernels_on_cpu, backend, case):
    ours = EmulatedBackend(CPU, backend.dtype, Kernels(KernelsOnCpu(kernels_on_cpu), HOPPER, 132))
    assert selftest.compare(ours, case, seed=3) <= selftest.tolerance(case, backend.dtype)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_bands_do_not_change_a_winograd_conv(request, backend, emulator, monkeypatch, on_cpu):
    if on_cpu:
        emulator = KernelsOnCpu(request.getfixturevalue("kernels_on_cpu"))
        backend = EmulatedBackend(CPU, backend.dtype, Kernels(emulator, HOPPER, 132))
    case = Case("winograd_conv3d", batch=2, frames=2, rows=18, cols=6, c_in=16, c_out=24, history=True, halo=True)
    run = selftest._OPS[case.op](case, selftest._Random(backend.dtype, 1))
    whole = run(backend, torch.clone)
    count = len(emulator.launched)
    monkeypatch.setattr(heuristics, "WINOGRAD_BYTES", 1)
    emulator.launched.clear()
    bands = run(backend, torch.clone)
    assert len(emulator.launched) > count
    for one, other in zip(bands, whole, strict=True):
        assert torch.equal(one, other)
    assert selftest.compare(backend, case) <= selftest.tolerance(case, backend.dtype)


def winograd_layer(backend, channels=8):
    random = selftest._Random(backend.dtype, 5)
    weight = winograd.transform_weight(random.weight(channels, 3, 3, 3, channels), 3).to(backend.dtype)
    return random(1, 2, 4, 4, channels), layers.WinogradConv(weight, random.fp32(channels), layers.WinogradForm(3))


def test_a_winograd_input_that_was_written_since_is_refused(backend):
    x, conv = winograd_layer(backend)
    source, _ = backend.causal_pad(x, None, None, conv)
    x.mul_(2)
    with pytest.raises(ValueError, match="written before"):
        backend.winograd_conv3d(source, conv)
    source, _ = backend.causal_pad(x, None, None, conv)
    other, _ = backend.causal_pad(torch.ones_like(x), None, None, conv)
    # Torch does not see what kernels write, unless it is told.
    backend.winograd_conv3d(other, conv, out=x)
    with pytest.raises(ValueError, match="written before"):
        backend.winograd_conv3d(source, conv)


def test_a_winograd_conv_cannot_write_into_its_input(backend):
    x, conv = winograd_layer(backend)
    source, _ = backend.causal_pad(x, None, None, conv)
    with pytest.raises(ValueError, match="into its own input"):
        backend.winograd_conv3d(source, conv, residual=x, out=x)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_history_carries_a_winograd_conv_across_passes(backend, split):
    x, conv = winograd_layer(backend)
    x = torch.cat([x, x.flip(1) * 0.5], dim=1)
    norm = torch.linspace(0.5, 2, x.shape[-1])
    source, kept = backend.norm_silu_pad(x, norm, None, None, conv)
    whole = backend.winograd_conv3d(source, conv)
    history, parts = None, []
    for part in x.split(split, dim=1):
        source, history = backend.norm_silu_pad(part.contiguous(), norm, history, None, conv)
        parts.append(backend.winograd_conv3d(source, conv))
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(history, kept)


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


def upsampling_layer(backend, channels, *shape):
    """A layer of integer weights, and tensors for it in steps of 1 / 512: components and their products round, but
    torch sums the products exactly, to the same bits in any order.
    """
    random = selftest._Random(torch.float32, 6)
    weight = weights.upsample_components(random(channels, channels, 3, 3).round().double())
    up = layers.UpsampleConv(None, weight.to(backend.dtype), random.fp32(channels))
    return up, *((512 * random(*size, channels)).round().div(512).to(backend.dtype) for size in shape)


@pytest.mark.parametrize("first_row", range(3))
def test_bands_of_tiles_do_not_change_an_upsampling_conv(kernels_on_cpu, backend, monkeypatch, first_row):
    """One row of tiles of one frame at a time, wherever the band of the image begins."""
    launcher = KernelsOnCpu(kernels_on_cpu)
    ours = EmulatedBackend(CPU, backend.dtype, Kernels(launcher, HOPPER, 132))
    edge = (2, 4, 2, 5)
    up, x, above, below, shortcut = upsampling_layer(backend, 16, (2, 4, 7, 5), edge, edge, (2, 2, 7, 5))
    halo = Halo(above, below, first_row)
    whole = ours.upsample_conv2x(x, up, shortcut, 0, halo)
    assert len(launcher.launched) == 2 * 3
    monkeypatch.setattr(heuristics, "SCRATCH_BYTES", 1)
    launcher.launched.clear()
    assert torch.equal(ours.upsample_conv2x(x, up, shortcut, 0, halo), whole)
    assert len(launcher.launched) == 2 * 4 * 3 * len(winograd.upsample_tiles(7, first_row))


@pytest.mark.parametrize("first", range(10))
def test_a_band_gets_the_bits_of_the_whole_image(kernels_on_cpu, backend, first):
    """From two rows of each neighbour, whatever lies behind them."""
    ours = EmulatedBackend(CPU, backend.dtype, Kernels(KernelsOnCpu(kernels_on_cpu), HOPPER, 132))
    up, image, shortcut = upsampling_layer(backend, 8, (1, 2, 11, 4), (1, 2, 11, 4))
    whole = ours.upsample_conv2x(image, up, shortcut, 0, None)
    padded = F.pad(image, (0, 0, 0, 0, 2, 2))
    for last in range(first + 1, 12):
        band = slice(first, last)
        above, below = padded[:, :, first : first + 2], padded[:, :, last + 2 : last + 4]
        halo = Halo(above.contiguous(), below.contiguous(), first)
        part = ours.upsample_conv2x(image[:, :, band].contiguous(), up, shortcut[:, :, band].contiguous(), 0, halo)
        assert torch.equal(part, whole[:, :, 2 * first : 2 * last])


@pytest.mark.parametrize("op", ["upsample_conv2x", "upsample_winograd", "output_head"])
def test_slabs_do_not_change_the_result(backend, emulator, monkeypatch, op):
    case = Case(op, batch=2, frames=5, rows=3, cols=4, c_in=16, c_out=16, history=True, halo=True)
    case = case if op == "output_head" else replace(case, frames=4)
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


@pytest.mark.parametrize(("frames", "size", "expected"), [(16, 1, 16), (16, 200 << 20, 2), (5, 1 << 40, 1), (1, 1, 1)])
def test_slab_choice(frames, size, expected):
    assert heuristics.frames_per_slab(frames, size) == expected


@pytest.mark.parametrize(
    ("rows", "frames", "size", "expected"),
    [
        (88, 8, 1, 88),
        (88, 8, 126 << 20, 13),
        (88, 61, 126 << 20, 13),
        (88, 4, 63 << 20, 13),
        (88, 1, 63 << 20, 3),
        (11, 8, 1000 << 20, 1),
        (3, 1, 1 << 40, 1),
    ],
)
def test_band_choice(rows, frames, size, expected):
    assert heuristics.tile_rows_per_band(rows, frames, size) == expected


def test_method_choice():
    for split_rows in (False, True):
        forms = [heuristics.winograd_form(level, 256, split_rows) for level in range(4)]
        assert forms == [None, layers.WinogradForm(3), layers.WinogradForm(4), layers.WinogradForm(4)]
    assert heuristics.winograd_form(2, 1032, False) is None
    methods = {torch.float16: ["phases", "winograd", "winograd"], torch.bfloat16: ["phases"] * 3}
    for dtype, expected in methods.items():
        assert [heuristics.upsample_method(dtype, level) for level in range(3)] == expected


def test_structures_match_the_sources():
    """Field order and types of the ctypes structures are those of the C structures."""
    texts = "\n".join(path.read_text() for path in sorted(library.SOURCES.glob("*.cu*")))
    kinds = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}
    for structure in (
        library.Conv3dProblem,
        library.TapGemmProblem,
        library.PadProblem,
        library.WinogradInputProblem,
        library.WinogradOutputProblem,
        library.UpsampleCombineProblem,
        library.UpsampleInputProblem,
        library.UpsampleOutputProblem,
        library.HeadProblem,
    ):
        body = re.search(rf"struct {structure.__name__} {{(.*?)\n}};", texts, re.DOTALL)[1]
        declared = []
        for kind, names in re.findall(r"(int\d+_t) ([^;]+);", body):
            declared += [(name.strip(), kinds[kind]) for name in names.split(",")]
        assert declared == list(structure._fields_)
