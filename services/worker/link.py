"""Questions to one other worker: asked until it answers, or is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from shared.bus.base import Bus
from shared.errors import BlitzError, DeadlineExceeded, NoResponder, Unavailable
from shared.messages.codec import Message

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
"""One try of a question that is answered at once."""
RETRY_S = 0.02
GONE_S = 1.0
"""No process answers to the other's name, and a reconnection would have come by now."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class LinkLost(Exception):
    """The other worker is gone, or is not to be asked any more."""


class WorkerLink:
    """To one other worker. Event loop only. A question that is repeated must get the answer of the first."""

    def __init__(self, bus: Bus, other: str, *, silence_s: float) -> None:
        """``other``: what it is called in reasons, such as "the target". ``silence_s``: one that answers nothing for
        so long is lost."""
        self._bus = bus
        self._other = other
        self._silence_s = silence_s
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_cut(self) -> bool:
        """A connection that the two have besides the bus is lost."""
        return False

    def lose(self, reason: str) -> None:
        """All who wait get ``LinkLost``, and so do all who ask from now on."""
        if not self._lost.done():
            self._lost.set_exception(LinkLost(reason))
            self._lost.exception()  # there may be no waiter

    async def until(self, awaitable: Awaitable[T]) -> T:
        """Wait for something; raises ``LinkLost`` as soon as the link is lost."""
        work = asyncio.ensure_future(awaitable)
        either: set[asyncio.Future[Any]] = {work, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                self._lost.result()
            return work.result()
        finally:
            work.cancel()

    async def until_lost(self, timeout_s: float) -> None:
        """Wait so long at most; raises ``LinkLost`` if the link is lost by then."""
        await asyncio.wait({self._lost}, timeout=timeout_s)
        if self._lost.done():
            self._lost.result()

    async def ask(
        self,
        subject: str,
        message: Message,
        answer: type[M],
        *,
        wait_s: float = 0.0,
        not_now: tuple[type[BlitzError], ...] = (),
        pauses: Iterable[float] | None = None,
        why_stop: Callable[[], str] = lambda: "",
    ) -> M:
        """Ask until there is an answer. Raises ``LinkLost``, or what the other refuses with.

        ``wait_s``: how long the other may take on purpose. ``not_now``: refusals after which it is asked again.
        ``pauses``: seconds between two tries, ``RETRY_S`` by default. ``why_stop()``: looked at before each try; a
        reason ends the asking with ``LinkLost``.
        """
        asked_since_s = time.monotonic()
        between = iter(itertools.repeat(RETRY_S) if pauses is None else pauses)
        while not (reason := why_stop()):
            try:
                return await self.until(self._bus.request(subject, message, answer, timeout_s=ASK_TIMEOUT_S + wait_s))
            except not_now as error:
                last: BlitzError = error
            except (Unavailable, DeadlineExceeded) as error:
                self.check(error, asked_since_s)
                last = error
            log.debug("%s is asked again on %s: %s", self._other, subject, last)
            await asyncio.sleep(next(between))
        raise LinkLost(reason)

    async def tell(self, subject: str, message: Message) -> None:
        """Say something once; it may be lost."""
        try:
            await self._bus.publish(subject, message)
        except BlitzError as error:
            log.debug("%s was not told: %s", self._other, error)

    def check(self, error: BlitzError, asked_since_s: float) -> None:
        """A question that is asked since then (``time.monotonic()``) was not answered. Raises ``LinkLost`` if the other
        is gone by all that is known."""
        silent_s = self.silent_s(asked_since_s)
        if silent_s is None:
            return
        if isinstance(error, NoResponder) and (silent_s > GONE_S or self.is_cut):
            raise LinkLost(f"nobody answers for {self._other} any more") from error
        if silent_s > self._silence_s:
            raise LinkLost(f"{self._other} was silent for {self._silence_s:g} s: {error}") from error

    def silent_s(self, since_s: float) -> float | None:
        """How long the other has said nothing if that was the last, without the time in which our own bus was away;
        None while it is."""
        connected_since_s = self._bus.connected_since_s
        return None if connected_since_s is None else time.monotonic() - max(since_s, connected_since_s)
