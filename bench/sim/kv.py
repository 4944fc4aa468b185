"""KV on its way from the instances that compute prompts to those that decode them.

A chunk of a prompt leaves as one flow while it is computed. Layers leave one by one, as they are computed: so the flow
gets no more, until the step ends, than what leaves one layer for after it. What comes after a chunk waits for it, as in
the worker's ``kv_transfer``. Questions take a time each way, and wait for the end of a step as they do there.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from bench.sim.arrivals import Arrivals, Reservation
from bench.sim.clock import Clock, Event
from bench.sim.compute import Compute
from bench.sim.flows import BYTES_PER_GBIT, Flow, Network
from bench.sim.sharing import Resource
from services.worker.core.kv_admission import room
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import BlitzError, Overloaded
from shared.messages.generation import DecodePlace


class Member(Protocol):
    """An instance, as the other one of a transfer knows it (``bench.sim.instance.SimInstance``)."""

    @property
    def worker_id(self) -> str: ...
    @property
    def instance_id(self) -> str: ...
    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def compute(self) -> Compute: ...
    @property
    def arrivals(self) -> Arrivals: ...

    def call(self, function: Callable[[], object], *, after_step: bool = False) -> None: ...
    def left(self, sequence: ActiveSequence) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPaths:
    """How KV gets from one instance to another."""

    network: Network
    path: Callable[[Member, Member], tuple[Resource, ...]]
    find: Callable[[DecodePlace], Member | None]
    """The instance there, if there is one."""
    message_s: float = 0.0003
    """A question between workers, or its answer."""
    notice_s: float = 0.0
    """Until one learns that the other has died."""
    seed: int = 0
    """Of the pauses between two questions for room."""


@dataclass(slots=True, eq=False)
class KvTransfer:
    """Of one request; a prefill instance's."""

    sequence: ActiveSequence
    departures: Departures
    decoder: Member
    num_tokens: int
    """Of its context."""
    chunk_tokens: int
    """0: its KV leaves in one."""
    pauses: Iterator[float]
    context_tokens: int = 0
    """Not said."""
    known_tokens: int = 0
    """KV of so many is there, or is being computed since its first layer has run."""
    chunk_ends_s: float = 0.0
    """When the last of these are computed."""
    sent_tokens: int = 0
    flow: Flow | None = None
    flow_tokens: int = 0
    """Up to which the flow brings them."""
    reservation: Reservation | None = None
    asking: Event | None = None
    computed_at_s: float | None = None
    """Since when it is held, with its first token."""
    kept: bool = False
    """It is decoded where it is."""
    by_layer: bool = False
    """It is computed outside of steps, all of it layer by layer."""
    layers_ready: int = 0
    layers_sent: int = 0
    """So far, as ``sent_tokens``; those of a flow under way included."""
    begun: bool = False
    """The decode instance has it; that is not known here yet."""
    over: bool = False
    """It has ended, or is the decode instance's."""
    before: KvTransfer | None = None
    """By which a pair's target sends the layers before those that leave here."""
    rest: KvTransfer | None = None
    """The other way round: that one has the reservation, and begins or ends the request."""

    @property
    def is_there(self) -> bool:
        """All KV has arrived, from both members where there are two."""
        before = self.before
        both = before is None or (before.flow is None and before.layers_sent == before.layers_ready)
        return both and self.sent_tokens == self.num_tokens

    def lost(self) -> None:
        """The decode instance has died."""
        self.departures.lost(self)


class Departures:
    """Of one prefill instance."""

    def __init__(self, clock: Clock, instance: Member, paths: KvPaths) -> None:
        self._clock = clock
        self._instance = instance
        self._paths = paths
        self._random = random.Random(f"{paths.seed} {instance.instance_id}")
        self.transfers: dict[tuple[str, int], KvTransfer] = {}

    # --- what the engine says ----------------------------------------------------------------

    def ran_first_layer(self, sequence: ActiveSequence, end: int, step_ends_s: float) -> None:
        """Of the context's tokens up to ``end``, whose step ends then."""
        transfer = self._transfer(sequence, end)
        if transfer is None or transfer.by_layer or end <= transfer.known_tokens:
            return  # it was preempted: what has left stands
        transfer.known_tokens, transfer.chunk_ends_s = end, step_ends_s
        self._send(transfer)

    def ran_layers(self, sequence: ActiveSequence, num_layers: int) -> None:
        """So many layers of the whole context have run, outside of steps."""
        is_new = sequence.key not in self.transfers
        transfer = self._transfer(sequence, sequence.num_tokens)
        if transfer is None:
            return
        transfer.by_layer = transfer.by_layer or is_new
        if transfer.by_layer and num_layers > transfer.layers_ready:
            transfer.layers_ready = num_layers
            self._send(transfer)

    def forget(self, sequences: Iterable[ActiveSequence]) -> None:
        """What becomes of these is decided elsewhere: nothing leaves from here any more."""
        for sequence in sequences:
            transfer = self._forget(sequence)
            if transfer is not None:
                self._release(transfer)

    def join(self, sequences: Iterable[ActiveSequence], there: Iterable[ActiveSequence], source: Departures) -> bool:
        """At a pair's target, of a batch that the source pulls: KV of its layers leaves here, that of the others from
        the source, whose own requests ``there`` are. False if one of them has no room where it is to be decoded:
        nothing leaves here then."""
        both = [(s, other) for s, other in zip(sequences, there, strict=True) if not (s.finished or other.finished)]
        transfers = [self.transfers.get(s.key) for s, _ in both]
        joined = [t for t in transfers if t is not None and not t.kept and t.reservation is not None]
        if len(joined) < len(both):
            self.forget([s for s, _ in both])
            return False
        for transfer, (_, other) in zip(joined, both, strict=True):
            source.take_rest(transfer, other)
        return True

    def take_rest(self, before: KvTransfer, sequence: ActiveSequence) -> None:
        """At the source: what ``before`` does not send leaves from here."""
        rest = KvTransfer(sequence, self, before.decoder, before.num_tokens, 0, before.pauses)
        rest.by_layer, rest.layers_ready, rest.layers_sent = True, before.layers_ready, before.layers_ready
        rest.before, before.rest, rest.reservation = before, rest, before.reservation
        if before.reservation is not None:
            before.reservation.transfer = rest
        self.transfers[sequence.key] = rest

    def sends(self, sequence: ActiveSequence) -> bool:
        """Its KV leaves, as far as is known."""
        transfer = self.transfers.get(sequence.key)
        return transfer is not None and not transfer.kept

    def step_ended(self, sequence: ActiveSequence) -> None:
        """All layers of the chunk that was computed have run."""
        transfer = self.transfers.get(sequence.key)
        if transfer is not None and transfer.flow is not None and transfer.flow.cap_gbps < math.inf:
            self._paths.network.limit(transfer.flow, math.inf)

    def computed(self, sequence: ActiveSequence) -> None:
        """It has its first token, and is held unless that was its end."""
        if sequence.finished:
            self.ended(sequence)
            return
        num_tokens = sequence.num_tokens - 1
        transfer = self._transfer(sequence, num_tokens, num_tokens)
        if transfer is None:
            self._forget(sequence)
            self._decode_here(sequence)
            return
        transfer.computed_at_s = self._clock.now_s
        transfer.layers_ready, transfer.known_tokens = self._instance.compute.num_layers, transfer.num_tokens
        self._send(transfer)
        self._begin_if_whole(transfer)

    def ended(self, sequence: ActiveSequence) -> None:
        """It has ended here, of itself or not."""
        transfer = self._forget(sequence)
        self._instance.scheduler.reservations.release_held(sequence)
        if transfer is not None:
            self._release(transfer)

    def lost(self, transfer: KvTransfer) -> None:
        """The decode instance has died: the request is decoded here, once that is noticed."""
        self._stop(transfer)
        transfer.reservation = None
        self._clock.after(self._paths.notice_s, self._keep_lost, transfer)

    def _keep_lost(self, transfer: KvTransfer) -> None:
        if not (transfer.over or transfer.kept):
            self._keep(transfer)

    def kill(self) -> list[str]:
        """This instance is gone, with all that was to leave it. Returns the requests that others have begun."""
        begun = [transfer.sequence.request_id for transfer in self.transfers.values() if transfer.begun]
        for transfer in list(self.transfers.values()):
            rest = transfer.rest
            self._forget(transfer.sequence)
            if transfer.reservation is not None and rest is None:
                self._clock.after(self._paths.notice_s, transfer.decoder.arrivals.abandon, transfer.reservation)
            if rest is not None and not (rest.over or rest.begun or rest.is_there):
                rest.departures.lost_before(rest)
        return begun

    def lost_before(self, rest: KvTransfer) -> None:
        """At a pair's source: the first layers do not come where they are to be decoded."""
        self._release(rest)
        self._keep(rest)

    # --- room --------------------------------------------------------------------------------

    def _transfer(self, sequence: ActiveSequence, end: int, num_tokens: int = 0) -> KvTransfer | None:
        """None if there is nothing to send. ``num_tokens``: of its context, if the sequence has its first token."""
        known = self.transfers.get(sequence.key)
        if known is not None:
            return None if known.kept else known
        place, num_tokens = sequence.decode_at, num_tokens or sequence.num_tokens
        decoder = None if place is None or sequence.finished else self._paths.find(place)
        if decoder is None:
            return None
        chunk_tokens = room.chunk_tokens(num_tokens, end, self._instance.scheduler.config.prefill_chunk_tokens)
        transfer = KvTransfer(sequence, self, decoder, num_tokens, chunk_tokens, room.pauses(self._random.uniform))
        self.transfers[sequence.key] = transfer
        self._ask(transfer)
        return transfer

    def _ask(self, transfer: KvTransfer) -> None:
        transfer.asking = None
        # Called there, at once.
        answered = functools.partial(self._tell, self._hear, transfer)
        self._tell(transfer.decoder.arrivals.reserve, transfer, answered)

    def _hear(self, transfer: KvTransfer, answer: Reservation | BlitzError) -> None:
        if transfer.over or transfer.kept:
            if isinstance(answer, Reservation):
                self._tell(transfer.decoder.arrivals.release, answer)
        elif isinstance(answer, Reservation):
            transfer.reservation = answer
            self._send(transfer)
        elif isinstance(answer, Overloaded) and room.is_asked_again(transfer.computed_at_s, self._clock.now_s):
            transfer.asking = self._clock.after(next(transfer.pauses), self._ask, transfer)
        else:
            self._keep(transfer)

    def _keep(self, transfer: KvTransfer) -> None:
        """Decode it here, once its prompt is computed."""
        self._stop(transfer)
        transfer.kept, transfer.reservation = True, None
        if transfer.computed_at_s is not None:
            sequence = transfer.sequence
            self._forget(sequence)
            self._instance.call(lambda: self._decode_here(sequence))

    def _decode_here(self, sequence: ActiveSequence) -> None:
        reservations = self._instance.scheduler.reservations
        if reservations.token_of(sequence) is None:
            reservations.decode_here(sequence)
        else:
            reservations.stay(sequence)  # until KV of its first layers is here

    def _release(self, transfer: KvTransfer) -> None:
        """Room is not needed. Who sends the rest decides on it."""
        if transfer.reservation is not None and transfer.rest is None:
            self._tell(transfer.decoder.arrivals.release, transfer.reservation)

    # --- bytes -------------------------------------------------------------------------------

    def _send(self, transfer: KvTransfer) -> None:
        if transfer.reservation is None or transfer.flow is not None:
            return
        if transfer.by_layer:
            self._send_layers(transfer)
        elif transfer.sent_tokens < transfer.known_tokens:
            self._send_tokens(transfer)

    def _send_layers(self, transfer: KvTransfer) -> None:
        layers = transfer.layers_ready - transfer.layers_sent
        if layers > 0:
            compute = self._instance.compute
            transfer.layers_sent = transfer.layers_ready
            all_sent = transfer.layers_sent == compute.num_layers
            self._start(
                transfer,
                transfer.num_tokens * compute.kv_bytes_per_token * layers / compute.num_layers,
                transfer.num_tokens if all_sent else 0,
            )

    def _send_tokens(self, transfer: KvTransfer) -> None:
        end = min(transfer.known_tokens, transfer.sent_tokens + (transfer.chunk_tokens or transfer.num_tokens))
        compute = self._instance.compute
        num_bytes = (end - transfer.sent_tokens) * compute.kv_bytes_per_token
        left_s = transfer.chunk_ends_s - self._clock.now_s if end == transfer.known_tokens else 0.0
        cap_gbps = math.inf
        if left_s > 0 and compute.num_layers > 1:
            cap_gbps = num_bytes * (compute.num_layers - 1) / compute.num_layers / left_s / BYTES_PER_GBIT
        self._start(transfer, num_bytes, end, cap_gbps)

    def _start(self, transfer: KvTransfer, num_bytes: float, end: int, cap_gbps: float = math.inf) -> None:
        """KV that brings all of the context's tokens up to ``end`` there, with what went before."""
        path = self._paths.path(self._instance, transfer.decoder)
        transfer.flow_tokens = end
        transfer.flow = self._paths.network.start(
            path, num_bytes, cap_gbps=cap_gbps, on_end=lambda _: self._arrived(transfer), purpose="kv"
        )

    def _arrived(self, transfer: KvTransfer) -> None:
        transfer.flow, transfer.sent_tokens = None, transfer.flow_tokens
        self._send(transfer)
        whole = transfer.rest or transfer
        if whole.is_there and whole.reservation is not None:
            whole.reservation.window.release()
        whole.departures._begin_if_whole(whole)

    def _begin_if_whole(self, transfer: KvTransfer) -> None:
        """The sender learns that all is there, and says what the first token is."""
        if transfer.computed_at_s is not None and transfer.is_there and not transfer.over:
            self._clock.after(2 * self._paths.message_s, self._begin, transfer)

    def _begin(self, transfer: KvTransfer) -> None:
        if not transfer.over and transfer.reservation is not None:
            transfer.decoder.arrivals.begin(transfer.reservation, lambda begun: self._tell(self._left, transfer, begun))

    def _left(self, transfer: KvTransfer, begun: bool) -> None:
        """The decode instance has it."""
        if transfer.over or not begun:  # nobody wants it any more
            return
        self._forget(transfer.sequence)
        self._instance.left(transfer.sequence)

    # --- the end -----------------------------------------------------------------------------

    def _forget(self, sequence: ActiveSequence) -> KvTransfer | None:
        transfer = self.transfers.pop(sequence.key, None)
        if transfer is not None:
            self._stop(transfer)
            transfer.over = True
        return transfer

    def _stop(self, transfer: KvTransfer) -> None:
        if transfer.flow is not None:
            self._paths.network.abort(transfer.flow)
            transfer.flow = None
        if transfer.asking is not None:
            self._clock.cancel(transfer.asking)
            transfer.asking = None

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        """A message later."""
        self._clock.after(self._paths.message_s, function, *arguments)
