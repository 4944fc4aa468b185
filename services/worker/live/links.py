"""The two ends of what a pair's members say to each other: the source asks, and settles what it has; the target tells
what it has taken. Each notices that the other is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TypeVar

from services.worker.core.live.life import PairLife, offer_pauses
from services.worker.link import LinkLost, WorkerLink
from services.worker.live.tensors import PairTensors
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, NotFound
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.messages.live import LiveOffer, PairEnded, Settle, Taken, ZigzagAssignment
from shared.subjects import Process

KEEP_ALIVE_S = 0.5
LAST_WORD_S = 0.2
TELL_RETRY_S = 0.05

M = TypeVar("M", bound=Message)


class LinkToTarget(WorkerLink):
    """The source's, of one pair: questions, claims to settle, cancels and signs of life."""

    def __init__(self, bus: Bus, target: Process, pair_id: str, *, silence_s: float) -> None:
        """``silence_s``: a target that answers nothing for so long is lost."""
        super().__init__(bus, "the target", silence_s=silence_s)
        self._target = target
        self._pair_id = pair_id
        self._tensors: PairTensors | None = None
        self._to_settle: list[str] = []
        self._to_cancel: list[Cancel] = []
        self._settling = asyncio.Event()

    @property
    def is_cut(self) -> bool:
        return self._tensors is not None and self._tensors.peer_is_lost

    def watch(self, tensors: PairTensors) -> None:
        """From now on a lost connection counts as well."""
        self._tensors = tensors

    async def offer(self, assignment: ZigzagAssignment, until_s: float) -> None:
        """Ask until the target, which may not have its plan yet, accepts, or ``until_s`` (monotonic). Raises
        ``LinkLost``."""
        try:
            await self.ask(
                subjects.worker_live(self._target, "offer"),
                LiveOffer(assignment=assignment),
                Ack,
                not_now=(NotFound,),
                pauses=offer_pauses(),
                why_stop=lambda: "" if time.monotonic() < until_s else "the target did not accept in time",
            )
        except BlitzError as error:
            raise LinkLost(f"the target declined: {error}") from error

    async def ask_pair(self, operation: str, message: Message, answer: type[M], *, wait_s: float = 0.0) -> M:
        """As ``ask``, about this pair: a target that has no such pair is lost. Refusals that the caller gets are
        ``Overloaded``, ``BadRequest`` and ``PayloadTooLarge``."""
        try:
            return await self.ask(subjects.worker_live(self._target, operation), message, answer, wait_s=wait_s)
        except (Conflict, NotFound) as error:
            # Its own word may be on the way, and says more: which batches it owns.
            await self.until_lost(LAST_WORD_S)
            raise LinkLost(f"the target has no such pair: {error}") from error

    def settle(self, claim_id: str) -> None:
        """Tell the target soon that this claim is settled."""
        self._to_settle.append(claim_id)
        self._settling.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Tell the target soon that this request was cancelled."""
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
                # One that is lost costs the target some layers.
                await self.tell(subjects.worker_cancel(self._target), self._to_cancel.pop(0))
            await self.settle_now()

    async def settle_now(self) -> Ack:
        """Settle claims, or only give a sign of life. Raises ``LinkLost``."""
        claims = tuple(self._to_settle)
        answer = await self.ask_pair("settle", Settle(pair_id=self._pair_id, claim_ids=claims), Ack)
        del self._to_settle[: len(claims)]
        return answer

    async def tell_ended(self, reason: str) -> None:
        """The pair is over: the target need not find out by itself."""
        notice = PairEnded(pair_id=self._pair_id, reason=reason)
        await self.tell(subjects.worker_pair_ended(self._target), notice)


class LinkToSource(WorkerLink):
    """The target's, of one pair."""

    def __init__(
        self, assignment: ZigzagAssignment, bus: Bus, tensors: PairTensors, life: PairLife, *, silence_s: float
    ) -> None:
        """``life``: the pair's at the target. ``silence_s``: a source that says nothing for so long is lost."""
        super().__init__(bus, "the source", silence_s=silence_s)
        self._pair_id = assignment.pair_id
        self._source = assignment.source.worker
        self._tensors = tensors
        self._life = life
        self._heard_s = time.monotonic()

    @property
    def is_cut(self) -> bool:
        return self._tensors.peer_is_lost

    def heard(self) -> None:
        """The source said something now."""
        self._heard_s = time.monotonic()

    def why_lost(self) -> str:
        """Why the source counts as lost; empty if it does not. Time in which our own bus is away does not count."""
        silent_s = self.silent_s(self._heard_s)
        if silent_s is None:
            return ""
        if self.is_cut:
            return "the connection to the source is lost"
        return f"the source was silent for {self._silence_s:g} s" if silent_s > self._silence_s else ""

    async def tell_taken(self, *batch_ids: str, loaded: bool) -> bool:
        """These batches are finished here. Whether the source knows; False if the pair has ended before."""
        try:
            await self.ask(
                subjects.worker_live(self._source, "taken"),
                Taken(pair_id=self._pair_id, batch_ids=batch_ids, loaded=loaded),
                Ack,
                not_now=(BlitzError,),
                pauses=itertools.repeat(TELL_RETRY_S),
                why_stop=lambda: "the pair has ended" if self._life.ended else "",
            )
        except LinkLost:
            return False
        return True

    async def tell_ended(self, reason: str, finished: tuple[str, ...]) -> None:
        """The pair is over; the batches in ``finished`` are the target's. Said once: the source may be gone."""
        notice = PairEnded(pair_id=self._pair_id, reason=reason, finished=finished)
        await self.tell(subjects.worker_pair_ended(self._source), notice)
