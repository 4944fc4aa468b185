"""The subscriptions of the memory bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from opentelemetry import context as otel_context

from shared.bus.answer import answer
from shared.bus.base import AsyncListener, Listener, M, R, Responder
from shared.bus.departures import Departure, DepartureListener
from shared.bus.wire import Headers, check_size, enter_sender_context, error_headers, leave_sender_context
from shared.errors import PayloadTooLarge, Unavailable
from shared.messages.codec import MalformedMessage, decode

if TYPE_CHECKING:
    from tests.shared.bus.memory import MemoryBus

_log = logging.getLogger(__name__)

Reply = Callable[[bytes, "Headers | None"], None]


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
            self.bus.broker.listeners.remove(self)  # type: ignore[arg-type]
        self.bus.forget(self)


class MemoryResponding(Generic[M, R]):
    """A responder: a task per request."""

    def __init__(
        self, bus: MemoryBus, subject: str, kind: type[M], responder: Responder[M, R], *, shared: bool
    ) -> None:
        self.bus = bus
        self.subject = subject
        self.shared = shared
        self._kind = kind
        self._responder = responder
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, payload: bytes, headers: Headers | None, reply: Reply) -> None:
        clean = otel_context.attach(otel_context.Context())
        task = asyncio.create_task(self._respond(payload, headers, reply))
        otel_context.detach(clean)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, payload: bytes, headers: Headers | None, reply: Reply) -> None:
        answer_payload, answer_headers = await answer(
            payload, headers, self._kind, self._responder, self.bus.malformed, self.subject
        )
        try:
            check_size(f"the reply on {self.subject}", answer_payload, answer_headers, self.bus.max_payload_bytes)
        except PayloadTooLarge as error:
            answer_payload, answer_headers = b"", error_headers(error)
        try:
            self.bus.send(len(answer_payload), lambda: reply(answer_payload, answer_headers))
        except Unavailable as error:
            _log.warning("could not send a reply on %s: %s", self.subject, error)

    async def close(self) -> None:
        if self in self.bus.broker.responders:
            self.bus.broker.responders.remove(self)  # type: ignore[arg-type]
        self.bus.forget(self)
        if self._tasks:
            await asyncio.wait(self._tasks)


class MemoryReading(Generic[M]):
    """Reads the broker's events from the end that they had when it was made."""

    def __init__(self, bus: MemoryBus, subject: str, kind: type[M], listener: AsyncListener[M]) -> None:
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
            await self._listener(message)
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
