# SPDX-License-Identifier: Apache-2.0
"""One decode: its passes in order, each with memory reserved, guarded against overflow, and exchanged between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from wan22_vae_decode import geometry, host, log, memory, parallel
from wan22_vae_decode.backends.base import Backend
from wan22_vae_decode.errors import OutOfMemoryError, is_out_of_memory, memory_for
from wan22_vae_decode.geometry import SPATIAL, Architecture
from wan22_vae_decode.graph import Graph, History, Window, channels_last
from wan22_vae_decode.layers import DecoderWeights

Result = TypeVar("Result")


@dataclass(frozen=True)
class Call:
    """The checked arguments of one decode.

    Attributes:
        latents: [B, z, T, H, W].
        out_dtype: of the video.
        to: the only rank that gets the video, or None for all.
        receives: this rank gets it.
        finite_frames: how many latent frames come before the first with a NaN or an infinity.
    """

    latents: Tensor
    out_dtype: torch.dtype
    to: int | None
    receives: bool
    finite_frames: int


class Prepared(NamedTuple):
    """A backend and the weights prepared for it."""

    ops: Backend
    weights: DecoderWeights


@dataclass(frozen=True)
class Interval:
    """One pass: its latent frames, and how many of them make a slab."""

    start: int
    stop: int
    slab: int


class Decode:
    """The state of one decode.

    Args:
        call: what to decode.
        arch: the decoder's widths.
        prepared: what to decode with.
        prepare_again: makes the weights for the same backend in another type.
        frames_per_pass: latent frames of a pass per rank, or "auto".
        comm: the ranks that decode together, or None.
    """

    def __init__(
        self,
        call: Call,
        arch: Architecture,
        prepared: Prepared,
        prepare_again: Callable[[Backend], DecoderWeights],
        frames_per_pass: int | Literal["auto"],
        comm: parallel.Communicator | None,
    ) -> None:
        self.call = call
        self.arch = arch
        self.comm = comm
        self.rank, self.world = (0, 1) if comm is None else (comm.rank, comm.world)
        self.bands = geometry.row_bands(call.latents.shape[3], self.world)
        self.done: list[Interval] = []
        self._prepare_again = prepare_again
        self._frames_per_pass = frames_per_pass
        self._guarded = prepared.ops.dtype == torch.float16
        self._start_over(prepared)
        self._plans = self._possible_plans()

    def new_video(self) -> Tensor:
        """Memory for the whole video, or an empty tensor on a rank that does not receive it."""
        return self._together(lambda: self._new_pixels(0, self.call.latents.shape[2]), "allocate the video")

    def run(self, video: Tensor | None, on_host: bool = False) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Every pass in order, into its part of ``video`` or into new memory; yields its pixels and, for new ones that
        are wanted ``on_host``, the ``host.target`` for them.
        """
        frames, start = self.call.latents.shape[2], 0
        while start < frames:
            self._reserve(new_pixels=video is None)
            plan = self._plans[0]
            interval = Interval(start, min(start + plan.frames, frames), plan.slab)
            pixels, target = self._pixels(interval, video, on_host)
            if not self._ran(interval, pixels):
                # Alone, a pass that ran out of memory is cut smaller and begun again.
                self._plans = self._plans[1:]
                with memory_for(f"the passes before latent frame {start}, which are computed again, do"):
                    self._replay(self._prepared)
                continue
            yield pixels, target
            start = interval.stop
        if self.comm is not None:
            parallel.log_stats(self.comm)

    # Memory

    def _possible_plans(self) -> list[memory.Plan]:
        """What a pass may be, from the one wanted down to one latent frame."""
        frames = self.call.latents.shape[2]
        if self._frames_per_pass != "auto":
            wanted = min(self._frames_per_pass * self.world, memory.MAX_FRAMES, frames)
            return memory.plans(wanted, self.world)
        if self._prepared.ops.free_bytes() is None:
            return memory.plans(min(memory.DEFAULT_FRAMES * self.world, frames), self.world)
        return memory.plans(min(memory.MAX_FRAMES, frames), self.world, every=True)

    def _reserve(self, new_pixels: bool) -> None:
        """Drops the plans whose memory some rank cannot reserve."""
        index = self._first_that_fits(new_pixels)
        if self.comm is not None:
            found = self.comm.gather(index, "reserve a pass's memory")
            agreed = None if None in found else max(found)
            if agreed is not None and agreed != index:
                self._prepared.ops.reserve(self._bytes(self._plans[agreed], new_pixels))
            index = agreed
        if index is None:
            raise OutOfMemoryError(f"{self._needs(self._plans[-1], new_pixels)}; free memory, or decode fewer pixels")
        wanted, chosen = self._plans[0], self._plans[index]
        if chosen != wanted and self._frames_per_pass != "auto":
            needs = self._needs(wanted, new_pixels)
            log.once(f"{needs}; using {chosen.frames} in slabs of {chosen.slab}", key=f"shrink {wanted} {chosen}")
        self._plans = self._plans[index:]

    def _first_that_fits(self, new_pixels: bool) -> int | None:
        for index, plan in enumerate(self._plans):
            try:
                self._prepared.ops.reserve(self._bytes(plan, new_pixels))
            except OutOfMemoryError:
                continue
            return index
        return None

    def _bytes(self, plan: memory.Plan, new_pixels: bool) -> int:
        """What a pass takes: its workspace and histories, and the pixels that do not go straight into a video."""
        batch, _, _, rows, cols = self.call.latents.shape
        top, bottom = self.bands[self.rank]
        extent = memory.Extent(batch, bottom - top, rows, cols, self.world)
        workspace = memory.pass_bytes(self._prepared.ops, self.arch, extent, plan)
        pixels = geometry.FRAMES_PER_LATENT * plan.frames * SPATIAL * SPATIAL * cols * 3 * batch
        held = rows * (self.call.receives and new_pixels)
        if self.comm is not None:
            # This rank's rows to send, and the other ranks' as they come in.
            held += (bottom - top) + rows * self.call.receives
        return workspace + pixels * held * self.call.out_dtype.itemsize

    def _needs(self, plan: memory.Plan, new_pixels: bool) -> str:
        ops = self._prepared.ops
        free = ops.free_bytes()
        have = "" if free is None else f", {memory.readable(free)} are free"
        needed = memory.readable(self._bytes(plan, new_pixels))
        return f"a pass of {plan.frames} latent frames needs {needed} on {ops.device}{have}"

    # Passes

    def _ran(self, interval: Interval, pixels: Tensor) -> bool:
        """Runs a pass; False if memory ran out in it and a smaller one remains to be tried.

        With several ranks nothing is tried again: the others have moved on.
        """
        try:
            self._pass(interval, pixels)
            return True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            needs = self._needs(self._plans[0], new_pixels=False)
            if self.comm is not None or len(self._plans) == 1:
                raise OutOfMemoryError(needs) from error
            smaller = self._plans[1]
            log.once(f"{needs}; trying {smaller.frames} in slabs of {smaller.slab}", key=f"retry {smaller}")
        # Not inside the handler, where the traceback still holds the failed pass's tensors.
        return False

    def _pass(self, interval: Interval, pixels: Tensor) -> None:
        """One pass, repeated in bfloat16 if float16 could not hold it, and its pixels to the ranks that want them."""
        band, overflowed = self._computed(interval, pixels)
        if overflowed:
            frames = f"latent frames {interval.start} to {interval.stop - 1}"
            log.logger.warning("float16 overflowed in %s; this decode goes on in bfloat16", frames)
            # The replay computes the histories anew; until then their memory can serve the new weights.
            self._history = History()
            prepared = self._together(self._in_bfloat16, "prepare its weights in bfloat16")
            self._guarded = False
            self._replay(prepared)
            band, _ = self._computed(interval, pixels)
        self.done.append(interval)
        comm = self.comm
        if comm is not None:
            bands = [(SPATIAL * top, SPATIAL * bottom) for top, bottom in self.bands]
            self._phase(lambda: comm.gather_rows(band, pixels, bands, self.call.to))

    def _replay(self, prepared: Prepared) -> None:
        """Goes back to the state before the current pass, by computing the earlier ones again without their pixels.

        Histories are a third of a decode's memory: that they can be computed again in the rare case lets the normal
        case keep one copy.
        """
        self._start_over(prepared)
        for interval in self.done:
            self._computed(interval, None)

    def _start_over(self, prepared: Prepared) -> None:
        self._prepared = prepared
        top, _ = self.bands[self.rank]
        self._graph = Graph(prepared.ops, prepared.weights, self.arch.up_blocks, self.comm, top)
        self._history = History()

    def _in_bfloat16(self) -> Prepared:
        ops = self._prepared.ops.with_dtype(torch.bfloat16)
        with memory_for("float16 overflowed, and the weights in bfloat16 do"):
            return Prepared(ops, self._prepare_again(ops))

    def _computed(self, interval: Interval, pixels: Tensor | None) -> tuple[Tensor, bool]:
        """Computes this rank's rows of a pass, in ``pixels`` or elsewhere; True if any rank found them not finite
        although all latents so far are.
        """
        guarded = self._guarded and interval.stop <= self.call.finite_frames

        def compute() -> tuple[Tensor, Tensor]:
            flag = self._prepared.ops.nonfinite_flag()
            band = self._band(interval, pixels)
            with torch.no_grad(), torch.autocast(band.device.type, enabled=False):
                x = self._prefix(interval, flag)
                self._graph.tail(x, self._history, interval.start == 0, band, flag, interval.slab)
                if guarded and self.comm is not None:
                    self.comm.reduce_flag(flag)
            return band, flag

        band, flag = self._phase(compute)
        return band, guarded and bool(flag.item())

    def _prefix(self, interval: Interval, flag: Tensor) -> Tensor:
        """What the mid block's second resnet reads: this rank's rows of all of the pass's frames."""
        comm, latents, dtype = self.comm, self.call.latents, self._prepared.ops.dtype
        if comm is None:
            own = channels_last(latents[:, :, interval.start : interval.stop], dtype)
            return self._graph.prefix(own, self._history, flag)
        intervals = parallel.frame_intervals(interval.start, interval.stop, comm.world)
        start, stop = (interval.start, interval.stop) if intervals is None else intervals[comm.rank]
        begin, end, surplus = parallel.window(start, stop)
        x = self._graph.prefix(channels_last(latents[:, :, begin:end], dtype), Window(whole=begin == 0), flag)
        x = x[:, surplus:]
        if intervals is None:
            top, bottom = self.bands[comm.rank]
            return x[:, :, top:bottom].contiguous()
        return comm.frames_to_rows(self._prepared.ops, x, intervals, self.bands)

    # Pixels

    def _pixels(self, interval: Interval, video: Tensor | None, on_host: bool) -> tuple[Tensor, Tensor | None]:
        """Where a pass's pixels go, and from there; an empty tensor on a rank that does not receive them."""

        def allocated() -> tuple[Tensor, Tensor | None]:
            pixels = self._new_pixels(interval.start, interval.stop)
            return pixels, host.target(pixels) if on_host else None

        if video is None:
            # On the host too before the pass: a rank that failed after it would leave the others waiting in the next.
            return self._together(allocated, "allocate its pixels")
        start, stop = geometry.video_frames(interval.start, interval.stop)
        return video[:, :, start:stop], None

    def _new_pixels(self, start: int, stop: int) -> Tensor:
        begin, end = geometry.video_frames(start, stop)
        return self._empty(end - begin if self.call.receives else 0, self.call.latents.shape[3])

    def _band(self, interval: Interval, pixels: Tensor | None) -> Tensor:
        """This rank's rows of ``pixels``, or new memory of their shape where there are none."""
        top, bottom = self.bands[self.rank]
        if pixels is not None and self.call.receives:
            return pixels[:, :, :, SPATIAL * top : SPATIAL * bottom]
        start, stop = geometry.video_frames(interval.start, interval.stop)
        return self._empty(stop - start, bottom - top)

    def _empty(self, frames: int, latent_rows: int) -> Tensor:
        """[B, 3, frames, 16 * latent_rows, 16 W], uninitialised."""
        batch, _, _, _, cols = self.call.latents.shape
        shape = (batch, 3, frames, SPATIAL * latent_rows, SPATIAL * cols)
        with memory_for(f"{frames} frames of pixels do"):
            return torch.empty(shape, dtype=self.call.out_dtype, device=self._prepared.ops.device)

    # Ranks

    def _together(self, action: Callable[[], Result], what: str) -> Result:
        """Before an exchange: if ``action`` fails on one rank, it fails on all."""
        return action() if self.comm is None else self.comm.together(action, what)

    def _phase(self, action: Callable[[], Result]) -> Result:
        """A part of a pass that exchanges data: a failure on one rank ends it on all."""
        if self.comm is None:
            return action()
        result, failure = None, None
        try:
            result = action()
        except BaseException as error:
            failure = error
        try:
            self.comm.finish_pass(failure)
        finally:
            # Its traceback refers to this frame: without the cycle the failed pass's tensors are free at once.
            del failure
        return result  # type: ignore[return-value]
