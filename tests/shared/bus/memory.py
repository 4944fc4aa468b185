"""The bus inside one event loop, for tests: the contract of ``shared.bus.base`` without a server.

Messages are encoded and decoded, as they would be on the wire. ``MemoryBroker`` is the server;
``disconnect`` and ``reconnect`` play an outage of it, or of one process's connection.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

from shared.bus.base import AsyncListener, Bus, Listener, M, R, Responder, Subscription
from shared.bus.departures import Departure, DepartureListener
from shared.bus.wire import Headers, MalformedLog, check_size, reply_of, trace_headers
from shared.errors import DeadlineExceeded, NoResponder, Unavailable
from shared.messages.codec import MalformedMessage, Message, decode, encode
from tests.shared.bus.memory_subscriptions import (
    MemoryDepartures,
    MemoryEvent,
    MemoryListening,
    MemoryReading,
    MemoryResponding,
    Reply,
    matches,
)

DEFAULT_MAX_PAYLOAD_BYTES = 1 << 20
DEFAULT_BUFFER_BYTES = 2 << 20
EVENT_TIMEOUT_S = 5.0


class MemoryBroker:
    """What the buses of one test share."""

    def __init__(
        self,
        *,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        event_timeout_s: float = EVENT_TIMEOUT_S,
    ) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.buffer_bytes = buffer_bytes
        self.event_timeout_s = event_timeout_s
        self.events: list[MemoryEvent] = []
        self.listeners: list[MemoryListening[Message]] = []
        self.responders: list[MemoryResponding[Message, Message]] = []
        self.readers: set[MemoryReading[Message]] = set()
        self.departure_watchers: list[MemoryDepartures] = []
        self._buses: list[MemoryBus] = []
        self._event_ids: dict[str, str] = {}
        self._turn = itertools.count()

    def bus(self, name: str) -> MemoryBus:
        """A new connection."""
        bus = MemoryBus(self, name)
        self._buses.append(bus)
        return bus

    def disconnect(self, name: str | None = None) -> None:
        """Cut every bus off, or the one of that name."""
        for bus in self._buses:
            if name in (None, bus.name):
                bus.go_down()

    def reconnect(self, name: str | None = None) -> None:
        """Connect again: what was buffered is sent, events resume."""
        for bus in self._buses:
            if name in (None, bus.name):
                bus.go_up()

    def lose(self, name: str, reason: str) -> None:
        """End the connection of the buses of that name for good."""
        for bus in self._buses:
            if bus.name == name:
                bus.lose(reason)

    def depart(self, departure: Departure) -> None:
        """Tell, as a server does, that a connection is gone."""
        loop = asyncio.get_running_loop()
        for watcher in self.departure_watchers:
            if watcher.bus.is_up:
                loop.call_soon(watcher.receive, departure)

    def publish_raw(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        """Any bytes, as a foreign client would send them."""
        loop = asyncio.get_running_loop()
        for listener in self.listeners:
            if listener.bus.is_up and matches(listener.subject, subject):
                loop.call_soon(listener.receive, subject, payload, headers)

    def request_raw(self, subject: str, payload: bytes, headers: Headers | None, reply: Reply) -> bool:
        """Hand a request to one of those that share them, in turn, and to all that do not; False if there are none."""
        able = [one for one in self.responders if one.bus.is_up and matches(one.subject, subject)]
        sharing = [one for one in able if one.shared]
        chosen = [one for one in able if not one.shared]
        if sharing:
            chosen.append(sharing[next(self._turn) % len(sharing)])
        for one in chosen:
            one.receive(payload, headers, reply)
        return bool(chosen)

    def append_raw(self, subject: str, payload: bytes, headers: Headers | None, message_id: str) -> None:
        """Append an event once per id."""
        # By stream, as a server does it: the same id on another subject is no other event.
        if message_id and message_id in self._event_ids:
            return
        self._event_ids[message_id] = subject
        self.events.append(MemoryEvent(subject, payload, headers))
        for reader in self.readers:
            reader.wake()

    def forget_events(self, subject: str) -> None:
        """As if nothing had ever been appended there."""
        self.events = [event for event in self.events if event.subject != subject]
        self._event_ids = {i: known for i, known in self._event_ids.items() if known != subject}


class MemoryBus(Bus):
    """One process's connection to a ``MemoryBroker``."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.name = name
        self.broker = broker
        self.malformed = MalformedLog()
        self._subscriptions: set[Subscription] = set()
        self._outgoing: deque[Callable[[], object]] = deque()
        self._outgoing_bytes = 0
        self._up = asyncio.Event()
        self._connected_since_s: float | None = None
        self._closed = False
        self._lost: asyncio.Future[str] | None = None
        self.go_up()

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    @property
    def connected_since_s(self) -> float | None:
        return self._connected_since_s

    @property
    def is_up(self) -> bool:
        """Whether the broker sees this bus."""
        return self._connected_since_s is not None

    def go_down(self) -> None:
        """The connection is lost."""
        self._connected_since_s = None
        self._up.clear()

    def go_up(self) -> None:
        """The connection is there: send what was buffered."""
        if self._closed or self.is_up:
            return
        self._connected_since_s = time.monotonic()
        self._up.set()
        self._outgoing_bytes = 0
        while self._outgoing:
            self._outgoing.popleft()()
        for subscription in self._subscriptions:
            if isinstance(subscription, MemoryReading):
                subscription.wake()

    def lose(self, reason: str) -> None:
        """The connection is gone, and will not come back."""
        self.go_down()
        self._closed = True
        self._up.set()
        self._lost_future().set_result(reason)

    def send(self, size_bytes: int, deliver: Callable[[], object]) -> None:
        """Do it now, or on reconnecting. Raises ``Unavailable`` when the buffer is full, or after ``close``."""
        if self._closed:
            raise Unavailable("the bus is closed")
        if self.is_up:
            deliver()
            return
        if self._outgoing_bytes + size_bytes > self.broker.buffer_bytes:
            raise Unavailable("the bus is disconnected and the outgoing buffer is full")
        self._outgoing_bytes += size_bytes
        self._outgoing.append(deliver)

    async def publish(self, subject: str, message: Message, *, buffer: bool = True) -> None:
        payload, headers = self._encoded(subject, message)
        if not buffer and not self.is_up:
            raise Unavailable(f"the bus is disconnected (publishing {subject})")
        self.send(len(payload), lambda: self.broker.publish_raw(subject, payload, headers))

    async def flush(self) -> None:
        """The broker has it already, or the bus is down."""

    async def subscribe(self, subject: str, kind: type[M], listener: Listener[M]) -> Subscription:
        self._check_open()
        subscription = MemoryListening(self, subject, kind, listener)
        self.broker.listeners.append(subscription)  # type: ignore[arg-type]
        self._subscriptions.add(subscription)
        return subscription

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        payload, headers = self._encoded(subject, message)
        answered: asyncio.Future[tuple[bytes, Headers | None]] = asyncio.get_running_loop().create_future()

        def on_reply(reply_payload: bytes, reply_headers: Headers | None) -> None:
            if self.is_up and not answered.done():
                answered.set_result((reply_payload, reply_headers))

        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
                self._check_open()
                if not self.broker.request_raw(subject, payload, headers, on_reply):
                    raise NoResponder(f"nobody listens on {subject}")
                reply_payload, reply_headers = await answered
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:g} s") from error
        return reply_of(reply_payload, reply_headers, reply)

    async def respond(
        self, subject: str, kind: type[M], responder: Responder[M, R], *, shared: bool = True
    ) -> Subscription:
        self._check_open()
        subscription = MemoryResponding(self, subject, kind, responder, shared=shared)
        self.broker.responders.append(subscription)  # type: ignore[arg-type]
        self._subscriptions.add(subscription)
        return subscription

    async def publish_event(self, subject: str, message: Message, *, message_id: str) -> None:
        payload, headers = self._encoded(subject, message)
        self._check_open()
        try:
            async with asyncio.timeout(self.broker.event_timeout_s):
                await self._up.wait()
        except TimeoutError as error:
            raise Unavailable(f"the plan stream took no event on {subject}: the bus is disconnected") from error
        self._check_open()
        self.broker.append_raw(subject, payload, headers, message_id)

    async def past_events(self, subject: str, kind: type[M], *, limit: int) -> tuple[M, ...]:
        self._check_open()
        if self.connected_since_s is None:
            raise Unavailable(f"the events on {subject} cannot be read: the bus is disconnected")
        found = []
        for event in [e for e in self.broker.events if matches(subject, e.subject)][-limit:]:
            try:
                found.append(decode(event.payload, kind))
            except MalformedMessage as error:
                self.malformed.record(kind, event.subject, error)
        return tuple(found)

    async def subscribe_events(self, subject: str, kind: type[M], listener: AsyncListener[M]) -> Subscription:
        self._check_open()
        subscription = MemoryReading(self, subject, kind, listener)
        self.broker.readers.add(subscription)  # type: ignore[arg-type]
        self._subscriptions.add(subscription)
        return subscription

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost_future())

    async def watch_departures(self, listener: DepartureListener) -> Subscription:
        self._check_open()
        subscription = MemoryDepartures(self, listener)
        self.broker.departure_watchers.append(subscription)
        self._subscriptions.add(subscription)
        return subscription

    async def close(self) -> None:
        for subscription in list(self._subscriptions):
            await subscription.close()
        self._closed = True
        self.go_down()

    def forget(self, subscription: Subscription) -> None:
        """A subscription was closed."""
        self._subscriptions.discard(subscription)

    def _lost_future(self) -> asyncio.Future[str]:
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return self._lost

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the bus is closed")

    def _encoded(self, subject: str, message: Message) -> tuple[bytes, Headers | None]:
        payload, headers = encode(message), trace_headers()
        check_size(subject, payload, headers, self.broker.max_payload_bytes)
        if self._closed:
            raise Unavailable("the bus is closed")
        return payload, headers
