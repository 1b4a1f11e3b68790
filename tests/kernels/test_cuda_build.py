# SPDX-License-Identifier: Apache-2.0
"""The real sources compile with the real nvcc for every architecture, to its own tensor-core instructions, without
spills or serialised wgmma, and load without a GPU.

The builds are cached by hash, so that only a change of the sources costs minutes.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from wan22_vae_decode import jit
from wan22_vae_decode.backends.cuda import library, selftest
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.backends.cuda.kernels import Kernels
from wan22_vae_decode.backends.cuda.targets import TARGETS
from wan22_vae_decode.errors import DecodeError
from wan22_vae_decode.jit import toolchain
from wan22_vae_decode.jit.toolchain import find_toolchain

# Machine instruction of the tensor cores: wgmma's on Hopper, tcgen05's on Blackwell.
PRODUCT = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA", "sm_103a": "UTCHMMA"}


@pytest.fixture(scope="module", params=TARGETS)
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def built(arch):
    try:
        tools = find_toolchain(arch)
    except jit.BuildError as error:
        pytest.skip(str(error))
    recipe = library.recipe(arch)
    return library.Library(jit.build(recipe, tools), recipe.library)


@pytest.fixture(scope="module")
def machine_code(built):
    """The library's disassembly."""
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders.append(toolchain.SYSTEM_NVCC.parent)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        folders += Path(root).glob("*/bin")
    search = os.pathsep.join([os.environ["PATH"], *map(str, folders)])
    for tool in ("cuobjdump", "nvdisasm"):
        if shutil.which(tool, path=search) is None:
            pytest.skip(f"{tool} is neither on PATH nor in the CUDA toolkit; pip install nvidia-cuda-{tool}")
    command = [shutil.which("cuobjdump", path=search), "--dump-sass", built.folder / "libwan22_vae_decode.so"]
    environment = {**os.environ, "PATH": search}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def tensor_core_kernels(machine_code):
    """The code of each CUTLASS kernel."""
    functions = [function.split("\n", 1) for function in machine_code.split("Function : ")[1:]]
    return [code for name, code in functions if "device_kernel" in name]


@pytest.mark.timeout(900)
def test_no_kernel_spills_or_serialises(built):
    log = (built.folder / "build.log").read_text()
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    # Two types by two tiles of both tensor-core kernels, and every instance of the others.
    assert len(spills) > 8
    assert {figures for _, *spill in spills for figures in spill} == {"0"}
    # The stock Blackwell conv kernel keeps the addresses of its two accumulators in 8 bytes of stack.
    assert {frame for frame, *_ in spills} <= {"0", "8"}
    assert not re.search(r"C75\d\d|warning", log)


@pytest.mark.timeout(900)
def test_tensor_core_kernels_use_the_instructions_of_their_architecture(arch, machine_code):
    assert set(re.findall(r"arch = (\w+)", machine_code)) == {arch}
    kernels = tensor_core_kernels(machine_code)
    # Two types by two tiles of both ops, at least.
    assert len(kernels) >= 8
    for code in kernels:
        assert set(re.findall(r"\b(HMMA|HGMMA|UTC\w*MMA)\b", code)) == {PRODUCT[arch]}
        assert "UTMALDG" in code
    convs = [code for code in kernels if re.search(r"UTMALDG\.5D\.IM2COL", code)]
    assert len(convs) >= 4


@pytest.mark.timeout(900)
def test_pairs_of_sms_multiply_together_on_blackwell(arch, machine_code):
    kernels = tensor_core_kernels(machine_code)
    pairs = [code for code in kernels if "UTCHMMA.2CTA" in code]
    # Both tiles of both ops and types, float products of the wide one, and one narrow tile each for few rows.
    assert (len(pairs), len(kernels) - len(pairs)) == ((0, len(kernels)) if arch == "sm_90a" else (10, 4))


@pytest.mark.timeout(900)
def test_the_library_is_small_and_complete(built):
    assert (built.folder / "libwan22_vae_decode.so").stat().st_size < 8 << 20
    for symbol in library._signatures():
        assert getattr(built._handle, symbol)


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_every_element_type_keeps_its_own_kernels(arch, built):
    """Templates of the same mangled name would be merged by the linker: one type's launchers would run the other's."""
    path = built.folder / "libwan22_vae_decode.so"
    symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    generation = TARGETS[arch].tensor_core[0].partition("_")[0]
    owned = {f"{generation}_{element}" for element in library.ELEMENTS.values()}
    assert set(re.findall(r"\bwan::(sm\d+\w*)::", symbols)) == owned
    for tile in TARGETS[arch].tile_cost:
        assert set(re.findall(rf"\bint wan::(\w+)::conv3d<(?:[\w:]+, )?{tile}>\(", symbols)) == owned


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("symbol", "problem", "message"),
    [
        ("wan_norm_silu_pad", library.PadProblem(channels=12), "12 channels"),
        ("wan_norm_silu_pad", library.PadProblem(channels=8), "empty input"),
        ("wan_winograd_input", library.WinogradInputProblem(channels=12), "12 channels are not a multiple of 8"),
        ("wan_winograd_input", library.WinogradInputProblem(channels=1032), "1032 channels"),
        ("wan_winograd_input", library.WinogradInputProblem(channels=8, tile_columns=4), "empty input"),
        ("wan_winograd_input", library.WinogradInputProblem(1, 9, 1, 8, 0, 4, 2, 2), "tile rows 2 + 2 of 3"),
        ("wan_winograd_input", library.WinogradInputProblem(1, 1, 1, 8, 1, 3, 0, 1), "halo rows are missing"),
        ("wan_winograd_input", library.WinogradInputProblem(1, 1, 1, 8, 0, 2, 0, 1), "3 or 4 columns, not 2"),
        ("wan_winograd_output", library.WinogradOutputProblem(), "empty output"),
        ("wan_winograd_output", library.WinogradOutputProblem(1, 1, 1, 8, 5, 0, 1), "3 or 4 columns, not 5"),
        ("wan_winograd_output", library.WinogradOutputProblem(1, 1, 1, 12, 4, 0, 1), "12 channels"),
        ("wan_winograd_output", library.WinogradOutputProblem(1, 4, 1, 8, 3, 0, 2), "tile rows 0 + 2 of 1"),
        ("wan_upsample_combine", library.UpsampleCombineProblem(), "empty input"),
        ("wan_upsample_combine", library.UpsampleCombineProblem(1, 1, 1, 12, 8, 1, 0), "multiples of 8"),
        ("wan_upsample_combine", library.UpsampleCombineProblem(1, 1, 1, 8, 24, 1, 0), "24 shortcut channels do not"),
        ("wan_upsample_input", library.UpsampleInputProblem(), "empty input"),
        ("wan_upsample_input", library.UpsampleInputProblem(1, 4, 1, 12, 0, 0, 0, 1), "12 channels"),
        ("wan_upsample_input", library.UpsampleInputProblem(1, 4, 1, 8, 0, 0, 1, 2), "tile rows 1 + 2 of 0 to 2"),
        ("wan_upsample_input", library.UpsampleInputProblem(1, 4, 1, 8, 1, 5, 0, 2), "tile rows 0 + 2 of 1 to 4"),
        ("wan_upsample_input", library.UpsampleInputProblem(1, 4, 1, 8, 1, 0, 0, 2), "halo rows are missing"),
        ("wan_upsample_output", library.UpsampleOutputProblem(), "empty output"),
        ("wan_upsample_output", library.UpsampleOutputProblem(1, 4, 1, 8, 12, 1, 0, 0, 0, 1), "multiples of 8"),
        ("wan_upsample_output", library.UpsampleOutputProblem(1, 4, 1, 8, 24, 1, 0, 0, 0, 1), "do not divide 32"),
        (
            "wan_upsample_output",
            library.UpsampleOutputProblem(1, 4, 1, 8, 8, 1, 0, 2, 1, 3),
            "tile rows 1 + 3 of 0 to 3",
        ),
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
        (
            "wan_tap_gemm_bf16",
            library.TapGemmProblem(m=1, n=8, channels=8, taps=1, batch=1),
            "no kernel for results of dtype 0",
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
def test_launchers_refuse_products_of_other_types(built):
    fp16, bf16, fp32, uint8 = (library.DTYPES[d] for d in (torch.float16, torch.bfloat16, torch.float32, torch.uint8))
    output = library.WinogradOutputProblem(1, 4, 4, 8, 4, 0, 1)
    gemm = library.TapGemmProblem(m=1, n=8, channels=8, taps=1, batch=1)
    aligned = 16
    for symbol, problem, arguments, message in (
        ("wan_winograd_output", output, (None, None, None, None, bf16, fp16), "no kernel for products of dtype 1"),
        ("wan_winograd_output", output, (None, None, None, None, uint8, bf16), "no kernel for products of dtype 3"),
        ("wan_tap_gemm_fp16", gemm, (None, None, None, None, None, bf16, 256), "no kernel for results of dtype 1"),
        ("wan_tap_gemm_fp16", gemm, (None, None, aligned, None, None, fp32, 256), "neither bias nor residual"),
        ("wan_tap_gemm_bf16", gemm, (None, None, None, aligned, None, fp32, 256), "neither bias nor residual"),
    ):
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
        Kernels(launch, TARGETS["sm_90a"], 132).pad(x, None, silu=False, out=like)


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the card would take the launches")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_launchers_accept_what_the_backend_sends(arch, built, dtype):
    """Every launch of the self-test passes the real checks; only then is the device missed."""
    symbols = set()

    def launch(symbol, arguments, like):
        symbols.add(symbol)
        assert getattr(built._handle, symbol)(*map(library._as_c, arguments), 0, None) == 1
        assert "cannot use CUDA device 0" in built._handle.wan_last_error().decode()

    for columns in TARGETS[arch].tile_cost:
        backend = CudaBackend(torch.device("cpu"), dtype, Kernels(launch, TARGETS[arch], 132, columns))
        for case in selftest.CASES:
            selftest._OPS[case.op](case, selftest._Random(dtype, 0))(backend, lambda tensor: tensor)
    (other,) = set(library.ELEMENTS.values()) - {library.ELEMENTS[dtype]}
    assert symbols == {name for name in library._signatures() if not name.endswith(other)}
