# SPDX-License-Identifier: Apache-2.0
"""Every architecture's row: what is compiled for it, which tiles it gets, and that its kernels are asked for the same.

Launches are recorded, not made, so this runs without a GPU, also at the size of the released decoder.
"""

import ctypes
import math

import pytest
import torch

from wan22_vae_decode import jit, layers, winograd
from wan22_vae_decode.backends.cuda import heuristics, library, selftest
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.backends.cuda.selftest import Case
from wan22_vae_decode.backends.cuda.targets import TARGETS
from wan22_vae_decode.jit import arch as arch_module
from wan22_vae_decode.jit.toolchain import Nvcc, Toolchain
from wan22_vae_decode.layers import WinogradForm

CPU, META = torch.device("cpu"), torch.device("meta")
TENSOR_CORE = ("wan_conv3d", "wan_tap_gemm")
# SMs of an H200, a B200 and a B300.
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 160}


class Shapes(selftest._Random):
    """Tensors without memory."""

    def fp32(self, *shape, scale=1.0):
        return torch.empty(shape, device=META)


def recording_backend(arch, dtype, device):
    """A backend whose launches only go to a list, and the list."""
    launched = []
    kernels = Kernels(lambda *launch: launched.append(launch[:2]), TARGETS[arch], MULTIPROCESSORS[arch])
    return CudaBackend(device, dtype, kernels), launched


def recorded(arch, dtype, case, device=CPU):
    """(symbol, arguments) of every launch that a self-test case makes on an architecture."""
    backend, launched = recording_backend(arch, dtype, device)
    random = (Shapes if device == META else selftest._Random)(dtype, 0)
    selftest._OPS[case.op](case, random)(backend, lambda tensor: tensor)
    return launched


def described(argument):
    """An argument without its address."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return bytes(argument) if isinstance(argument, ctypes.Structure) else argument


def test_every_architecture_of_the_build_has_a_row():
    assert set(TARGETS) == set(arch_module.MINIMUM_NVCC) == set(arch_module.ARCHS.values())


@pytest.mark.parametrize("arch", TARGETS)
def test_a_library_has_its_own_tensor_core_kernels_and_all_others(arch):
    generation = "sm90" if arch == "sm_90a" else "sm100"
    units = library.recipe(arch).units
    assert {unit.source for unit in units[:4]} == {f"{generation}_conv3d.cu", f"{generation}_tap_gemm.cu"}
    assert {unit.defines for unit in units[:4]} == {("WAN_FP16",), ("WAN_BF16",)}
    assert [unit.source for unit in units[4:]] == [f"{name}.cu" for name in library.COMMON]
    assert all((library.SOURCES / unit.source).exists() for unit in units)


@pytest.mark.parametrize("arch", TARGETS)
def test_the_override_decides_what_is_built(arch, monkeypatch, tmp_path):
    monkeypatch.setenv("WAN22_VAE_DECODE_ARCH", arch)
    recipe = library.recipe(jit.arch_of((9, 0)))
    tools = Toolchain(Nvcc(tmp_path / "nvcc", (13, 0), "Build"), tmp_path / "ninja", (), "4.2")
    number = arch.removeprefix("sm_")
    for unit in recipe.units:
        assert f"-gencode=arch=compute_{number},code={arch}" in recipe.compile_command(unit, tools)


@pytest.mark.parametrize("arch", TARGETS)
def test_tile_choice(arch):
    def choice(m, n):
        return heuristics.tile_n(TARGETS[arch], m, n, 1, MULTIPROCESSORS[arch])

    # A wide tile where columns fill it, a narrow one for narrow outputs and for problems too small to fill the card.
    assert choice(3_514_368, 256) == 256
    assert choice(109_824, 1024) == 256
    assert choice(3_514_368, 112) == 128
    assert choice(3_432, 48) == 128
    assert choice(256, 256) == 128


def test_costs_decide_between_tiles():
    """Five wide tiles on four pairs of SMs take two waves; ten narrow ones three, cheaper on Hopper only."""
    assert heuristics.tile_n(TARGETS["sm_90a"], 5 * 256, 256, 1, 8) == 128
    assert heuristics.tile_n(TARGETS["sm_100a"], 5 * 256, 256, 1, 8) == 256


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", selftest.CASES, ids=str)
def test_architectures_differ_in_tiles_only(case, dtype):
    """The same launches with the same problems on tensors of the same sizes: what an H200 checks holds for all."""
    expected = recorded("sm_90a", dtype, case)
    assert expected
    for arch in TARGETS:
        launched = recorded(arch, dtype, case)
        assert [symbol for symbol, _ in launched] == [symbol for symbol, _ in expected]
        for (symbol, arguments), (_, others) in zip(launched, expected, strict=True):
            if symbol.startswith(TENSOR_CORE):
                assert arguments[-1] in TARGETS[arch].tile_cost
                arguments, others = arguments[:-1], others[:-1]
            assert [described(argument) for argument in arguments] == [described(argument) for argument in others]


# The released decoder at 704x1248, a pass of four latent frames.
FULL_SIZE = [
    Case("causal_conv3d", frames=4, rows=44, cols=78, c_in=48, c_out=1024),
    Case("causal_conv3d", frames=4, rows=44, cols=78, c_in=1024, c_out=1024, history=True, halo=True),
    Case("causal_conv3d", frames=8, rows=88, cols=156, c_in=1024, c_out=1024, history=True),
    Case("causal_conv3d", frames=16, rows=176, cols=312, c_in=1024, c_out=512, history=True),
    Case("causal_conv3d", frames=16, rows=352, cols=624, c_in=256, c_out=256, history=True),
    Case("pointwise_conv", frames=16, rows=176, cols=312, c_in=1024, c_out=512),
    Case("pointwise_conv", frames=16, rows=352, cols=624, c_in=512, c_out=256),
    Case("attention", frames=4, rows=44, cols=78, c_in=1024),
    Case("time_double", frames=4, rows=44, cols=78, c_in=1024, history=True),
    Case("time_double", frames=8, rows=88, cols=156, c_in=1024, history=True),
    Case("upsample_conv2x", frames=8, rows=44, cols=78, c_in=1024, c_out=1024),
    Case("upsample_conv2x", frames=16, rows=88, cols=156, c_in=1024, c_out=1024, history=True, halo=True),
    Case("upsample_conv2x", frames=16, rows=176, cols=312, c_in=1024, c_out=512, history=True),
    Case("upsample_winograd", frames=16, rows=88, cols=156, c_in=1024, c_out=1024, history=True, halo=True),
    Case("upsample_winograd", frames=16, rows=176, cols=312, c_in=1024, c_out=512, history=True),
    Case("output_head", frames=16, rows=352, cols=624, c_in=256, history=True, halo=True),
]


def winograd_conv(arch, form, frames, rows, cols, c_in, c_out):
    """The launches of a Winograd conv at full size."""
    backend, launched = recording_backend(arch, torch.float16, META)
    random = Shapes(torch.float16, 0)
    weight = random(winograd.components(form.columns), c_out, 3, c_in)
    conv = layers.WinogradConv(weight, random.fp32(c_out), form)
    source, _ = backend.norm_silu_pad(random(1, frames, rows, cols, c_in), random.fp32(c_in), None, None, conv)
    backend.winograd_conv3d(source, conv)
    return launched


def assert_inside(tensor, extents, strides):
    """The last element that a descriptor reaches lies inside the tensor's memory, and TMA can express it."""
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(extents, strides, strict=True))
    assert last < tensor.untyped_storage().nbytes() // tensor.element_size()
    assert all(0 < size < 2**32 for size in extents)
    assert all(step % 8 == 0 and step * tensor.element_size() < 2**40 for step in strides[:-1])


def check_tensor_core_launches(arch, launched):
    launched = [entry for entry in launched if entry[0].startswith(TENSOR_CORE)]
    assert launched
    for symbol, (p, *operands, tile) in launched:
        if symbol.startswith("wan_conv3d"):
            x, w, _, residual, out = operands
            rows, cols = p.rows + p.pad_top + p.pad_bottom, p.columns + p.pad_left + p.pad_right
            extents = (p.batch, p.frames, p.rows, p.columns, p.c_in)
            assert_inside(x, extents, (p.stride_batch, p.stride_frame, p.stride_row, p.c_in, 1))
            assert w.shape == (p.c_out, p.taps_t, p.taps_h, p.taps_w, p.c_in)
            size = (p.batch, p.frames - p.taps_t + 1, rows - p.taps_h + 1, cols - p.taps_w + 1, p.c_out)
            assert out.numel() == math.prod(size)
            assert math.prod(size[:4]) < 2**31
            assert out.is_contiguous()
        else:
            a, b, _, residual, out, _ = operands
            taps = (p.taps, p.channels)
            assert_inside(a, (p.batch, p.m, *taps), (p.a_stride_batch, p.a_stride_m, p.a_stride_tap, 1))
            assert_inside(b, (p.batch, p.n, *taps), (p.b_stride_batch, p.b_stride_n, p.b_stride_tap, 1))
            assert_inside(out, (p.batch, p.m, p.n), (p.d_stride_batch, p.d_stride_m, 1))
        # The residual is read with the strides of the output.
        assert residual is None or (
            residual.numel() == out.numel() and residual.is_contiguous() and out.is_contiguous()
        )
        assert tile in TARGETS[arch].tile_cost


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("case", FULL_SIZE, ids=str)
def test_descriptors_stay_inside_their_tensors_at_full_size(arch, case):
    check_tensor_core_launches(arch, recorded(arch, torch.float16, case, META))


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(
    ("form", "size"),
    [
        (WinogradForm(3), (8, 88, 156, 1024, 1024)),
        (WinogradForm(3, float_products=True), (8, 88, 156, 1024, 1024)),
        (WinogradForm(4), (16, 176, 312, 1024, 512)),
        (WinogradForm(4), (16, 352, 624, 256, 256)),
    ],
)
def test_winograd_descriptors_stay_inside_their_tensors_at_full_size(arch, form, size):
    check_tensor_core_launches(arch, winograd_conv(arch, form, *size))
