"""The source's line to the target: questions over the bus that are asked until answered, or the target is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from services.worker.live.tensors import Tensors
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, DeadlineExceeded, NoResponder, NotFound, Unavailable
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.messages.live import LiveOffer, PairEnded, Settle, ZigzagAssignment

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
"""One try of a question that is answered at once."""
RETRY_S = 0.02
OFFER_RETRY_S = 0.002
"""At first: the target may be about to take its plan."""
MAX_RETRY_S = 0.25
KEEP_ALIVE_S = 0.5
LAST_WORD_S = 0.2
GONE_S = 1.0
"""Nobody answers to the target's name, and a reconnection would have come by now."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class PairLost(Exception):
    """The target is gone, or says that it has no such pair."""


class Peer:
    """One pair's line. A question that is repeated gets the answer of the first."""

    def __init__(self, bus: Bus, worker_id: str, pair_id: str, *, silence_s: float) -> None:
        """``silence_s``: a target that answers nothing for so long is gone."""
        self._bus = bus
        self._worker_id = worker_id
        self._pair_id = pair_id
        self._silence_s = silence_s
        self._tensors: Tensors | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_settle: list[str] = []
        self._to_cancel: list[Cancel] = []
        self._settling = asyncio.Event()

    async def offer(self, assignment: ZigzagAssignment) -> None:
        """Ask until the target, which may not have its plan yet, accepts. Raises ``PairLost``."""
        message = LiveOffer(assignment=assignment)
        subject = subjects.worker_live(self._worker_id, "offer")
        started_s, pause_s = time.monotonic(), OFFER_RETRY_S
        while True:
            try:
                await self.until(self._bus.request(subject, message, Ack, timeout_s=ASK_TIMEOUT_S))
            except (NotFound, Unavailable, DeadlineExceeded) as error:
                if time.time() > assignment.expires_at_s:
                    raise PairLost(f"the target did not accept in time: {error}") from error
                if not isinstance(error, NotFound):
                    self._judge(error, time.monotonic() - started_s)
                await asyncio.sleep(pause_s)
                pause_s = min(MAX_RETRY_S, 1.5 * pause_s)
            except BlitzError as error:
                raise PairLost(f"the target declined: {error}") from error
            else:
                return

    def watch(self, tensors: Tensors) -> None:
        """From now on a lost connection counts as well."""
        self._tensors = tensors

    def lose(self, reason: str) -> None:
        """Everybody who waits gets ``PairLost``."""
        if not self._lost.done():
            self._lost.set_exception(PairLost(reason))
            self._lost.exception()  # nobody need wait

    async def until(self, awaitable: Awaitable[T]) -> T:
        """Wait for something; raises ``PairLost`` as soon as the pair is lost."""
        work = asyncio.ensure_future(awaitable)
        either: set[asyncio.Future[Any]] = {work, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                self._lost.result()
            return work.result()
        finally:
            work.cancel()

    async def ask(self, operation: str, message: Message, answer: type[M], *, wait_s: float = 0.0) -> M:
        """Ask until there is an answer. Raises ``PairLost``, or what the target refused with (``Overloaded``,
        ``BadRequest``, ``PayloadTooLarge``). ``wait_s``: how long the target may take on purpose."""
        subject = subjects.worker_live(self._worker_id, operation)
        started_s = time.monotonic()
        while True:
            try:
                return await self.until(self._bus.request(subject, message, answer, timeout_s=ASK_TIMEOUT_S + wait_s))
            except (Conflict, NotFound) as error:
                # Its own word may be on the way, and says more: which batches it owns.
                await asyncio.wait({self._lost}, timeout=LAST_WORD_S)
                if self._lost.done():
                    self._lost.result()
                raise PairLost(f"the target has no such pair: {error}") from error
            except (Unavailable, DeadlineExceeded) as error:
                self._judge(error, time.monotonic() - started_s)
                await asyncio.sleep(RETRY_S)

    def _judge(self, error: BlitzError, asked_s: float) -> None:
        """Raises ``PairLost`` if the target is gone by all that is known."""
        connected_since_s = self._bus.connected_since_s
        if connected_since_s is None:
            return  # it is our own bus that is away
        asked_s = min(asked_s, time.monotonic() - connected_since_s)
        cut = self._tensors is not None and self._tensors.peer_is_lost
        if isinstance(error, NoResponder) and (cut or asked_s > GONE_S):
            raise PairLost("nobody answers for the target any more") from error
        if asked_s > self._silence_s:
            raise PairLost(f"the target was silent for {self._silence_s:g} s: {error}") from error

    def settle(self, claim_id: str) -> None:
        """Tell the target soon that this claim is settled."""
        self._to_settle.append(claim_id)
        self._settling.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Tell the target soon that nobody waits for this request."""
        self._to_cancel.append(Cancel(request_id=request_id, attempt=attempt))
        self._settling.set()

    async def keep_alive(self) -> None:
        """Settle claims and give signs of life, until cancelled. Raises ``PairLost``."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._settling.wait()
            self._settling.clear()
            while self._to_cancel:
                with contextlib.suppress(BlitzError):  # it costs the target some layers
                    await self._bus.publish(subjects.worker_cancel(self._worker_id), self._to_cancel.pop(0))
            await self.settle_now()

    async def settle_now(self) -> None:
        """Settle claims, or only give a sign of life. Raises ``PairLost``."""
        claims = tuple(self._to_settle)
        await self.ask("settle", Settle(pair_id=self._pair_id, claim_ids=claims), Ack)
        del self._to_settle[: len(claims)]

    async def tell_ended(self, reason: str) -> None:
        """The pair is over: the target need not find out by itself."""
        try:
            notice = PairEnded(pair_id=self._pair_id, reason=reason)
            await self._bus.publish(subjects.worker_pair_ended(self._worker_id), notice)
        except BlitzError as error:
            log.debug("the target was not told: %s", error)
