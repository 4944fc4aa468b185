"""A bus between workers that loses what they say about decoding."""

from __future__ import annotations

import asyncio
import random

from shared.bus.wire import Headers
from tests.shared.bus.memory import MemoryBroker, Reply


class LossyBroker:
    """Loses some of the questions and answers about decoding, and is late with others."""

    def __init__(self, broker: MemoryBroker, seed: int, *, lost: float) -> None:
        self._real = broker.request_raw
        self._random = random.Random(seed)
        self.lost = lost
        broker.request_raw = self.request_raw  # type: ignore[method-assign]

    def request_raw(self, subject: str, payload: bytes, headers: Headers | None, reply: Reply) -> bool:
        if ".decode." not in subject:
            return self._real(subject, payload, headers, reply)
        fate = self._random.random()
        if fate < self.lost / 2:
            return True

        def answer(reply_payload: bytes, reply_headers: Headers | None) -> None:
            if fate >= self.lost:
                reply(reply_payload, reply_headers)

        if self._random.random() < 0.5:
            return self._real(subject, payload, headers, answer)
        delay_s = self._random.random() * 0.15  # some come after the question is given up
        asyncio.get_running_loop().call_later(delay_s, self._real, subject, payload, headers, answer)
        return True
