"""The decode side of disaggregated serving: requests get reservations, their KV comes in, they are decoded here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

from services.worker.core.kv_admission import room
from services.worker.core.kv_admission.staging import Window
from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.connector import KvConnector
from services.worker.kv_transfer.incoming import IncomingKv
from services.worker.kv_transfer.reservation import DecodeReservation
from services.worker.kv_transfer.transfer import Chunk
from services.worker.requests.inbox import Cooperation, Inbox
from services.worker.weights.peers import PeerChannels
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus, Subscription
from shared.errors import BadRequest, BlitzError, Conflict, Overloaded
from shared.messages.common import DECODES_FOR_OTHERS, Ack
from shared.messages.disaggregated import (
    BeginDecode,
    DecodeReserved,
    DecodeRoom,
    ReleaseDecode,
    RenewDecode,
    ReserveDecode,
)
from shared.messages.generation import Cancel, Submit
from shared.messages.registry import WorkerInfo

log = logging.getLogger(__name__)

MAX_WAIT_S = 0.5
"""How long a question waits here for KV before it is to be asked again."""
MAX_LEASE_S = 3600.0
MAX_BEGUN = 4096
ENGINE_WAIT_S = 2.0
"""Longer than any step but one that is stuck."""

Key = tuple[str, int]
"""(request id, attempt)."""


class _Begun(NamedTuple):
    """A request that was taken over: when (monotonic), and from which worker."""

    at_s: float
    by: str


class KvReceiver(Cooperation):
    """Event loop only. What is said about one request is done in the order in which it was said."""

    def __init__(
        self,
        bus: Bus,
        connector: KvConnector,
        me: WorkerInfo,
        peers: PeerChannels,
        inbox: Inbox,
        instance: Callable[[], Instance | None],
    ) -> None:
        self._bus = bus
        self._connector = connector
        self._me = me
        self._peers = peers
        self._inbox = inbox
        self._instance = instance
        self.reservations: dict[Key, DecodeReservation] = {}
        """Changed here alone."""
        self._begun: OrderedDict[Key, _Begun] = OrderedDict()
        """Those that are, or were, decoded here: the answer may have been lost."""
        self._tickets = itertools.count()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By request id."""
        self._drops = OwnedTasks()

    async def subscribe(self) -> list[Subscription]:
        """Listen; the caller closes what is returned."""
        bus, me = self._bus, self._me.process
        return [
            await bus.respond(subjects.worker_decode(me, "reserve"), ReserveDecode, self.on_reserve),
            await bus.respond(subjects.worker_decode(me, "renew"), RenewDecode, self.on_renew),
            await bus.respond(subjects.worker_decode(me, "begin"), BeginDecode, self.on_begin),
            await bus.respond(subjects.worker_decode(me, "release"), ReleaseDecode, self.on_release),
        ]

    # --- reservations ------------------------------------------------------------------------

    async def on_reserve(self, message: ReserveDecode) -> DecodeReserved:
        """Keep a slot and blocks. Raises ``Conflict`` (not this instance, not serving, a newer attempt is here),
        ``Overloaded`` (no capacity now), ``BadRequest`` (there will never be)."""
        request = message.request
        async with self._lock(request.request_id):
            reservation = self.reservations.get((request.request_id, request.attempt))
            if message.first_layer:
                kv = await self._join(reservation, message)
            elif reservation is not None and reservation.kv[0].message.worker_id == message.worker_id:
                kv = reservation.kv[0]
            else:
                if reservation is not None:  # another instance computes it from the beginning
                    await self._drop(self.reservations.pop(reservation.sequence.key))
                kv = await self._reserve(message)
        return DecodeReserved(
            ticket=kv.ticket,
            host=self._me.host,
            transport_address=self._me.transport_address,
            window_layers=kv.window_layers,
            held_tokens=kv.held_tokens,
        )

    async def _join(self, reservation: DecodeReservation | None, message: ReserveDecode) -> IncomingKv:
        """The source of a pair runs the layers from ``first_layer`` on, which the target has not run."""
        request, layer = message.request, message.first_layer
        if reservation is None:
            raise Conflict(f"there is no reservation for attempt {request.attempt} of request {request.request_id}")
        before, kv = reservation.kv[0], reservation.kv[-1]
        if kv.message.worker_id == message.worker_id and kv.first_layer == layer:
            return kv
        refusal = Conflict(f"nobody can go on from layer {layer} of request {request.request_id}")
        if kv is not before or layer not in before.can_end_before or message.chunk_tokens:
            raise refusal
        instance = reservation.instance
        held = before.held_tokens
        window = self._window(before.num_tokens - held, instance, before.last_layer - layer)
        kv = IncomingKv(
            *(message, reservation.sequence, instance, next(self._tickets), window), held_tokens=held, behind=before
        )
        try:
            await kv.connect(self._connector, self._peers)
        except BlitzError as error:
            await kv.stop()
            raise Conflict(f"the KV cannot come: {error}") from error
        if layer not in before.can_end_before:  # more has come from the first one in the meantime
            await kv.stop()
            raise refusal
        before.end_before(layer)
        reservation.kv.append(kv)
        reservation.renewed_at_s = time.monotonic()
        self._receive(reservation, kv)
        return kv

    def _window(self, num_tokens: int, instance: Instance, num_layers: int) -> Window:
        layer_bytes = num_tokens * instance.layered.loop.engine.kv_bytes_per_token_layer
        window = self._connector.reserve(layer_bytes, num_layers)
        if window is None:
            raise Overloaded(f"{self._connector.used_bytes} bytes of KV are on their way here already")
        return window

    def _receive(self, reservation: DecodeReservation, kv: IncomingKv) -> None:
        key = reservation.sequence.key
        kv.receive(failed=lambda: self._drops.start(self._failed(key, reservation)))

    async def _reserve(self, message: ReserveDecode) -> IncomingKv:
        request, instance = message.request, self._instance()
        key = (request.request_id, request.attempt)
        if instance is None or not self._inbox.admitting:
            raise Conflict(f"worker {self._me.worker_id} has no instance that takes requests")
        instance.check_admits(request.instance_id)
        if key in self._begun or self._inbox.new_owners.owner_of(key) is not None:
            raise Conflict(f"attempt {request.attempt} of request {request.request_id} was decoded here already")
        if self._inbox.streams.attempt_of(request.request_id) == request.attempt:
            # Giving the reservation up would take its stream from the request that has it.
            raise Conflict(f"attempt {request.attempt} of request {request.request_id} is here already")
        if not 0 < message.lease_s <= MAX_LEASE_S:
            raise BadRequest(f"lease_s {message.lease_s!r} is not a time", param="lease_s")
        if message.chunk_tokens < 0:
            raise BadRequest(f"chunks of {message.chunk_tokens} tokens", param="chunk_tokens")
        sequence = instance.sequence_of(request)
        sequence.decode_at = None
        room.check_fits(sequence.num_tokens, message.context_tokens, instance.scheduler.limit_tokens)
        await self._give_up_older(request, instance)
        held = await self._take_blocks(sequence, instance)
        missing = sequence.num_tokens - held
        try:
            window = self._window(min(missing, message.chunk_tokens or missing), instance, instance.layout.num_layers)
        except Overloaded:
            await self._until_freed(_release(sequence, instance))
            raise
        kv = IncomingKv(message, sequence, instance, next(self._tickets), window, held_tokens=held)
        reservation = DecodeReservation(sequence, instance, kv)
        self._inbox.host((request,))
        try:
            await kv.connect(self._connector, self._peers)
            if self._instance() is not instance or instance.state not in ("serving", "draining"):
                raise Conflict(f"instance {request.instance_id} is about to stop")
        except BlitzError as error:
            await self._drop(reservation)
            raise Conflict(f"the KV cannot come: {error}") from error
        self.reservations[key] = reservation
        instance.began(DECODES_FOR_OTHERS)
        self._receive(reservation, kv)
        return kv

    @staticmethod
    async def _take_blocks(sequence: ActiveSequence, instance: Instance) -> int:
        """A slot, and blocks for its context: so many tokens of it have their KV here. Raises ``Overloaded``."""

        def reserve(loop: EngineLoop) -> int | None:
            reservations = loop.scheduler.reservations
            if not reservations.reserve([sequence], behind_waiting=True, remembered=True):
                return None
            return sequence.num_remembered * loop.scheduler.pool.block_size

        held = await asyncio.wrap_future(instance.layered.call(reserve))
        if held is None:
            raise Overloaded(f"no capacity for {sequence.num_tokens} tokens of KV now")
        return held

    async def _give_up_older(self, request: Submit, instance: Instance) -> None:
        """Earlier attempts at a request, whose prefill instance may be dead. Raises ``Conflict`` for a newer one."""
        self._inbox.supersede(request, instance)
        for key in [k for k in self.reservations if k[0] == request.request_id]:
            await self._drop(self.reservations.pop(key))

    async def on_renew(self, message: RenewDecode) -> DecodeRoom:
        """Keep a reservation for longer; expect a chunk; wait a moment for so many layers. Raises ``Conflict`` if there
        is none, ``BadRequest`` for a chunk that cannot be."""
        reservation = self.reservations.get((message.request_id, message.attempt))
        kv = None if reservation is None else reservation.under(message.ticket)
        if reservation is None or kv is None:
            raise Conflict(f"there is no reservation for attempt {message.attempt} of request {message.request_id}")
        reservation.renewed_at_s = time.monotonic()
        chunk = Chunk(message.chunk_start, message.chunk_end)
        if message.more_token_ids:
            await self._grow(reservation, kv, chunk, message.more_token_ids)
        if message.chunk_end:
            kv.expect(chunk)
        await kv.until_here(message.wait_layers, MAX_WAIT_S)
        return DecodeRoom(layers_here=kv.layers_here)

    async def _grow(
        self, reservation: DecodeReservation, kv: IncomingKv, chunk: Chunk, token_ids: tuple[int, ...]
    ) -> None:
        """The request was decoded where it comes from while its KV came, and ``chunk`` is what it has grown by. Raises
        ``Conflict``, ``Overloaded``, ``BadRequest`` for tokens that cannot be."""
        sequence, instance = reservation.sequence, reservation.instance
        async with self._lock(sequence.request_id):
            if self.reservations.get(sequence.key) is not reservation:
                raise Conflict(
                    f"attempt {sequence.attempt} of request {sequence.request_id} has no reservation any more"
                )
            if kv.expects(chunk):
                return  # it is said again
            start, end = kv.num_tokens, kv.num_tokens + len(token_ids)
            most = min(kv.message.chunk_tokens, instance.scheduler.limit_tokens - 1 - start)
            if chunk != (start, end) or len(token_ids) > most:
                raise BadRequest(f"{len(token_ids)} tokens more than {start} make no chunk {chunk}", param="chunk_end")
            for token_id in token_ids:
                instance.check_token(token_id)
            await kv.make_room(len(token_ids))
            extended = False
            try:
                extend = instance.layered.call(lambda loop: loop.scheduler.reservations.extend(sequence, token_ids))
                extended = await asyncio.wrap_future(extend)
            finally:
                if not extended:
                    kv.give_room_back()
            if not extended:
                raise Overloaded(f"no capacity for {end} tokens of KV now")
            self._inbox.follow(sequence, token_ids)
            kv.grow(len(token_ids), failed=lambda: self._drops.start(self._failed(sequence.key, reservation)))

    # --- decoding ----------------------------------------------------------------------------

    async def on_begin(self, message: BeginDecode) -> Ack:
        """The request is decoded here from now on. Raises ``Conflict`` if it has no reservation, or its KV is not here,
        and ``BadRequest`` for a token that the model lacks."""
        key = (message.request_id, message.attempt)
        async with self._lock(message.request_id):
            reservation = self.reservations.get(key)
            if reservation is not None:
                if not reservation.is_whole:
                    raise Conflict(f"only {reservation.layers_here} layers of its KV are here")
                reservation.instance.check_token(message.token_id)
                await self._begin(reservation, message)
            elif key not in self._begun:
                raise Conflict(f"there is no reservation for attempt {message.attempt} of request {message.request_id}")
        return Ack()

    def begun_at_s(self, key: Key) -> float | None:
        """When (monotonic) a request was taken over; None if it was not, or that is not remembered."""
        begun = self._begun.get(key)
        return None if begun is None else begun.at_s

    async def _begin(self, reservation: DecodeReservation, message: BeginDecode) -> None:
        sequence = reservation.sequence
        token = Sampled(message.token_id, message.logprobs)
        self._inbox.spans.open(reservation.message.request, "worker.decode")

        def adopt(loop: EngineLoop) -> None:
            output = loop.scheduler.reservations.adopt(sequence, token, time.monotonic(), computed_here=False)
            # Said on this thread, for the next step's tokens come after it. The gateway has the token already, most
            # likely; here it is kept in case it asks.
            if output is not None:
                self._inbox.on_output(StepOutput((output,)))
            if not sequence.finished:
                self._inbox.announce([sequence])

        try:
            await asyncio.wrap_future(reservation.instance.layered.call(adopt))
        except BlitzError as error:
            self._inbox.spans.refused(sequence.key, error)
            raise
        self._begun[sequence.key] = _Begun(time.monotonic(), reservation.message.worker_id)
        if len(self._begun) > MAX_BEGUN:
            self._begun.popitem(last=False)
        self.reservations.pop(sequence.key, None)
        reservation.unpin()

    # --- the end -----------------------------------------------------------------------------

    async def on_release(self, message: ReleaseDecode) -> Ack:
        """The request ends, or is decoded elsewhere. Its slot and blocks are free when this is answered."""
        key = (message.request_id, message.attempt)
        async with self._lock(message.request_id):
            reservation = self.reservations.get(key)
            whose = (
                (self._begun[key].by if key in self._begun else "")
                if reservation is None
                else reservation.message.worker_id
            )
            if message.worker_id not in ("", whose):
                return Ack()  # another sender has taken it over
            if reservation is not None:
                await self._drop(self.reservations.pop(key))
            elif key in self._begun:
                # The other side has not heard that it is decoded here.
                self._inbox.on_cancel(Cancel(request_id=message.request_id, attempt=message.attempt))
        return Ack()

    def cancel(self, request_id: str, attempt: int) -> None:
        """The client of a request has left."""
        self._let_go([(request_id, attempt)])

    def cancel_gateway(self, gone: Gone) -> None:
        """So have those of all requests of these gateways."""
        theirs = ((key, reservation.sequence) for key, reservation in self.reservations.items())
        self._let_go(key for key, s in theirs if gone.had(s.gateway_id, s.gateway_incarnation))

    def expire(self) -> None:
        """Drop reservations that were not renewed. Silence counts only while our own connection has been up."""
        connected_since_s = self._bus.connected_since_s
        if connected_since_s is None:
            return
        now_s = time.monotonic()

        def has_lapsed(reservation: DecodeReservation) -> bool:
            return now_s - max(reservation.renewed_at_s, connected_since_s) > reservation.message.lease_s

        late = [key for key, reservation in self.reservations.items() if has_lapsed(reservation)]
        if late:
            log.warning(
                "nothing was heard of %d reservations for their leases: they are freed",
                len(late),
            )
        self._let_go(late)

    def _let_go(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            if (reservation := self.reservations.get(key)) is not None:
                self._drops.start(self._failed(key, reservation))

    async def _failed(self, key: Key, reservation: DecodeReservation) -> None:
        async with self._lock(key[0]):
            if self.reservations.get(key) is reservation:
                del self.reservations[key]
                await self._drop(reservation)

    async def _drop(self, reservation: DecodeReservation) -> None:
        """Free what a reservation keeps that is not in ``reservations`` any more."""
        await reservation.stop()  # nothing is written into its blocks any more
        self._inbox.unhost([reservation.sequence])
        freed = _release(reservation.sequence, reservation.instance)
        reservation.unpin()
        await self._until_freed(freed)

    @staticmethod
    async def _until_freed(freed: asyncio.Future[None]) -> None:
        await asyncio.wait({freed}, timeout=ENGINE_WAIT_S)
        if freed.done() and (error := freed.exception()) is not None:
            log.debug("the engine freed it: %s", error)

    async def instance_gone(self, instance: Instance, _reason: str) -> None:
        """The instance's engine is about to stop, and its memory to be another model's."""
        gone = [row for row in self.reservations.items() if row[1].instance is instance]
        await asyncio.gather(*(self._failed(*row) for row in gone))

    async def close(self) -> None:
        """Drop all reservations."""
        await asyncio.gather(*(self._failed(*row) for row in list(self.reservations.items())))
        await self._drops.finish()

    def _lock(self, request_id: str) -> asyncio.Lock:
        return self._locks.setdefault(request_id, asyncio.Lock())


def _release(sequence: ActiveSequence, instance: Instance) -> asyncio.Future[None]:
    """Give its slot and blocks back."""
    return asyncio.wrap_future(instance.layered.call(lambda loop: loop.scheduler.reservations.release([sequence])))
