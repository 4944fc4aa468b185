"""A simulated worker's connection: the product's, with a watch on its heartbeats."""

from __future__ import annotations

import time

from shared import subjects
from shared.bus.base import R
from shared.bus.nats import NatsBus
from shared.messages.codec import Message

_HEARTBEAT = subjects.pool("heartbeat")


class WatchedBus(NatsBus):
    """Times the round trips of heartbeats, as the worker that sends them sees them."""

    heartbeats: list[tuple[float, float]] | None = None
    """(monotonic start, seconds) of those that were answered, while somebody wants to know."""
    missed = 0
    """Heartbeats without an answer in time, meanwhile."""

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        if subject != _HEARTBEAT:
            return await super().request(subject, message, reply, timeout_s=timeout_s)
        begun_s = time.monotonic()
        try:
            answer = await super().request(subject, message, reply, timeout_s=timeout_s)
        except Exception:
            self.missed += 1
            raise
        if self.heartbeats is not None:
            self.heartbeats.append((begun_s, time.monotonic() - begun_s))
        return answer
