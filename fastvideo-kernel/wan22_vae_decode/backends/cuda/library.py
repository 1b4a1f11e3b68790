# SPDX-License-Identifier: Apache-2.0
"""The shared library of launchers: what it is built from, and its C interface in ctypes."""

import ctypes
import functools
from ctypes import c_char_p, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from wan22_vae_decode import jit
from wan22_vae_decode.backends.cuda import winograd_matrices
from wan22_vae_decode.backends.cuda.targets import TARGETS
from wan22_vae_decode.errors import DecodeError

SOURCES = Path(__file__).resolve().parents[2] / "csrc"

# Files that every architecture compiles as they are.
COMMON = (
    "launch",
    "norm_silu_pad",
    "winograd_input",
    "winograd_output",
    "upsample_combine",
    "upsample_input",
    "upsample_output",
    "output_head",
    "strided_copy",
)

ELEMENTS = {torch.float16: "fp16", torch.bfloat16: "bf16"}

DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.uint8: 3}
"""As `Dtype` in launch.cuh."""


class Conv3dProblem(ctypes.Structure):
    """As in conv3d.cuh."""

    _fields_ = [
        *((name, c_int64) for name in ("stride_batch", "stride_frame", "stride_row")),
        *((name, c_int32) for name in ("batch", "frames", "rows", "columns", "c_in")),
        *((name, c_int32) for name in ("c_out", "taps_t", "taps_h", "taps_w")),
        *((name, c_int32) for name in ("pad_top", "pad_bottom", "pad_left", "pad_right")),
    ]


class TapGemmProblem(ctypes.Structure):
    """As in tap_gemm.cuh."""

    _fields_ = [
        *((name, c_int64) for name in ("a_stride_m", "a_stride_tap", "a_stride_batch")),
        *((name, c_int64) for name in ("b_stride_n", "b_stride_tap", "b_stride_batch")),
        *((name, c_int64) for name in ("d_stride_m", "d_stride_batch")),
        *((name, c_int32) for name in ("m", "n", "channels", "taps", "batch")),
    ]


class PadProblem(ctypes.Structure):
    """As in norm_silu_pad.cu."""

    _fields_ = [
        ("x_stride_frame", c_int64),
        *((name, c_int32) for name in ("history_frames", "frames", "rows", "columns", "channels", "halo", "silu")),
    ]


class WinogradInputProblem(ctypes.Structure):
    """As in winograd_input.cu."""

    _fields_ = [
        *((name, c_int32) for name in ("frames", "rows", "columns", "channels", "halo")),
        *((name, c_int32) for name in ("tile_columns", "first_tile_row", "tile_rows")),
    ]


class WinogradOutputProblem(ctypes.Structure):
    """As in winograd_output.cu."""

    _fields_ = [
        *((name, c_int32) for name in ("frames", "rows", "columns", "channels")),
        *((name, c_int32) for name in ("tile_columns", "first_tile_row", "tile_rows")),
    ]


class UpsampleCombineProblem(ctypes.Structure):
    """As in upsample_combine.cu."""

    _fields_ = [
        *((name, c_int32) for name in ("frames", "rows", "columns", "channels")),
        *((name, c_int32) for name in ("shortcut_channels", "time_factor", "first_frame")),
    ]


class UpsampleInputProblem(ctypes.Structure):
    """As in upsample_input.cu."""

    _fields_ = [
        *((name, c_int32) for name in ("frames", "rows", "columns", "channels", "halo")),
        *((name, c_int32) for name in ("first_row", "first_tile_row", "tile_rows")),
    ]


class UpsampleOutputProblem(ctypes.Structure):
    """As in upsample_output.cu."""

    _fields_ = [
        *((name, c_int32) for name in ("frames", "rows", "columns", "channels")),
        *((name, c_int32) for name in ("shortcut_channels", "time_factor", "first_frame")),
        *((name, c_int32) for name in ("first_row", "first_tile_row", "tile_rows")),
    ]


class HeadProblem(ctypes.Structure):
    """As in output_head.cu."""

    _fields_ = [
        *((name, c_int64) for name in ("stride_channel", "stride_frame", "stride_row")),
        *((name, c_int32) for name in ("frames", "rows", "columns", "halo")),
    ]


def _signatures() -> dict[str, list[type]]:
    """Argument types of every launcher but the trailing (int device, cudaStream_t stream)."""
    pointer = ctypes.POINTER
    signatures: dict[str, list[type]] = {
        "wan_norm_silu_pad": [pointer(PadProblem), *[c_void_p] * 7, c_int],
        "wan_winograd_input": [pointer(WinogradInputProblem), *[c_void_p] * 7, c_int],
        "wan_winograd_output": [pointer(WinogradOutputProblem), *[c_void_p] * 4, c_int, c_int],
        "wan_upsample_combine": [pointer(UpsampleCombineProblem), *[c_void_p] * 4, c_int],
        "wan_upsample_input": [pointer(UpsampleInputProblem), *[c_void_p] * 4, c_int],
        "wan_upsample_output": [pointer(UpsampleOutputProblem), *[c_void_p] * 4, c_int],
        "wan_output_head": [pointer(HeadProblem), *[c_void_p] * 4, c_int, c_int],
        "wan_strided_copy": [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64],
    }
    for element in ELEMENTS.values():
        signatures[f"wan_conv3d_{element}"] = [pointer(Conv3dProblem), *[c_void_p] * 5, c_int]
        signatures[f"wan_tap_gemm_{element}"] = [pointer(TapGemmProblem), *[c_void_p] * 5, c_int, c_int]
    return signatures


def recipe(arch: str) -> jit.Recipe:
    """What the library of an architecture is built from."""
    common = tuple(jit.Unit(f"{name}.cu") for name in COMMON)
    # The slow units first, so that ninja starts them first.
    slow = tuple(
        jit.Unit(f"{name}.cu", (f"WAN_{element.upper()}",))
        for name in TARGETS[arch].tensor_core
        for element in ELEMENTS.values()
    )
    generated = ((winograd_matrices.NAME, winograd_matrices.header()),)
    return jit.Recipe("wan22_vae_decode", SOURCES, slow + common, arch, generated)


class Library:
    """A loaded library. `launch` is safe from several threads."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        try:
            self._handle = ctypes.CDLL(str(folder / name))
        except OSError as error:
            raise jit.BuildError(f"The built library {folder / name} cannot be loaded: {error}.") from error
        self._handle.wan_last_error.restype = c_char_p
        for symbol, arguments in _signatures().items():
            getattr(self._handle, symbol).argtypes = [*arguments, c_int, c_void_p]

    def launch(self, symbol: str, arguments: tuple, like: Tensor) -> None:
        """Enqueues a kernel on the device of `like` and on that device's current stream.

        Structures are passed by reference, tensors as their addresses and None as a null pointer. Raises DecodeError
        with the launcher's message if it refuses.
        """
        stream = torch.cuda.current_stream(like.device).cuda_stream
        status = getattr(self._handle, symbol)(*map(_as_c, arguments), like.device.index, stream)
        if status != 0:
            raise DecodeError(f"A CUDA kernel could not be launched: {self._handle.wan_last_error().decode()}.")


def _as_c(argument):
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return argument


@functools.cache
def load(arch: str) -> Library:
    """Builds (on first use) and loads the library of an architecture. Raises BuildError."""
    kernels = recipe(arch)
    return Library(jit.build(kernels), kernels.library)
