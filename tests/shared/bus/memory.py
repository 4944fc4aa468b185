"""The bus inside one event loop, for tests: the contract of ``shared.bus.base`` without a server.

Messages are encoded and decoded, as they would be on the wire. ``MemoryBroker`` is the server;
``disconnect`` and ``reconnect`` play an outage of it, or of one process's connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from opentelemetry import context as otel_context

from shared.bus.base import Bus, EventListener, EventMaker, Listener, M, R, Responder, Stored, Subscription
from shared.bus.departures import Departure, DepartureListener
from shared.bus.wire import (
    Headers,
    MalformedLog,
    answer,
    check_size,
    enter_sender_context,
    error_headers,
    leave_sender_context,
    reply_of,
    trace_headers,
)
from shared.errors import DeadlineExceeded, NoResponder, PayloadTooLarge, Unavailable
from shared.messages.codec import MalformedMessage, Message, decode, encode

_log = logging.getLogger(__name__)

DEFAULT_MAX_PAYLOAD_BYTES = 1 << 20
DEFAULT_BUFFER_BYTES = 2 << 20
EVENT_TIMEOUT_S = 5.0

Reply = Callable[[bytes, "Headers | None"], None]


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
        self.cluster = ""
        self.listeners: list[MemoryListening[Message]] = []
        self.responders: list[MemoryResponding[Message, Message]] = []
        self.readers: set[MemoryReading[Message]] = set()
        self.departure_watchers: list[MemoryDepartures] = []
        self._buses: list[MemoryBus] = []
        self._event_ids: dict[str, str] = {}

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
        """Hand a request to all who answer such; False if there are none."""
        able = [one for one in self.responders if one.bus.is_up and matches(one.subject, subject)]
        for one in able:
            one.receive(payload, headers, reply)
        return bool(able)

    def append_raw(self, subject: str, payload: bytes, headers: Headers | None, message_id: str) -> None:
        """Append an event once per id."""
        # By stream, as a server does it: the same id on another subject is no other event.
        if message_id and message_id in self._event_ids:
            return
        self._event_ids[message_id] = subject
        self.events.append(MemoryEvent(subject, payload, headers, time.monotonic()))
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
        self.broker.listeners.append(subscription)
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

    async def respond(self, subject: str, kind: type[M], responder: Responder[M, R]) -> Subscription:
        self._check_open()
        subscription = MemoryResponding(self, subject, kind, responder)
        self.broker.responders.append(subscription)
        self._subscriptions.add(subscription)
        return subscription

    async def publish_event(self, subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        self._check_open()
        try:
            async with asyncio.timeout(self.broker.event_timeout_s):
                await self._up.wait()
        except TimeoutError as error:
            raise Unavailable(f"the plan stream took no event on {subject}: the bus is disconnected") from error
        self._check_open()
        payload, headers = self._encoded(subject, message() if callable(message) else message)
        self.broker.append_raw(subject, payload, headers, message_id)

    async def past_events(self, subject: str, kind: type[M], *, limit: int) -> tuple[Stored[M], ...]:
        self._check_open()
        if self.connected_since_s is None:
            raise Unavailable(f"the events on {subject} cannot be read: the bus is disconnected")
        found = []
        for event in [e for e in self.broker.events if matches(subject, e.subject)][-limit:]:
            try:
                found.append(Stored(decode(event.payload, kind), event.at_s))
            except MalformedMessage as error:
                self.malformed.record(kind, event.subject, error)
        return tuple(found)

    async def subscribe_events(self, subject: str, kind: type[M], listener: EventListener[M]) -> Subscription:
        self._check_open()
        subscription = MemoryReading(self, subject, kind, listener)
        self.broker.readers.add(subscription)
        self._subscriptions.add(subscription)
        return subscription

    async def cluster_name(self, claim: str = "") -> str:
        self._check_open()
        if self.connected_since_s is None:
            raise Unavailable("the cluster's name cannot be read: the bus is disconnected")
        self.broker.cluster = self.broker.cluster or claim
        return self.broker.cluster

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


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject fits a NATS pattern: ``*`` is any one token, a last ``>`` one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(given) >= len(wanted) and _same(wanted[:-1], given)
    return len(given) == len(wanted) and _same(wanted, given)


def _same(wanted: list[str], given: list[str]) -> bool:
    return all(want in ("*", got) for want, got in zip(wanted, given, strict=False))


@dataclass(frozen=True)
class MemoryEvent:
    """One entry of the plan stream."""

    subject: str
    payload: bytes
    headers: Headers | None
    at_s: float


class MemoryDepartures:
    """Hears of connections that end."""

    def __init__(self, bus: MemoryBus, listener: DepartureListener) -> None:
        self.bus = bus
        self._listener = listener
        self._open = True

    def receive(self, departure: Departure) -> None:
        if self._open:
            self._listener(departure)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self.bus.broker.departure_watchers.remove(self)
            self.bus.forget(self)


class MemoryListening(Generic[M]):
    """A plain subscription: decode and call at the loop's next turn."""

    def __init__(self, bus: MemoryBus, subject: str, kind: type[M], listener: Listener[M]) -> None:
        self.bus = bus
        self.subject = subject
        self._kind = kind
        self._listener = listener
        self._open = True

    def receive(self, subject: str, payload: bytes, headers: Headers | None) -> None:
        if not self._open:
            return
        try:
            message = decode(payload, self._kind)
        except MalformedMessage as error:
            self.bus.malformed.record(self._kind, subject, error)
            return
        clean = otel_context.attach(otel_context.Context())
        token = enter_sender_context(headers)
        try:
            self._listener(message)
        except Exception:  # noqa: BLE001 - a listener must not raise; one that does loses this message only
            _log.exception("the listener of %s failed", subject)
        finally:
            leave_sender_context(token)
            otel_context.detach(clean)

    async def close(self) -> None:
        await asyncio.sleep(0)  # what was published before is on its way
        self._open = False
        if self in self.bus.broker.listeners:
            self.bus.broker.listeners.remove(self)
        self.bus.forget(self)


class MemoryResponding(Generic[M, R]):
    """A responder: a task per request."""

    def __init__(self, bus: MemoryBus, subject: str, kind: type[M], responder: Responder[M, R]) -> None:
        self.bus = bus
        self.subject = subject
        self._kind = kind
        self.responder = responder
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, payload: bytes, headers: Headers | None, reply: Reply) -> None:
        clean = otel_context.attach(otel_context.Context())
        task = asyncio.create_task(self._respond(payload, headers, reply))
        otel_context.detach(clean)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, payload: bytes, headers: Headers | None, reply: Reply) -> None:
        answer_payload, answer_headers = await answer(
            payload, headers, self._kind, self.responder, self.bus.malformed, self.subject
        )
        try:
            check_size(f"the reply on {self.subject}", answer_payload, answer_headers, self.bus.max_payload_bytes)
        except PayloadTooLarge as error:
            answer_payload, answer_headers = b"", error_headers(error)
        try:
            self.bus.send(len(answer_payload), lambda: reply(answer_payload, answer_headers))
        except Unavailable as error:
            _log.warning("could not send a reply on %s: %s", self.subject, error)

    def cancel_answers(self) -> None:
        """Whoever waits for an answer gets none."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        if self in self.bus.broker.responders:
            self.bus.broker.responders.remove(self)
        self.bus.forget(self)
        if self._tasks:
            await asyncio.wait(self._tasks)


class MemoryReading(Generic[M]):
    """Reads the broker's events from the end that they had when it was made."""

    def __init__(self, bus: MemoryBus, subject: str, kind: type[M], listener: EventListener[M]) -> None:
        self.bus = bus
        self.subject = subject
        self._kind = kind
        self._listener = listener
        self._next = len(bus.broker.events)
        self._awake = asyncio.Event()
        self._open = True
        clean = otel_context.attach(otel_context.Context())
        self._task = asyncio.create_task(self._read())
        otel_context.detach(clean)

    def wake(self) -> None:
        self._awake.set()

    async def _read(self) -> None:
        while self._open:
            await self._awake.wait()
            self._awake.clear()
            while self._open and self.bus.is_up and self._next < len(self.bus.broker.events):
                event = self.bus.broker.events[self._next]
                self._next += 1
                if matches(self.subject, event.subject):
                    await self._handle(event)

    async def _handle(self, event: MemoryEvent) -> None:
        try:
            message = decode(event.payload, self._kind)
        except MalformedMessage as error:
            self.bus.malformed.record(self._kind, event.subject, error)
            return
        token = enter_sender_context(event.headers)
        try:
            await self._listener(Stored(message, event.at_s))
        except Exception:  # noqa: BLE001 - counts as handled: an event that fails once would fail for ever
            _log.exception("the listener of %s failed", event.subject)
        finally:
            leave_sender_context(token)

    async def close(self) -> None:
        self._open = False
        self.wake()
        self.bus.broker.readers.discard(self)
        self.bus.forget(self)
        await asyncio.wait([self._task])
