"""The message bus, as services see it. Implementations: ``nats`` and ``memory`` (tests).

Trace context (W3C ``traceparent``) travels in headers: implementations inject the current
context when sending and make the sender's context current while a handler runs.
Malformed messages never reach a handler: they are counted in ``blitz_bus_malformed_total``
(labelled by subject kind), logged once per message kind, and dropped or, for RPC, answered
with ``malformed_message``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shared.bus.departures import DepartureListener
from shared.messages.codec import Message

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Stored(Generic[M]):
    """An event as it is read from the plan stream."""

    event: M
    at_s: float
    """When the stream took it, by this process's monotonic clock: its age is the difference between two times of the
    stream's own clock."""


Listener = Callable[[M], None]
"""Called inline, in order of arrival, on the event loop: must be quick and must not raise."""
EventListener = Callable[[Stored[M]], Awaitable[None]]
"""Awaited one at a time, in order of arrival."""
EventMaker = Callable[[], Message]
"""Makes an event as of the moment at which it is sent: it says how long it holds, and sending may take a while."""
Responder = Callable[[M], Awaitable[R]]
"""Answers an RPC; calls run concurrently. A ``BlitzError`` it raises reaches the caller typed."""


class Subscription(Protocol):
    """A running subscription."""

    async def close(self) -> None:
        """Stop receiving; handlers that run are awaited."""


class Bus(Protocol):
    """Publish, request, respond and durable events over subjects from ``shared.subjects``."""

    @property
    def max_payload_bytes(self) -> int:
        """Largest message the server takes."""

    @property
    def connected_since_s(self) -> float | None:
        """Monotonic time since which this process's own connection is up, None while it is down.

        Silence of a peer counts only while this has been up for a full lease.
        """

    async def publish(self, subject: str, message: Message, *, buffer: bool = True) -> None:
        """Fire and forget. Raises ``PayloadTooLarge``; while disconnected, ``Unavailable``
        once the outgoing buffer is full.

        Without ``buffer`` it is for now or never, and ``Unavailable`` is raised at once while disconnected: nothing
        that was said about the time before an outage is heard after it.
        """

    async def flush(self) -> None:
        """Return when the server has what was published so far, or cannot be reached for a moment."""

    async def subscribe(self, subject: str, kind: type[M], listener: Listener[M]) -> Subscription:
        """Call ``listener`` for every message on ``subject``."""

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        """One RPC. Raises ``NoResponder``, ``DeadlineExceeded``, ``PayloadTooLarge``,
        ``MalformedMessage`` (of the reply) or the typed error that the responder raised."""

    async def respond(self, subject: str, kind: type[M], responder: Responder[M, R]) -> Subscription:
        """Answer RPCs on ``subject``. Where several processes respond, each gets every request, and the first answer
        counts: one that hangs takes nothing with it."""

    async def publish_event(self, subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        """Append to the plan stream, once per ``message_id``. Returns when the server has it.
        Raises ``Unavailable``, ``PayloadTooLarge``; and what an ``EventMaker`` raises, which is asked for each
        attempt."""

    async def past_events(self, subject: str, kind: type[M], *, limit: int) -> tuple[Stored[M], ...]:
        """The newest events on ``subject`` that the server still has, oldest first; at most ``limit``. What does not
        decode is counted and left out. Raises ``Unavailable``."""

    async def subscribe_events(self, subject: str, kind: type[M], listener: EventListener[M]) -> Subscription:
        """Receive events appended from now on; each is acknowledged when ``listener`` returns."""

    async def cluster_name(self, claim: str = "") -> str:
        """The name of the cluster whose servers these are; empty: they keep none. ``claim``: kept from now on, if they
        keep none. Raises ``Unavailable`` while they cannot say, and ``NotPermitted``."""

    async def wait_lost(self) -> str:
        """Wait until the connection has ended for good, other than by ``close``: nothing will bring it back. Returns
        why."""

    async def watch_departures(self, listener: DepartureListener) -> Subscription:
        """Hear of each connection that ends, of any process, where the server tells; where it does not, never."""

    async def close(self) -> None:
        """Flush what was published, await handlers, disconnect."""
