"""Of several processes of a kind one leads: it holds a lease from the pool, which carries a term."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Literal

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, Unavailable
from shared.messages.registry import Lead, Leadership

log = logging.getLogger(__name__)

TTL_S = 2.0
ASK_TIMEOUT_S = 1.0
RETRY_S = 0.1
OTHERS_S = 0.5
"""How long a process that does not lead leaves the answer to others."""


class Leader:
    """Whether this process leads: from the pool's answer until ``TTL_S`` after the question, by its own clock."""

    def __init__(self, bus: Bus, service: Literal["planner", "monitor"], *, ttl_s: float | None = None) -> None:
        self._bus = bus
        self._service: Literal["planner", "monitor"] = service
        self._ttl_s = TTL_S if ttl_s is None else ttl_s
        self._owner = f"{service}-{secrets.token_hex(6)}"
        self._until_s = float("-inf")
        self.term = 0
        """Higher than that of any leader before. 0: it never led."""
        self.follows = asyncio.Event()
        """Set once another process was seen to lead."""

    @property
    def leads(self) -> bool:
        return time.monotonic() < self._until_s

    def check(self, term: int | None = None) -> None:
        """Raises ``Unavailable`` unless this process leads now, and still with that ``term``."""
        if not self.leads or term not in (None, self.term):
            raise Unavailable(f"this {self._service} does not lead", retry_after_s=0.5)

    async def let_others(self) -> None:
        """Return while this process leads. Otherwise the process that leads answers; for a moment none may: raises
        ``Unavailable``, but not before another had the time to be heard first."""
        if not self.leads:
            await asyncio.sleep(OTHERS_S)
            self.check()

    async def win(self, stopping: asyncio.Event) -> bool:
        """Wait until this process leads; False once it is ``stopping``."""
        while not stopping.is_set():
            if await self._ask():
                log.info("leading, term %d, as %s", self.term, self._owner)
                return True
            await self._pause(stopping, RETRY_S)
        return False

    async def hold(self, stopping: asyncio.Event) -> None:
        """Renew until another process leads, the pool was silent for too long, or this one is ``stopping``."""
        term = self.term
        while not stopping.is_set() and self.leads:
            await self._pause(stopping, self._ttl_s / 4)
            if not await self._ask() and self._until_s == float("-inf"):
                return
            if self.term != term:
                return  # another process led in the meantime
        if not self.leads:
            log.warning("the pool is silent: not leading until it answers")

    async def give_up(self) -> None:
        """Let the next one lead at once."""
        self._until_s = float("-inf")
        message = Lead(service=self._service, owner=self._owner, ttl_s=self._ttl_s, give_up=True)
        with contextlib.suppress(BlitzError):
            await self._bus.request(subjects.pool("lead"), message, Leadership, timeout_s=ASK_TIMEOUT_S)

    async def _ask(self) -> bool:
        asked_s = time.monotonic()
        message = Lead(service=self._service, owner=self._owner, ttl_s=self._ttl_s, term=self.term)
        try:
            answer = await self._bus.request(subjects.pool("lead"), message, Leadership, timeout_s=ASK_TIMEOUT_S)
        except BlitzError as error:
            log.debug("the pool does not say who leads: %s", error)
            return False
        if answer.leads:
            self.term, self._until_s = answer.term, asked_s + self._ttl_s
            return True
        if not self.follows.is_set():
            log.info("%s leads: waiting to take over", answer.leader)
        self._until_s = float("-inf")
        self.follows.set()
        return False

    async def _pause(self, stopping: asyncio.Event, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await stopping.wait()
