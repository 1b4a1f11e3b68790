# SPDX-License-Identifier: Apache-2.0
"""The real sources compile with the real nvcc, without spills or serialised wgmma, and load without a GPU.

The build is cached by hash, so that only a change of the sources costs minutes.
"""

import re
import shutil
import subprocess

import pytest
import torch

from wan22_vae_decode import jit
from wan22_vae_decode.backends.cuda import heuristics, library
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.errors import DecodeError
from wan22_vae_decode.jit.toolchain import find_toolchain


@pytest.fixture(scope="module", params=sorted(library.TENSOR_CORE))
def built(request):
    try:
        find_toolchain(request.param)
    except jit.BuildError as error:
        pytest.skip(str(error))
    recipe = library.recipe(request.param)
    return library.Library(jit.build(recipe, find_toolchain(request.param)), recipe.library)


@pytest.mark.timeout(900)
def test_no_kernel_spills_or_serialises(built):
    log = (built.folder / "build.log").read_text()
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    # Two types by two tiles of both tensor-core kernels, and every instance of the others.
    assert len(spills) > 8
    assert {figures for spill in spills for figures in spill} == {"0"}
    assert not re.search(r"C75\d\d|warning", log)


@pytest.mark.timeout(900)
def test_the_library_is_small_and_complete(built):
    assert (built.folder / "libwan22_vae_decode.so").stat().st_size < 8 << 20
    for symbol in library._signatures():
        assert getattr(built._handle, symbol)


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_every_element_type_keeps_its_own_kernels(built):
    """Templates of the same mangled name would be merged by the linker: one type's launchers would run the other's."""
    path = built.folder / "libwan22_vae_decode.so"
    symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    owned = {f"sm90_{element}" for element in library.ELEMENTS.values()}
    assert set(re.findall(r"\bwan::(sm90\w*)::", symbols)) == owned
    for tile in heuristics.TILE_COST:
        assert set(re.findall(rf"\bint wan::(\w+)::conv3d<{tile}>\(", symbols)) == owned


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("symbol", "problem", "message"),
    [
        ("wan_norm_silu_pad", library.PadProblem(channels=12), "12 channels"),
        ("wan_norm_silu_pad", library.PadProblem(channels=8), "empty input"),
        ("wan_winograd_input", library.WinogradInputProblem(channels=12), "12 channels are not a multiple of 8"),
        ("wan_winograd_input", library.WinogradInputProblem(channels=1032), "1032 channels"),
        ("wan_winograd_input", library.WinogradInputProblem(channels=8), "empty input"),
        ("wan_winograd_input", library.WinogradInputProblem(1, 9, 1, 8, 0, 4, 2, 2), "tile rows 2 + 2 of 3"),
        ("wan_winograd_input", library.WinogradInputProblem(1, 1, 1, 8, 1, 3, 0, 1), "halo rows are missing"),
        ("wan_winograd_input", library.WinogradInputProblem(1, 1, 1, 8, 0, 2, 0, 1), "3 or 4 columns, not 2"),
        ("wan_winograd_output", library.WinogradOutputProblem(), "empty output"),
        ("wan_winograd_output", library.WinogradOutputProblem(1, 1, 1, 8, 5, 0, 1), "3 or 4 columns, not 5"),
        ("wan_winograd_output", library.WinogradOutputProblem(1, 1, 1, 12, 4, 0, 1), "12 channels"),
        ("wan_winograd_output", library.WinogradOutputProblem(1, 4, 1, 8, 3, 0, 2), "tile rows 0 + 2 of 1"),
        ("wan_upsample_combine", library.UpsampleProblem(1, 1, 1, 12, 8, 1, 0), "multiples of 8"),
        ("wan_upsample_combine", library.UpsampleProblem(1, 1, 1, 8, 24, 1, 0), "24 shortcut channels do not divide"),
        ("wan_upsample_combine", library.UpsampleProblem(1, 2, 1, 8, 8, 1, 0, 3, 4, 1), "rows 3 + 2 of 4"),
        ("wan_upsample_differences", library.DifferencesProblem(), "empty input"),
        ("wan_upsample_differences", library.DifferencesProblem(1, 4, 1, 12, 0, 0, 4), "12 channels"),
        ("wan_upsample_differences", library.DifferencesProblem(1, 4, 1, 8, 0, 3, 2), "rows 3 + 2 of 4"),
        ("wan_upsample_differences", library.DifferencesProblem(1, 4, 1, 8, 1, 0, 4), "halo rows are missing"),
        ("wan_output_head", library.HeadProblem(), "empty input"),
        ("wan_conv3d_fp16", library.Conv3dProblem(c_in=12, c_out=8), "12 -> 8 are not multiples of 8"),
        ("wan_conv3d_bf16", library.Conv3dProblem(c_in=8, c_out=8, stride_row=4), "16 bytes"),
        (
            "wan_conv3d_bf16",
            library.Conv3dProblem(c_in=8, c_out=8, taps_t=3, frames=2, batch=1),
            "smaller than the taps",
        ),
        ("wan_tap_gemm_fp16", library.TapGemmProblem(), "empty problem"),
        ("wan_tap_gemm_bf16", library.TapGemmProblem(m=1, n=12, channels=8, taps=1, batch=1), "8 -> 12 are not"),
        (
            "wan_tap_gemm_bf16",
            library.TapGemmProblem(m=1, n=8, channels=8, taps=1, batch=1, a_stride_m=12),
            "stride 12 is not a multiple",
        ),
    ],
)
def test_launchers_refuse_what_they_cannot_do(built, symbol, problem, message):
    """The checks come before the first CUDA call, so they answer without a GPU."""
    arguments = [None] * (len(library._signatures()[symbol]) - 1)
    arguments = [0 if kind is not library.c_void_p else None for kind in library._signatures()[symbol][1:]]
    assert getattr(built._handle, symbol)(library.ctypes.byref(problem), *arguments, 0, None) == 1
    assert message in built._handle.wan_last_error().decode()


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the card would take the launch")
def test_a_launch_without_a_gpu_is_an_error(built, monkeypatch):
    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    x = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    like = torch.empty_like(x)

    def launch(symbol, arguments, like):
        status = getattr(built._handle, symbol)(*map(library._as_c, arguments), 0, None)
        assert status == 1
        raise DecodeError(built._handle.wan_last_error().decode())

    with pytest.raises(DecodeError, match="cannot use CUDA device 0"):
        Kernels(launch, 132).pad(x, None, silu=False, out=like)
