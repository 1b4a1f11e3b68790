# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: who holds what, every exchange between the ranks, and how they agree.

The prefix (up to the mid block's attention, which sees whole frames) is split by latent frames: each rank computes
an interval of a pass from the latents, which all ranks hold, with six frames of context before it. One all-to-all
then turns frames into row bands, on which the rest runs; before each 3x3 conv a band fetches one row from each
neighbour, or two (``UpsampleConv.halo_rows``). Passes with fewer than two frames a rank run the prefix on every rank
and keep their rows.

Agreement. Ranks talk over two groups of their own: data moves over one of the caller's kind (NCCL, gloo), decisions
over a CPU group, each named so that ranks at different places notice. A failure before a decode's first exchange or
between its passes is told to everyone and raises ``PeerError`` on the healthy ranks; the groups stay usable. A
failure in the middle of a pass is told at the pass's end; ranks that wait for data give up after the timeout. Then
every rank raises, and the groups are not used again.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from wan22_vae_decode.backends.base import Backend, Halo
from wan22_vae_decode.errors import CommunicationError, DecodeError, InputError, PeerError
from wan22_vae_decode.geometry import CONTEXT_FRAMES, even_split
from wan22_vae_decode.log import logger

TIMEOUT_VARIABLE = "WAN22_VAE_DECODE_TIMEOUT"
STATS_VARIABLE = "WAN22_VAE_DECODE_STATS"

SETUP_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other while weights load and kernels build."""

MAX_TIMEOUT = timedelta(days=7)

Message = tuple[Callable, Tensor, int]
"""isend or irecv, a contiguous tensor, and the other rank."""


@dataclass
class Stats:
    """Exchanges of one decode on this rank: how many of each kind, and the bytes that this rank sent."""

    counts: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, nbytes: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + nbytes

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {self.counts[kind]} ({self.bytes[kind]} bytes)" for kind in self.counts)
        return kinds or "none"


def frame_intervals(start: int, stop: int, world: int) -> list[tuple[int, int]] | None:
    """Each rank's latent frames of a pass, or None if it has fewer than two a rank and everyone computes all."""
    if stop - start < 2 * world:
        return None
    return [(start + a, start + b) for a, b in even_split(stop - start, world)]


def window(start: int, stop: int) -> tuple[int, int, int]:
    """The frames to compute so that ``start`` to ``stop`` come out right: first, last, and how many to drop afterwards.

    Away from the clip's beginning the prefix itself drops its six frames of context (``graph.Window``).
    """
    first = max(0, start - CONTEXT_FRAMES)
    return first, stop, start if first == 0 else 0


class Communicator:
    """The exchanges of one set of ranks.

    Args:
        group: the caller's group, or an object with ``device_group`` (FastVideo's coordinators).
        timeout: seconds to wait for a rank in the middle of a decode.

    Attributes:
        stats: the exchanges of the group's latest decode.
        turns: what lets one thread at a time decode.
        broken: why the ranks cannot exchange anything any more, or None.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        group = getattr(group, "device_group", group)
        ranks = dist.get_process_group_ranks(group)
        backend = dist.get_backend(group)
        self.rank = dist.get_rank(group)
        self.world = len(ranks)
        self.timeout = timedelta(seconds=timeout)
        self.stats = Stats()
        self.turns = Turns()
        self.broken: str | None = None
        self._ranks = ranks
        # NCCL ends the process when its own time is up: the agreement, which waits twice the timeout, comes first.
        self._data = _new_group(ranks, backend, self.timeout if backend == "gloo" else 3 * self.timeout)
        self._control = _new_group(ranks, "gloo", SETUP_TIMEOUT)

    # Agreement

    def gather(self, value: Any, what: str, timeout: timedelta | None = None) -> list[Any]:
        """Every rank's picklable value, over the CPU group.

        Args:
            value: this rank's.
            what: the place in the decode, the same on every rank.
            timeout: how long to wait for the others, by default twice the timeout of data.

        Raises:
            CommunicationError: a rank stays silent, or is at another place.
        """
        try:
            answers = self._all_gather(pickle.dumps((what, value)), timeout or 2 * self.timeout)
        except (RuntimeError, ValueError) as error:
            self.abort("one of them was lost")
            raise CommunicationError(f"lost contact with a rank of the parallel decode ({error})") from error
        except BaseException:
            self.abort("one of them was interrupted")
            raise
        places, values = zip(*map(pickle.loads, answers), strict=True)
        if len(set(places)) > 1:
            self.abort("they were at different places")
            raise CommunicationError(f"the ranks are at different places of a parallel decode: {', '.join(places)}")
        return list(values)

    def _all_gather(self, payload: bytes, timeout: timedelta) -> list[bytes]:
        """Every rank's bytes, of any lengths."""
        size = torch.tensor([len(payload)], device="cpu")
        sizes = [torch.empty_like(size) for _ in range(self.world)]
        dist.all_gather(sizes, size, group=self._control, async_op=True).wait(timeout)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device="cpu")
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self._control, async_op=True).wait(timeout)
        return [part[: int(n)].numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]

    def together(self, action: Callable[[], Any], what: str, timeout: timedelta | None = None) -> Any:
        """Runs ``action`` on every rank; if it fails anywhere, it fails everywhere: there with its own error,
        elsewhere with ``PeerError``.
        """
        result, failure = None, None
        try:
            result = action()
        except BaseException as error:
            failure = error
        try:
            reports = self.gather(None if failure is None else _text(failure), what, timeout)
            if failure is not None:
                raise failure
        finally:
            # Its traceback refers to this frame: without the cycle what the action held is free at once.
            del failure
        for rank, report in enumerate(reports):
            if report is not None:
                raise PeerError(f"rank {rank} failed to {what}, so no rank does ({report})")
        return result

    def agree(self, value: Any, what: str) -> None:
        """Raises ``InputError`` on every rank unless all ranks have the same ``value``."""
        values = self.gather(value, f"compare {what}")
        if any(other != values[0] for other in values):
            raise InputError(f"the ranks must decode the same thing, but their {what} differ: {values}")

    def finish_pass(self, failure: BaseException | None) -> None:
        """Called by every rank at the end of a part of a pass: raises everywhere if any rank failed in it."""
        waiting = isinstance(failure, CommunicationError)
        try:
            try:
                reports = self.gather(None if failure is None else (waiting, _text(failure)), "end a part of a pass")
            except CommunicationError:
                if failure is not None:
                    raise failure from None
                raise
            failed = [(report[0], rank, report[1]) for rank, report in enumerate(reports) if report is not None]
            if not failed:
                return
            # A rank that only waited in vain is not the cause if another one knows better.
            _, rank, text = min(failed)
            self.abort(f"rank {rank} failed in the middle of a pass")
            if failure is not None and not waiting:
                raise failure
            raise CommunicationError(f"rank {rank} failed in the middle of a pass ({text})") from failure
        finally:
            del failure

    def abort(self, reason: str) -> None:
        """Gives the data group up, so that no kernel waits for a rank that will never answer."""
        self.broken = reason
        _forget(self)
        if dist.get_backend(self._data) != "gloo" and torch.cuda.is_available():
            self._data.abort()

    # Exchanges

    def connect(self, device: torch.device) -> None:
        """Exchanges a byte with every rank, called by all of them before their first pass.

        NCCL connects on first use. Inside a pass that would take device memory that nobody reserved, and hold hosts
        where no timeout reaches them if a rank failed before it came there.
        """
        own = torch.zeros(1, dtype=torch.uint8, device=device)
        messages: list[Message] = []
        for peer in range(self.world):
            if peer != self.rank:
                messages += [(dist.isend, own, peer), (dist.irecv, torch.empty_like(own), peer)]
        self._exchange(messages)
        self.reduce_flag(torch.zeros(1, dtype=torch.int32, device=device))

    def frames_to_rows(
        self, ops: Backend, x: Tensor, intervals: Sequence[tuple[int, int]], bands: Sequence[tuple[int, int]]
    ) -> Tensor:
        """The prefix transpose: [B, own frames, H, W, C] on every rank -> [B, all frames, own rows, W, C]."""
        batch, frames, _, cols, channels = x.shape
        counts = [stop - start for start, stop in intervals]
        mine = bands[self.rank][1] - bands[self.rank][0]
        sent = [batch * frames * (stop - start) * cols * channels for start, stop in bands]
        received = [batch * count * mine * cols * channels for count in counts]
        send = ops.split_rows(x, bands)
        receive = send.new_empty(sum(received))
        item = x.element_size()
        with record_function("wan.exchange.prefix"):
            work = dist.all_to_all_single(
                receive.view(torch.uint8),
                send.view(torch.uint8),
                [n * item for n in received],
                [n * item for n in sent],
                group=self._data,
                async_op=True,
            )
            self._wait([work], x.device)
        self.stats.add("prefix", (sum(sent) - sent[self.rank]) * item)
        return ops.join_frames(receive, counts, batch, mine, cols, channels)

    def halo(self, ops: Backend, x: Tensor, layer: str, rows: int) -> Halo:
        """``rows`` rows of ``x`` from each neighbour, zeros at the image's edges. ``layer`` names it in profiles."""
        first, last = ops.edge_rows(x, rows)
        above = torch.empty_like(first) if self.rank > 0 else torch.zeros_like(first)
        below = torch.empty_like(last) if self.rank < self.world - 1 else torch.zeros_like(last)
        messages: list[Message] = []
        sent = 0
        for peer, outgoing, incoming in ((self.rank - 1, first, above), (self.rank + 1, last, below)):
            if 0 <= peer < self.world:
                messages += [(dist.isend, outgoing, peer), (dist.irecv, incoming, peer)]
                sent += outgoing.numel() * outgoing.element_size()
        with record_function(f"wan.exchange.halo.{layer}"):
            self._exchange(messages)
        self.stats.add("halo", sent)
        return Halo(above, below)

    def gather_rows(self, band: Tensor, video: Tensor, bands: Sequence[tuple[int, int]], to: int | None) -> None:
        """Every rank's pixel rows to all ranks (``to`` None) or to one.

        Args:
            band: [B, 3, F, own rows, W], this rank's pixels.
            video: [B, 3, F, rows, W]; other ranks' rows are filled in where this rank receives.
            bands: pixel rows of each rank.
            to: the receiving rank, or None.
        """
        receivers = range(self.world) if to is None else (to,)
        own = band.contiguous()
        messages: list[Message] = [(dist.isend, own, peer) for peer in receivers if peer != self.rank]
        parts = []
        if self.rank in receivers:
            for peer, (start, stop) in enumerate(bands):
                if peer != self.rank:
                    part = own.new_empty(*own.shape[:3], stop - start, own.shape[4])
                    messages.append((dist.irecv, part, peer))
                    parts.append((start, stop, part))
        with record_function("wan.exchange.pixels"):
            self._exchange(messages)
        self.stats.add("pixels", sum(own.numel() * own.element_size() for peer in receivers if peer != self.rank))
        for start, stop, part in parts:
            video[:, :, :, start:stop] = part

    def reduce_flag(self, flag: Tensor) -> None:
        """Sets the flag everywhere if it is set anywhere."""
        with record_function("wan.exchange.flag"):
            self._wait([dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._data, async_op=True)], flag.device)

    def _exchange(self, messages: Sequence[Message]) -> None:
        """Posts sends and receives of whole tensors with group ranks, as bytes, and waits for them."""
        operations = [
            dist.P2POp(kind, tensor.view(-1).view(torch.uint8), self._ranks[peer], self._data)
            for kind, tensor, peer in messages
        ]
        if operations:
            self._wait(dist.batch_isend_irecv(operations), messages[0][1].device)

    def _wait(self, works: Sequence[Any], device: torch.device) -> None:
        """On a GPU this orders streams only; on a CPU it waits, at most for the timeout."""
        for work in works:
            if device.type == "cuda":
                work.wait()
                continue
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                raise CommunicationError(f"lost contact with a rank in the middle of a pass ({error})") from error


class Turns:
    """Lets one thread at a time decode: the exchanges of two decodes must not mix. A thread that has the turn may begin
    another decode before it has ended the first, as while it iterates over a stream.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: int | None = None
        self._open = 0

    def begin(self) -> Turn:
        """Waits for the other thread's decodes to end."""
        me = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread in (None, me), SETUP_TIMEOUT.total_seconds()):
                raise DecodeError(
                    f"another thread has been decoding with these ranks for {SETUP_TIMEOUT}; close its streams"
                )
            self._thread = me
            self._open += 1
        return Turn(self)

    def end(self) -> None:
        with self._changed:
            self._open -= 1
            if self._open == 0:
                self._thread = None
                self._changed.notify_all()


class Turn:
    """A decode's turn; ``end`` may be called by any thread and more than once."""

    def __init__(self, turns: Turns) -> None:
        self._turns: Turns | None = turns

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.end()


def communicator(group: Any) -> Communicator | None:
    """The communicator of a group, shared by its decoders; None for no group or a group of one.

    Raises:
        InputError: torch.distributed is not initialised, or this process is no rank of the group.
        DecodeError: the timeout's variable is wrong.
    """
    if group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise InputError("a group was given, but torch.distributed is not initialised; call init_process_group first")
    group = getattr(group, "device_group", group)
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise InputError("this process is not a rank of the group; make a decoder only on the ranks that belong to it")
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return None
    world, timeout = dist.group.WORLD, _timeout()
    key = (world, ranks, dist.get_backend(group), timeout)
    with _lock:
        # Those of a world that was destroyed went with it.
        for old in [old for old in _communicators if old[0] is not world]:
            del _communicators[old]
        if key not in _communicators:
            _communicators[key] = Communicator(group, timeout)
        return _communicators[key]


def log_stats(comm: Communicator) -> None:
    """One line with the decode's exchanges, if ``WAN22_VAE_DECODE_STATS=1``."""
    if os.environ.get(STATS_VARIABLE) == "1":
        logger.warning("rank %d of %d sent: %s", comm.rank, comm.world, comm.stats)


_communicators: dict[tuple, Communicator] = {}
_lock = threading.Lock()


def _forget(comm: Communicator) -> None:
    with _lock:
        for key, value in list(_communicators.items()):
            if value is comm:
                del _communicators[key]


def _new_group(ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of our own, created by its members alone: what happens in it cannot disturb the caller's."""
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    longest = MAX_TIMEOUT.total_seconds()
    if math.isnan(seconds) or not 0 < seconds <= longest:
        raise DecodeError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds up to {longest:.0f}, not {text!r}")
    return seconds


def _text(failure: BaseException) -> str:
    """A failure in the words that other ranks hear."""
    return f"{type(failure).__name__}: {failure}"
