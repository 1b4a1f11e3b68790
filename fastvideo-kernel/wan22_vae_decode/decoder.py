# SPDX-License-Identifier: Apache-2.0
"""The public face: a decoder made once from a checkpoint's tensors, then called with latents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from wan22_vae_decode import backends, geometry, log, memory, parallel, weights
from wan22_vae_decode.backends.base import Backend
from wan22_vae_decode.errors import (
    BackendUnavailableError,
    CommunicationError,
    DecodeError,
    InputError,
    OutOfMemoryError,
)
from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.graph import Graph, History, Window, channels_last
from wan22_vae_decode.layers import DecoderWeights

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8)

Result = TypeVar("Result")


class Decoder:
    """Decodes Wan2.2 (TI2V-5B) latents to video, exactly as the VAE does, in passes of a few latent frames.

    Made by ``from_state_dict``. The weights are prepared then and do not follow later changes of the checkpoint's
    tensors; make a new decoder when those change (``weights.fingerprint`` tells). One decoder may be used by
    several threads, but by one at a time if it has a group.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        arch: Architecture,
        ops: Backend,
        prepared: DecoderWeights,
        frames_per_pass: int | Literal["auto"],
        comm: parallel.Communicator | None,
    ) -> None:
        self.arch = arch
        self.frames_per_pass = frames_per_pass
        self._tensors = tensors
        self._fingerprint = weights.fingerprint(tensors)
        self._ops = ops
        self._prepared = prepared
        self._comm = comm

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str = "auto",
        backend: str | Backend = "auto",
        frames_per_pass: int | Literal["auto"] = 4,
        group: Any = None,
    ) -> Decoder:
        """Checks and prepares the weights of FastVideo's or diffusers' ``AutoencoderKLWan``.

        Args:
            state_dict: at least ``post_quant_conv.*`` and ``decoder.*``; other names are ignored. Its tensors are
                not copied but kept for the rare decode that must go on in bfloat16.
            device: where to decode; by default where the weights are.
            dtype: the compute type, or "auto": float16 with float32 accumulation on CUDA, float32 elsewhere. A
                float16 decode whose values overflow goes on in bfloat16 from that pass, with one log line. float64
                runs on the torch backend only.
            backend: "cuda" (this package's kernels), "torch" (reference ops on any device), "auto" (the first that
                runs here, with one log line giving the reason if it is not the first), or a backend instance.
            frames_per_pass: latent frames of a pass per GPU, or "auto" for the most that free memory allows. A pass
                that does not fit is made smaller. The video does not depend on it.
            group: a ``torch.distributed`` group (or an object with ``device_group``) whose ranks decode together;
                every rank then makes its decoder and calls ``decode`` with the same latents.

        Raises:
            WeightsError: names, shapes or types are wrong; lists all of them.
            BackendUnavailableError: the named backend cannot run here.
            InputError: an option is wrong, or the ranks' options differ.
            PeerError: another rank failed here; nothing was exchanged.
        """
        comm = parallel.communicator(group)

        def setup(action: Callable[[], Result], what: str) -> Result:
            return action() if comm is None else comm.together(action, what, parallel.SETUP_TIMEOUT)

        def checked() -> tuple[dict[str, Tensor], Architecture, int | Literal["auto"]]:
            tensors = weights.decoder_tensors(state_dict)
            return tensors, weights.check(tensors), _frames_per_pass(frames_per_pass)

        tensors, arch, per_pass = setup(checked, "check its weights")
        ops = setup(lambda: _backend(backend, *_placement(tensors, device, dtype)), "start its backend")
        if comm is not None:
            names = comm.gather(ops.name, parallel.SETUP_TIMEOUT)
            if len(set(names)) > 1:
                log.once(f"the ranks have different backends {names}; all of them use torch")
                ops = setup(lambda: backends.create("torch", ops.device, ops.dtype), "start the torch backend")
            comm.agree((arch, ops.dtype, per_pass), "architecture, type and frames_per_pass")
        try:
            prepared = setup(lambda: _prepared(tensors, arch, ops, comm), "prepare its weights")
        except BackendUnavailableError as error:
            # A backend may find that it cannot take these widths; all ranks find the same.
            if backend != "auto":
                raise
            log.once(f"decoding with torch instead of the {ops.name} kernels: {error}")
            ops = setup(lambda: backends.create("torch", ops.device, ops.dtype), "start the torch backend")
            prepared = setup(lambda: _prepared(tensors, arch, ops, comm), "prepare its weights")
        return cls(tensors, arch, ops, prepared, per_pass, comm)

    @property
    def device(self) -> torch.device:
        return self._ops.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute type."""
        return self._ops.dtype

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._ops.name

    @property
    def stats(self) -> parallel.Stats:
        """The exchanges of the latest decode on this rank (empty without a group)."""
        return parallel.Stats() if self._comm is None else self._comm.stats

    def why_not(
        self, latents: Tensor, out_dtype: torch.dtype = torch.float32, to: int | Literal["all"] = "all"
    ) -> str | None:
        """The reason why ``decode`` would refuse this call, or None."""
        return self._problem(latents, out_dtype, to)

    def decode(
        self, latents: Tensor, out_dtype: torch.dtype = torch.float32, to: int | Literal["all"] = "all"
    ) -> Tensor:
        """Latents to video.

        Args:
            latents: [B, z, T, H, W] on the decoder's device, of any floating type and strides, T, H and W from 1.
                They are what ``post_quant_conv`` takes: already denormalised (z * std + mean).
            out_dtype: float32, float16, bfloat16, float64, or uint8. Floats are in [-1, 1]; uint8 is (v / 2 + 0.5)
                * 255, truncated.
            to: with a group, the only rank that gets the video, or "all".

        Returns:
            [B, 3, 4T - 3, 16H, 16W]; [B, 3, 0, 16H, 16W] on ranks that get none. NaN and infinite latents give NaN
            pixels where the VAE does (0 in uint8).

        Raises:
            InputError: the latents or an option cannot be decoded (``why_not`` gives the sentence).
            OutOfMemoryError: not even one latent frame at a time fits.
            PeerError: another rank failed before anything was exchanged.
            CommunicationError: a rank failed or fell silent in the middle; the decoder is not usable any more.
        """
        call = self._begin(latents, out_dtype, to)
        batch, _, frames, rows, cols = latents.shape
        shape = geometry.video_shape(batch, frames, rows, cols) if call.receives else _nothing(latents)
        video = self._together(lambda: torch.empty(shape, dtype=out_dtype, device=self.device), "allocate the video")
        for _ in self._run(call, video):
            pass
        return video

    def stream(
        self, latents: Tensor, out_dtype: torch.dtype = torch.float32, to: int | Literal["all"] = "all"
    ) -> Iterator[Tensor]:
        """As ``decode``, but yields the video pass by pass, in order: [B, 3, f, 16H, 16W] each.

        The first item has 4n - 3 frames for a pass of n latent frames, the others 4n. Each is new memory. The
        arguments are checked at once, not at the first item. With a group every rank iterates to the end.
        """
        return self._run(self._begin(latents, out_dtype, to), None)

    # One decode

    def _problem(self, latents: Tensor, out_dtype: torch.dtype, to: int | str) -> str | None:
        world = 1 if self._comm is None else self._comm.world
        if self._comm is not None and self._comm.broken is not None:
            return f"this decoder's ranks lost each other ({self._comm.broken}); make a new decoder on every rank"
        if out_dtype not in OUT_DTYPES:
            return f"out_dtype must be one of {', '.join(map(str, OUT_DTYPES))}, not {out_dtype}"
        if to != "all" and not (isinstance(to, int) and 0 <= to < world):
            return f"to must be 'all' or a rank below {world}, not {to!r}"
        return _latents_problem(latents, self.arch, self.device, world)

    def _begin(self, latents: Tensor, out_dtype: torch.dtype, to: int | str) -> _Call:
        """Checks a call on every rank before anything is exchanged."""

        def checked() -> _Call:
            problem = self._problem(latents, out_dtype, to)
            if problem is not None:
                raise InputError(problem)
            finite = self.dtype != torch.float16 or bool(torch.isfinite(latents).all())
            receives = self._comm is None or to == "all" or to == self._comm.rank
            return _Call(latents.detach(), out_dtype, to if isinstance(to, int) else None, receives, finite)

        if self._comm is None:
            return checked()
        if self._comm.broken is not None:
            raise CommunicationError(str(self._problem(latents, out_dtype, to)))
        call = self._comm.together(checked, "accept its latents")
        self._comm.agree((tuple(latents.shape), out_dtype, to, call.finite), "latents and options")
        self._comm.stats = parallel.Stats()
        return call

    def _run(self, call: _Call, video: Tensor | None) -> Iterator[Tensor]:
        """Every pass in order, into its part of ``video`` or into new memory."""
        frames = call.latents.shape[2]
        plans = self._plans(frames)
        session = self._session(self._ops, self._prepared, guarded=call.finite and self.dtype == torch.float16)
        start = 0
        while start < frames:
            plans = self._reserve(session, call, plans)
            interval = _Interval(start, min(start + plans[0].frames, frames), plans[0].slab)
            pixels = self._pixels(call, interval, video)
            finished = self._finished(session, call, interval, pixels, plans)
            if finished is None:
                plans = plans[1:]
                session = self._replayed(session, call, session.ops, session.graph.weights, session.guarded)
                continue
            session = finished
            yield pixels
            start = interval.stop
        if self._comm is not None:
            parallel.log_stats(self._comm)

    def _finished(
        self, session: _Session, call: _Call, interval: _Interval, pixels: Tensor, plans: list[memory.Plan]
    ) -> _Session | None:
        """The session after a pass, or None if memory ran out in it and a smaller pass remains to be tried.

        With a group nothing is tried again: the other ranks have moved on.
        """
        try:
            return self._pass(session, call, interval, pixels)
        except torch.OutOfMemoryError as error:
            needs = self._needs(session, call, plans[0])
            if self._comm is not None or len(plans) == 1:
                raise OutOfMemoryError(needs) from error
            log.once(f"{needs}; trying {plans[1].frames} in slabs of {plans[1].slab}", key=f"retry {plans[:2]}")
        # Not inside the handler: the traceback would keep the failed pass's tensors alive.
        return None

    def _plans(self, frames: int) -> list[memory.Plan]:
        """What a pass may be, from the one wanted down to one latent frame."""
        world = 1 if self._comm is None else self._comm.world
        if self.frames_per_pass != "auto":
            most = min(self.frames_per_pass * world, memory.MAX_FRAMES, frames)
            return memory.plans(most, world)
        if self._ops.free_bytes() is None:
            return memory.plans(min(memory.DEFAULT_FRAMES * world, frames), world)
        return memory.plans(min(memory.MAX_FRAMES, frames), world, every=True)

    def _reserve(self, session: _Session, call: _Call, plans: list[memory.Plan]) -> list[memory.Plan]:
        """The plans from the first on whose workspace every rank could reserve."""
        index = _first_that_fits(session.ops, self.arch, self._extent(call), plans)
        if self._comm is not None:
            indices = self._comm.gather(index)
            failed = [rank for rank, found in enumerate(indices) if found is None]
            agreed = None if failed else max(indices)
            if agreed is not None and agreed != index:
                session.ops.reserve(memory.pass_bytes(session.ops, self.arch, self._extent(call), plans[agreed]))
            index = agreed
        if index is None:
            raise OutOfMemoryError(f"{self._needs(session, call, plans[-1])}; free memory, or decode fewer pixels")
        if index > 0 and self.frames_per_pass != "auto":
            chosen = plans[index]
            needs = self._needs(session, call, plans[0])
            log.once(f"{needs}; using {chosen.frames} in slabs of {chosen.slab}", key=f"shrink {plans[0]} {chosen}")
        return plans[index:]

    def _needs(self, session: _Session, call: _Call, plan: memory.Plan) -> str:
        needed = memory.pass_bytes(session.ops, self.arch, self._extent(call), plan)
        free = session.ops.free_bytes()
        have = "" if free is None else f", {memory.readable(free)} are free"
        return f"a pass of {plan.frames} latent frames needs {memory.readable(needed)} on {self.device}{have}"

    def _pass(self, session: _Session, call: _Call, interval: _Interval, pixels: Tensor) -> _Session:
        """One pass, repeated in bfloat16 if float16 could not hold it; returns the session to go on with."""
        band = self._band(call, interval, pixels)
        if self._computed(session, call, interval, band):
            latents = f"latent frames {interval.start} to {interval.stop - 1}"
            log.logger.warning("float16 overflowed in %s; this decode goes on in bfloat16", latents)
            ops = self._ops.with_dtype(torch.bfloat16)
            prepared = self._together(lambda: self._prepared_again(ops), "prepare its weights in bfloat16")
            session = self._replayed(session, call, ops, prepared, guarded=False)
            self._computed(session, call, interval, band)
        session.done.append(interval)
        comm = self._comm
        if comm is not None:
            bands = [(16 * a, 16 * b) for a, b in self._bands(call)]
            self._phase(lambda: comm.gather_rows(band, pixels, bands, call.to))
        return session

    def _replayed(
        self, session: _Session, call: _Call, ops: Backend, prepared: DecoderWeights, guarded: bool
    ) -> _Session:
        """A new session in the state after the passes that ``session`` has done, whose pixels are not needed again.

        Histories are a third of a decode's memory; computing them again in the rare case is what lets the normal
        case keep one copy.
        """
        fresh = self._session(ops, prepared, guarded)
        for interval in session.done:
            scratch = self._band(call, interval, None)
            self._computed(fresh, call, interval, scratch)
            fresh.done.append(interval)
        return fresh

    def _computed(self, session: _Session, call: _Call, interval: _Interval, band: Tensor) -> bool:
        """Computes this rank's pixels of a pass; True if the guard found them (on any rank) not finite."""
        flag = session.ops.nonfinite_flag()

        def compute() -> None:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self._prefix_and_tail(session, call, interval, band, flag)
                if session.guarded and self._comm is not None:
                    self._comm.reduce_flag(flag)

        self._phase(compute)
        return session.guarded and bool(flag.item())

    def _prefix_and_tail(self, session: _Session, call: _Call, interval: _Interval, band: Tensor, flag: Tensor) -> None:
        x = self._prefix(session, call, interval, flag)
        session.graph.tail(x, session.history, interval.start == 0, band, flag, interval.slab)

    def _prefix(self, session: _Session, call: _Call, interval: _Interval, flag: Tensor) -> Tensor:
        """The mid block's input to its second resnet, for this rank's rows of all of the pass's frames."""
        graph, comm = session.graph, self._comm
        if comm is None:
            latents = channels_last(call.latents[:, :, interval.start : interval.stop], session.ops.dtype)
            return graph.prefix(latents, session.history, flag)
        intervals = parallel.frame_intervals(interval.start, interval.stop, comm.world)
        start, stop = (interval.start, interval.stop) if intervals is None else intervals[comm.rank]
        begin, end, surplus = parallel.window(start, stop)
        latents = channels_last(call.latents[:, :, begin:end], session.ops.dtype)
        x = graph.prefix(latents, Window(whole=begin == 0), flag)[:, surplus:]
        bands = self._bands(call)
        if intervals is None:
            top, bottom = bands[comm.rank]
            return x[:, :, top:bottom].contiguous()
        return comm.frames_to_rows(session.ops, x, intervals, bands)

    # Shapes and small parts

    def _session(self, ops: Backend, prepared: DecoderWeights, guarded: bool) -> _Session:
        return _Session(ops, Graph(ops, prepared, self.arch.up_blocks, self._comm), History(), guarded, [])

    def _extent(self, call: _Call) -> memory.Extent:
        batch, _, _, rows, cols = call.latents.shape
        if self._comm is None:
            return memory.Extent(batch, rows, rows, cols)
        top, bottom = self._bands(call)[self._comm.rank]
        return memory.Extent(batch, bottom - top, rows, cols, self._comm.world)

    def _bands(self, call: _Call) -> list[tuple[int, int]]:
        return geometry.row_bands(call.latents.shape[3], 1 if self._comm is None else self._comm.world)

    def _pixels(self, call: _Call, interval: _Interval, video: Tensor | None) -> Tensor:
        """Where a pass's pixels go on a rank that receives them; an empty tensor elsewhere."""
        start, stop = geometry.video_frames(interval.start, interval.stop)
        if not call.receives:
            return torch.empty(_nothing(call.latents), dtype=call.out_dtype, device=self.device)
        if video is not None:
            return video[:, :, start:stop]
        batch, _, _, rows, cols = call.latents.shape
        shape = (batch, 3, stop - start, geometry.SPATIAL * rows, geometry.SPATIAL * cols)
        return torch.empty(shape, dtype=call.out_dtype, device=self.device)

    def _band(self, call: _Call, interval: _Interval, pixels: Tensor | None) -> Tensor:
        """This rank's rows of ``pixels``, or memory of their shape where there are none."""
        rank = 0 if self._comm is None else self._comm.rank
        top, bottom = (geometry.SPATIAL * row for row in self._bands(call)[rank])
        if pixels is not None and call.receives:
            return pixels[:, :, :, top:bottom]
        start, stop = geometry.video_frames(interval.start, interval.stop)
        batch, cols = call.latents.shape[0], geometry.SPATIAL * call.latents.shape[4]
        return torch.empty(batch, 3, stop - start, bottom - top, cols, dtype=call.out_dtype, device=self.device)

    def _prepared_again(self, ops: Backend) -> DecoderWeights:
        if weights.fingerprint(self._tensors) != self._fingerprint:
            raise DecodeError("the checkpoint's tensors changed after the decoder was made; make a new decoder")
        return _prepared(self._tensors, self.arch, ops, self._comm)

    def _together(self, action: Callable[[], Result], what: str) -> Result:
        return action() if self._comm is None else self._comm.together(action, what)

    def _phase(self, action: Callable[[], None]) -> None:
        """A part of a pass that exchanges data: a failure on one rank ends it on all of them."""
        if self._comm is None:
            action()
            return
        failure: BaseException | None = None
        try:
            action()
        except BaseException as error:
            failure = error
        self._comm.finish_pass(failure)


@dataclass(frozen=True)
class _Call:
    """The arguments of one decode."""

    latents: Tensor
    out_dtype: torch.dtype
    to: int | None
    receives: bool
    finite: bool


@dataclass(frozen=True)
class _Interval:
    """One pass: its latent frames and how many of them make a slab."""

    start: int
    stop: int
    slab: int


@dataclass
class _Session:
    """The state of one decode in one compute type."""

    ops: Backend
    graph: Graph
    history: History
    guarded: bool
    done: list[_Interval]


def why_not(
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    backend: str = "auto",
) -> str | None:
    """The reason why ``Decoder.from_state_dict`` would refuse, found without building or copying anything, or None.

    Args:
        state_dict: the weights to check; without them only device, type and backend are.
        device: as for ``from_state_dict``; without it and without weights, the CPU.
        dtype: as for ``from_state_dict``.
        backend: as for ``from_state_dict``; "auto" always finds one.
    """
    try:
        tensors = {} if state_dict is None else weights.decoder_tensors(state_dict)
        if state_dict is not None:
            weights.check(tensors)
        placement = _placement(tensors, device, dtype)
    except DecodeError as error:
        return str(error)
    try:
        return None if backend == "auto" else backends.why_not(backend, *placement)
    except InputError as error:
        return str(error)


def _placement(
    tensors: Mapping[str, Tensor], device: torch.device | str | None, dtype: torch.dtype | str
) -> tuple[torch.device, torch.dtype]:
    """The device and the compute type that the options mean."""
    if device is None:
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device must name a torch device, not {device!r}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise BackendUnavailableError("a CUDA device was asked for, but torch sees none")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if dtype == "auto":
        return device, torch.float16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise InputError(f"dtype must be 'auto' or one of {', '.join(DTYPES)}, not {dtype!r}")
    return device, chosen


def _backend(name: str | Backend, device: torch.device, dtype: torch.dtype) -> Backend:
    """The named backend, or the first that runs, saying why those before it do not."""
    if isinstance(name, Backend):
        return name
    if name != "auto":
        return backends.create(name, device, dtype)
    for candidate in backends.NAMES[:-1]:
        try:
            return backends.create(candidate, device, dtype)
        except BackendUnavailableError as error:
            # On a CPU nobody expects the GPU's kernels.
            if device.type != "cpu":
                log.once(f"decoding with torch instead of the {candidate} kernels: {error}")
    return backends.create(backends.NAMES[-1], device, dtype)


def _prepared(
    tensors: Mapping[str, Tensor], arch: Architecture, ops: Backend, comm: parallel.Communicator | None
) -> DecoderWeights:
    # Tensors made in inference mode could not be used outside it.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(ops.device.type, enabled=False):
        return weights.prepare(tensors, arch, ops, split_rows=comm is not None)


def _frames_per_pass(value: int | str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= memory.MAX_FRAMES:
        raise InputError(f"frames_per_pass must be 'auto' or from 1 to {memory.MAX_FRAMES}, not {value!r}")
    return value


def _latents_problem(latents: Tensor, arch: Architecture, device: torch.device, world: int) -> str | None:
    """What is wrong with latents, in one sentence."""
    if not isinstance(latents, Tensor):
        return f"latents must be a tensor, not {type(latents).__name__}"
    if latents.dim() != 5:
        return f"latents must be [B, {arch.latent}, T, H, W], not {latents.dim()}-dimensional {list(latents.shape)}"
    batch, channels, frames, rows, cols = latents.shape
    if channels != arch.latent:
        return f"latents have {channels} channels, but this decoder takes {arch.latent}"
    if frames == 0:
        return "latents have no frames"
    if 0 in (batch, rows, cols):
        return f"latents {list(latents.shape)} are empty"
    if not latents.is_floating_point():
        return f"latents must be floating-point, not {latents.dtype}"
    if latents.layout != torch.strided:
        return f"latents must be a dense tensor, not {latents.layout}"
    if latents.device != device:
        return f"latents are on {latents.device}, but this decoder is on {device}; move them there"
    if latents.requires_grad and torch.is_grad_enabled():
        return "latents require gradients, which this decoder does not compute; detach them or use torch.no_grad()"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a decode cannot be captured into a CUDA graph, because it reads a flag at the end of each pass"
    if rows < world:
        return f"{rows} latent rows cannot be split over {world} ranks; use at most {rows} ranks, or no group"
    return None


def _first_that_fits(ops: Backend, arch: Architecture, extent: memory.Extent, plans: list[memory.Plan]) -> int | None:
    for index, plan in enumerate(plans):
        try:
            ops.reserve(memory.pass_bytes(ops, arch, extent, plan))
        except OutOfMemoryError:
            continue
        return index
    return None


def _nothing(latents: Tensor) -> tuple[int, int, int, int, int]:
    batch, _, _, rows, cols = latents.shape
    return batch, 3, 0, geometry.SPATIAL * rows, geometry.SPATIAL * cols
