# SPDX-License-Identifier: Apache-2.0
"""One method a launcher: tensors in, tensors out, the arguments of the C interface worked out in between.

Outputs are always given by the caller. Shapes are those of one video of the batch unless B is named. Strides are
free where a docstring says so and dense elsewhere.
"""

from collections.abc import Callable

from torch import Tensor

from wan22_vae_decode import winograd
from wan22_vae_decode.backends.base import Halo
from wan22_vae_decode.backends.cuda import heuristics
from wan22_vae_decode.backends.cuda.library import (
    DTYPES,
    ELEMENTS,
    Conv3dProblem,
    HeadProblem,
    PadProblem,
    TapGemmProblem,
    UpsampleCombineProblem,
    UpsampleInputProblem,
    UpsampleOutputProblem,
    WinogradInputProblem,
    WinogradOutputProblem,
)
from wan22_vae_decode.backends.cuda.targets import Target

Launch = Callable[[str, tuple, Tensor], None]


class Kernels:
    """The CUDA kernels as functions of tensors.

    Args:
        launch: enqueues a launcher by name, see `Library.launch`.
        target: the architecture that the kernels are built for.
        multiprocessors: of the device, for the choice of tiles.
        tile: columns of every GEMM tile; None chooses by size.
    """

    def __init__(self, launch: Launch, target: Target, multiprocessors: int, tile: int | None = None) -> None:
        self._launch = launch
        self.target = target
        self._multiprocessors = multiprocessors
        self._tile = tile

    def with_tile(self, columns: int) -> "Kernels":
        """The same kernels with one fixed tile."""
        return Kernels(self._launch, self.target, self._multiprocessors, columns)

    def conv3d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        pad_rows: tuple[int, int],
        pad_cols: tuple[int, int],
    ) -> None:
        """out = conv(x) + bias + residual, stride 1.

        Args:
            x: [B, F, R, W, C_in]; frames, rows and batch items may be strided, columns are dense.
            weight: [C_out, kt, kh, kw, C_in].
            bias: [C_out] float32.
            residual: like ``out``; may be ``out``.
            out: [B, F - kt + 1, R + sum(pad_rows) - kh + 1, W + sum(pad_cols) - kw + 1, C_out].
            pad_rows, pad_cols: zeros before and behind.
        """
        batch, frames, rows, cols, c_in = x.shape
        c_out, taps_t, taps_h, taps_w, _ = weight.shape
        pixels = out.numel() // c_out
        problem = Conv3dProblem(
            *(x.stride(axis) for axis in range(3)),
            *(batch, frames, rows, cols, c_in),
            *(c_out, taps_t, taps_h, taps_w),
            *pad_rows,
            *pad_cols,
        )
        tile = self._tile or heuristics.tile_n(self.target, pixels, c_out, 1, self._multiprocessors)
        self._launch(f"wan_conv3d_{ELEMENTS[x.dtype]}", (problem, x, weight, bias, residual, out, tile), out)

    def tap_gemm(self, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        """out[l, m] = sum over taps of a[l, m, tap] @ b[l, :, tap].T + bias + residual.

        Args:
            a: [L, M, taps, C], a view of any strides in L, M and taps; windows may overlap.
            b: [L, N, taps, C], likewise; expanded in L where all batches share it.
            bias: [N] float32.
            residual: as ``out``; may be ``out``.
            out: [L, M, N] of any strides in L and M; without bias and residual also in float32.
        """
        batch, m, taps, channels = a.shape
        n = b.shape[1]
        problem = TapGemmProblem(
            *(a.stride(1), a.stride(2), a.stride(0)),
            *(b.stride(1), b.stride(2), b.stride(0)),
            *(out.stride(1), out.stride(0)),
            *(m, n, channels, taps, batch),
        )
        tile = self._tile or heuristics.tile_n(self.target, m, n, batch, self._multiprocessors)
        arguments = (problem, a, b, bias, residual, out, DTYPES[out.dtype], tile)
        self._launch(f"wan_tap_gemm_{ELEMENTS[a.dtype]}", arguments, out)

    def pad(
        self,
        x: Tensor,
        norm: Tensor | None,
        silu: bool,
        out: Tensor,
        history_frames: int = 0,
        history: Tensor | None = None,
        halo: Halo | None = None,
        next_history: Tensor | None = None,
    ) -> None:
        """A conv's input: history frames, then rows (above, x, below) after RMS norm and SiLU.

        Args:
            x: [T, H, W, C], frames may be strided.
            norm: [C] float32, gamma * sqrt(C); None copies.
            silu: apply SiLU after the norm.
            out: [history_frames + T, R, W, C] with R = H, or H + 2 with a halo.
            history_frames, history: how many frames go in front, and they, [history_frames, R, W, C]; None are zeros.
            halo: rows [T, 1, W, C] each.
            next_history: [2, R, W, C], receives the last two frames of ``out``.
        """
        frames, rows, cols, channels = x.shape
        problem = PadProblem(x.stride(0), history_frames, frames, rows, cols, channels, halo is not None, silu)
        above, below, _ = halo or (None, None, 0)
        arguments = (problem, x, above, below, history, norm, out, next_history, DTYPES[x.dtype])
        self._launch("wan_norm_silu_pad", arguments, out)
        if next_history is not None and frames == 1:
            # The launch covers only frames of x; the older one is the last of the history.
            self.copy(out[-2], next_history[0])

    def winograd_input(
        self,
        x: Tensor,
        norm: Tensor | None,
        history: Tensor | None,
        halo: Halo | None,
        first_tile_row: int,
        components: Tensor,
        next_history: Tensor,
    ) -> None:
        """Components of F(4 x 4 or 3, 3x3) of a causal conv's input, for a range of rows of tiles.

        Args:
            x: [T, H, W, C].
            norm: [C] float32, gamma * sqrt(C), for RMS norm and SiLU; None takes x as it is.
            history: the two frames before x, normalised, [2, R, W, C] with R = H, or H + 2 with a halo; None are zeros.
            halo: raw rows [T, 1, W, C] each; None are zeros.
            first_tile_row: the first of the range; a tile has four rows.
            components: [36 or 30, 2 + T, tile rows of the range, ceil(W / columns), C], written; their number tells
                the columns of a tile.
            next_history: like ``history``, receives the last two frames of history and x in the range's rows.
        """
        frames, rows, cols, channels = x.shape
        problem = WinogradInputProblem(
            *(frames, rows, cols, channels, halo is not None),
            *(winograd.columns(len(components)), first_tile_row, components.shape[2]),
        )
        above, below, _ = halo or (None, None, 0)
        arguments = (problem, x, above, below, history, norm, components, next_history, DTYPES[x.dtype])
        self._launch("wan_winograd_input", arguments, components)

    def winograd_output(
        self, products: Tensor, bias: Tensor, residual: Tensor | None, first_tile_row: int, out: Tensor
    ) -> None:
        """The rows of ``out`` that belong to a range of rows of tiles, from the products of their components.

        Args:
            products: [36 or 30, T, tile rows of the range, ceil(W / columns), C], as ``out`` or in float32.
            bias: [C] float32.
            residual: like ``out``, added; may be ``out``.
            first_tile_row: the first of the range.
            out: [T, H, W, C].
        """
        frames, rows, cols, channels = out.shape
        problem = WinogradOutputProblem(
            frames, rows, cols, channels, winograd.columns(len(products)), first_tile_row, products.shape[2]
        )
        arguments = (problem, products, bias, residual, out, DTYPES[products.dtype], DTYPES[out.dtype])
        self._launch("wan_winograd_output", arguments, out)

    def upsample_combine(
        self, phases: Tensor, bias: Tensor, shortcut: Tensor, first_frame: int, time_factor: int, out: Tensor
    ) -> None:
        """Interleaves the four phases of an upsample conv and adds bias and DupUp3D shortcut.

        Args:
            phases: [2, 2, F, H, W, C].
            bias: [C] float32.
            shortcut: [T, H, W, C_s].
            first_frame: of the enlarged shortcut, the frame that belongs to frame 0 of ``out``.
            time_factor: frames that DupUp3D makes of one.
            out: [F, 2H, 2W, C].
        """
        problem = UpsampleCombineProblem(*phases.shape[2:], shortcut.shape[-1], time_factor, first_frame)
        self._launch("wan_upsample_combine", (problem, phases, bias, shortcut, out, DTYPES[phases.dtype]), out)

    def upsample_input(self, x: Tensor, halo: Halo | None, first_tile_row: int, components: Tensor) -> None:
        """Components of F(3x3, 2x2) of an upsample conv's input, for a range of rows of tiles.

        Args:
            x: [F, H, W, C], an image or a band of one.
            halo: rows [F, 2, W, C] each, and the band's first row in the image; None are zeros, and row 0.
            first_tile_row: the first of the range, numbered as `winograd.upsample_tiles` does.
            components: [16, F, tile rows of the range, W // 3 + 1, C], written.
        """
        above, below, first_row = halo or (None, None, 0)
        problem = UpsampleInputProblem(*x.shape, halo is not None, first_row, first_tile_row, components.shape[2])
        arguments = (problem, x, above, below, components, DTYPES[x.dtype])
        self._launch("wan_upsample_input", arguments, components)

    def upsample_output(
        self,
        products: Tensor,
        bias: Tensor,
        shortcut: Tensor,
        first_frame: int,
        time_factor: int,
        first_row: int,
        first_tile_row: int,
        out: Tensor,
    ) -> None:
        """What a range of rows of tiles makes of ``out``, from the products of their components in the four phases.

        Args:
            products: [16, F, tile rows of the range, W // 3 + 1, 2, 2, C].
            bias, shortcut, first_frame, time_factor: as for ``upsample_combine``.
            first_row: of the shortcut in the image.
            first_tile_row: the first of the range.
            out: [F, 2H, 2W, C].
        """
        frames, tile_rows = products.shape[1:3]
        _, rows, cols, shortcut_channels = shortcut.shape
        problem = UpsampleOutputProblem(
            *(frames, rows, cols, out.shape[-1]),
            *(shortcut_channels, time_factor, first_frame),
            *(first_row, first_tile_row, tile_rows),
        )
        self._launch("wan_upsample_output", (problem, products, bias, shortcut, out, DTYPES[out.dtype]), out)

    def output_head(self, part: Tensor, bias: Tensor, halo: bool, video: Tensor, nonfinite: Tensor) -> None:
        """Sums the head's nine shifted copies and writes pixels.

        Args:
            part: [T, R, W, 112], R = H, or H + 2 with a halo.
            bias: [12] float32.
            halo: whether ``part`` has halo rows.
            video: [3, T, 2H, 2W] of any strides with adjacent columns; float32, float16, bfloat16 or uint8.
            nonfinite: int32 [1], set to 1 if a value before the clamp is NaN or infinite.
        """
        frames, rows, cols, _ = part.shape
        problem = HeadProblem(*video.stride()[:3], frames, rows - 2 * halo, cols, halo)
        arguments = (problem, part, bias, video, nonfinite, DTYPES[part.dtype], DTYPES[video.dtype])
        self._launch("wan_output_head", arguments, part)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies dense data onto dense data of the same size."""
        nbytes = source.numel() * source.element_size()
        self._launch("wan_strided_copy", (source, target, nbytes, nbytes, nbytes, 1), target)

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Copies rows of every frame: [N, R, W, C] with strided frames on both sides, the same R, W and C."""
        size = source.element_size()
        nbytes = source[0].numel() * size
        arguments = (source, target, source.stride(0) * size, target.stride(0) * size, nbytes, source.shape[0])
        self._launch("wan_strided_copy", arguments, target)
