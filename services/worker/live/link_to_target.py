"""The source's link to the target: questions about their pair, claims to settle, cancels and signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TypeVar

from services.worker.link import Link, LinkLost, growing
from services.worker.live.tensors import Tensors
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, NotFound
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.messages.live import LiveOffer, PairEnded, Settle, ZigzagAssignment

log = logging.getLogger(__name__)

OFFER_RETRY_S = 0.002
"""At first: the target may be about to take its plan."""
MAX_OFFER_RETRY_S = 0.25
KEEP_ALIVE_S = 0.5
LAST_WORD_S = 0.2

M = TypeVar("M", bound=Message)


class LinkToTarget(Link):
    """One pair's."""

    def __init__(self, bus: Bus, worker_id: str, pair_id: str, *, silence_s: float) -> None:
        """``silence_s``: a target that answers nothing for so long is lost."""
        super().__init__(bus, "the target", silence_s=silence_s)
        self._worker_id = worker_id
        self._pair_id = pair_id
        self._tensors: Tensors | None = None
        self._to_settle: list[str] = []
        self._to_cancel: list[Cancel] = []
        self._settling = asyncio.Event()

    @property
    def is_cut(self) -> bool:
        return self._tensors is not None and self._tensors.peer_is_lost

    def watch(self, tensors: Tensors) -> None:
        """From now on a lost connection counts as well."""
        self._tensors = tensors

    async def offer(self, assignment: ZigzagAssignment) -> None:
        """Ask until the target, which may not have its plan yet, accepts. Raises ``LinkLost``."""
        try:
            await self.ask(
                subjects.worker_live(self._worker_id, "offer"),
                LiveOffer(assignment=assignment),
                Ack,
                not_now=(NotFound,),
                pauses=growing(OFFER_RETRY_S, MAX_OFFER_RETRY_S),
                why_stop=lambda: "" if time.time() < assignment.expires_at_s else "the target did not accept in time",
            )
        except BlitzError as error:
            raise LinkLost(f"the target declined: {error}") from error

    async def ask_pair(self, operation: str, message: Message, answer: type[M], *, wait_s: float = 0.0) -> M:
        """As ``ask``, about this pair: a target that has no such pair is lost. Refusals that the caller gets are
        ``Overloaded``, ``BadRequest`` and ``PayloadTooLarge``."""
        try:
            return await self.ask(subjects.worker_live(self._worker_id, operation), message, answer, wait_s=wait_s)
        except (Conflict, NotFound) as error:
            # Its own word may be on the way, and says more: which batches it owns.
            await self.until_lost(LAST_WORD_S)
            raise LinkLost(f"the target has no such pair: {error}") from error

    def settle(self, claim_id: str) -> None:
        """Tell the target soon that this claim is settled."""
        self._to_settle.append(claim_id)
        self._settling.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Tell the target soon that nobody waits for this request."""
        self._to_cancel.append(Cancel(request_id=request_id, attempt=attempt))
        self._settling.set()

    async def keep_alive(self) -> None:
        """Settle claims and give signs of life, until cancelled. Raises ``LinkLost``."""
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
        """Settle claims, or only give a sign of life. Raises ``LinkLost``."""
        claims = tuple(self._to_settle)
        await self.ask_pair("settle", Settle(pair_id=self._pair_id, claim_ids=claims), Ack)
        del self._to_settle[: len(claims)]

    async def tell_ended(self, reason: str) -> None:
        """The pair is over: the target need not find out by itself."""
        try:
            notice = PairEnded(pair_id=self._pair_id, reason=reason)
            await self._bus.publish(subjects.worker_pair_ended(self._worker_id), notice)
        except BlitzError as error:
            log.debug("the target was not told: %s", error)
