# SPDX-License-Identifier: Apache-2.0
"""The public face: a decoder made once from a checkpoint's tensors, then called with latents."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from wan22_vae_decode import backends, host, log, memory, parallel, passes, signature, weights
from wan22_vae_decode.backends.base import Backend
from wan22_vae_decode.errors import (
    BackendUnavailableError,
    CommunicationError,
    DecodeError,
    InputError,
    memory_for,
)
from wan22_vae_decode.geometry import Architecture
from wan22_vae_decode.layers import DecoderWeights
from wan22_vae_decode.passes import Call, Decode

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
    tensors; make a new decoder when those change (``weights.fingerprint`` tells). Several threads may use one decoder;
    with a group they take turns, which every rank must do in the same order.
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
            WeightsError: names, shapes or types are wrong, or values are not finite; says which.
            BackendUnavailableError: the named backend cannot run here.
            InputError: an option is wrong, or the ranks' options differ.
            PeerError: another rank failed here; nothing was exchanged.
        """
        comm = parallel.communicator(group)
        with _turn(comm):
            return cls._made(state_dict, device, dtype, backend, frames_per_pass, comm)

    @classmethod
    def _made(
        cls,
        state_dict: Mapping[str, Tensor],
        device: torch.device | str | None,
        dtype: torch.dtype | str,
        backend: str | Backend,
        frames_per_pass: int | Literal["auto"],
        comm: parallel.Communicator | None,
    ) -> Decoder:
        def setup(action: Callable[[], Result], what: str) -> Result:
            return action() if comm is None else comm.together(action, what, parallel.SETUP_TIMEOUT)

        def checked() -> tuple[dict[str, Tensor], Architecture, int | Literal["auto"]]:
            tensors = weights.decoder_tensors(state_dict)
            arch = weights.check(tensors)
            weights.check_finite(tensors)
            return tensors, arch, _frames_per_pass(frames_per_pass)

        tensors, arch, per_pass = setup(checked, "check its weights")
        ops = setup(lambda: _backend(backend, *_placement(tensors, device, dtype)), "start its backend")
        if comm is not None:
            names = comm.gather(ops.name, "choose a backend", parallel.SETUP_TIMEOUT)
            if len(set(names)) > 1:
                log.once(f"the ranks have different backends {names}; all of them use torch")
                ops = setup(lambda: backends.create("torch", ops.device, ops.dtype), "start the torch backend")
            comm.agree((arch, ops.dtype, per_pass), "architecture, type and frames_per_pass")
            contents = setup(lambda: signature.contents(dict(sorted(tensors.items()))), "read its weights")
            comm.agree(hash(contents), "weights (by their checksums)")
            setup(lambda: comm.connect(ops.device), "connect to the others")

        def prepare() -> DecoderWeights:
            # Around the agreement, so that the other ranks hear torch's own words.
            with memory_for(f"the weights in {ops.dtype} do"):
                return setup(lambda: _prepared(tensors, arch, ops, comm), "prepare its weights")

        try:
            prepared = prepare()
        except BackendUnavailableError as error:
            # A backend may find that it cannot take these widths; all ranks find the same.
            if backend != "auto":
                raise
            log.once(f"decoding with torch instead of the {ops.name} kernels: {error}")
            ops = setup(lambda: backends.create("torch", ops.device, ops.dtype), "start the torch backend")
            prepared = prepare()
        return cls(tensors, arch, ops, prepared, per_pass, comm)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's tensors lie elsewhere, so that their fingerprint is another."""
        self.__dict__.update(state)
        self._fingerprint = weights.fingerprint(self._tensors)

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
        """This rank's exchanges of the latest decode of the group, by whichever decoder (empty without a group)."""
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
            PeerError: another rank failed before anything was exchanged, or between two passes.
            CommunicationError: a rank failed or fell silent in the middle; the decoder is not usable any more.
        """
        with _turn(self._comm):
            decode = self._decode(self._begin(latents, out_dtype, to))
            video = decode.new_video()
            for _ in decode.run(video):
                pass
            return video

    def stream(
        self,
        latents: Tensor,
        out_dtype: torch.dtype = torch.float32,
        to: int | Literal["all"] = "all",
        on_host: bool = False,
    ) -> Iterator[Tensor]:
        """As ``decode``, but yields the video pass by pass, in order: [B, 3, f, 16H, 16W] each.

        The first item has 4n - 3 frames for a pass of n latent frames, the others 4n. Each is new memory: on the
        decoder's device, or with ``on_host`` in (pinned) host memory, copied while the next pass runs, so that an item
        comes one pass later. The arguments are checked at once, not at the first item. With a group every rank
        iterates to the end, and other threads wait until then. The latents are not copied: leave them as they are
        until the end.
        """
        turn = _turn(self._comm)
        try:
            passes = self._decode(self._begin(latents, out_dtype, to)).run(None, on_host)
            pixels = host.on_host(passes, self.device) if on_host else map(operator.itemgetter(0), passes)
        except BaseException:
            turn.end()
            raise
        items = _until_the_end(pixels, turn)
        # A generator that was never started runs nothing when it is closed.
        weakref.finalize(items, turn.end)
        return items

    # Beginning a decode

    def _problem(self, latents: Tensor, out_dtype: torch.dtype, to: int | str) -> str | None:
        world = 1 if self._comm is None else self._comm.world
        if self._comm is not None and self._comm.broken is not None:
            return f"this decoder's ranks lost each other ({self._comm.broken}); make a new decoder on every rank"
        if out_dtype not in OUT_DTYPES:
            return f"out_dtype must be one of {', '.join(map(str, OUT_DTYPES))}, not {out_dtype}"
        if to != "all" and not (isinstance(to, int) and not isinstance(to, bool) and 0 <= to < world):
            return f"to must be 'all' or a rank below {world}, not {to!r}"
        return _latents_problem(latents, self.arch, self.device, world)

    def _begin(self, latents: Tensor, out_dtype: torch.dtype, to: int | str) -> Call:
        """Checks a call on every rank before anything is exchanged."""

        def checked() -> Call:
            problem = self._problem(latents, out_dtype, to)
            if problem is not None:
                raise InputError(problem)
            with memory_for("the check for finite latents does"):
                finite = _finite_frames(latents) if self.dtype == torch.float16 else latents.shape[2]
            receives = self._comm is None or to == "all" or to == self._comm.rank
            return Call(latents.detach(), out_dtype, to if isinstance(to, int) else None, receives, finite)

        if self._comm is None:
            return checked()
        if self._comm.broken is not None:
            raise CommunicationError(str(self._problem(latents, out_dtype, to)))
        call = self._comm.together(checked, "accept its latents")
        self._comm.agree((tuple(latents.shape), out_dtype, to, call.finite_frames), "latents and options")
        self._comm.stats = parallel.Stats()
        return call

    def _decode(self, call: Call) -> Decode:
        prepared = passes.Prepared(self._ops, self._prepared)
        return Decode(call, self.arch, prepared, self._prepared_again, self.frames_per_pass, self._comm)

    def _prepared_again(self, ops: Backend) -> DecoderWeights:
        """The weights once more, for another compute type, from the checkpoint's tensors."""
        if weights.fingerprint(self._tensors) != self._fingerprint:
            raise DecodeError("the checkpoint's tensors changed after the decoder was made; make a new decoder")
        return _prepared(self._tensors, self.arch, ops, self._comm)


def _until_the_end(items: Iterator[Tensor], turn: parallel.Turn) -> Iterator[Tensor]:
    with turn:
        yield from items


def _turn(comm: parallel.Communicator | None) -> parallel.Turn:
    """The turn of a thread to use the ranks; without ranks there is nothing to wait for."""
    return (parallel.Turns() if comm is None else comm.turns).begin()


def why_not(
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    backend: str = "auto",
) -> str | None:
    """The reason why ``Decoder.from_state_dict`` would refuse, found without building or copying anything, or None.

    Args:
        state_dict: the weights to check, by name, shape and type but not by value; without them only device, type and
            backend are.
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


def check_options(
    *, dtype: torch.dtype | str = "auto", backend: str = "auto", frames_per_pass: int | Literal["auto"] = 4
) -> None:
    """Raises ``InputError`` for options of ``from_state_dict`` that mean nothing, on whatever device."""
    _frames_per_pass(frames_per_pass)
    device, chosen = _placement({}, "cpu", dtype)
    if backend != "auto":
        backends.why_not(backend, device, chosen)


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
    if device.type == "cpu":
        # As tensors say it, without an index.
        device = torch.device("cpu")
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
    try:
        frames = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        frames = 0
    if not 1 <= frames <= memory.MAX_FRAMES:
        raise InputError(f"frames_per_pass must be 'auto' or from 1 to {memory.MAX_FRAMES}, not {value!r}")
    return frames


def _finite_frames(latents: Tensor) -> int:
    """How many latent frames come before the first with a NaN or an infinity."""
    finite = torch.isfinite(latents).movedim(2, 0).flatten(1).all(1)
    return int(finite.cumprod(0).sum())


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
    if latents.dtype not in DTYPES.values():
        return f"latents must be floating-point, not {latents.dtype}; use one of {', '.join(DTYPES)}"
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
