"""Batches that the source of a pair handed over to the target, and those that wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from services.worker.core.scheduling.sequence import Sequence
from services.worker.instance.instance import Instance
from services.worker.live.batch import PromptBatch, packed
from services.worker.live.links import LinkToTarget
from services.worker.live.tensors import Kind, Tensors
from shared.errors import BadRequest, Overloaded, PayloadTooLarge
from shared.messages.common import Ack, ErrorInfo
from shared.messages.live import HandOver, ZigzagAssignment
from shared.transport.base import Buffer

log = logging.getLogger(__name__)

SLOTS_SHARE = 4
"""A batch takes at most this part of an instance's slots."""

T = TypeVar("T")


class HandedOver:
    """Event loop only, but for what it has the engine's thread do. First come, first served."""

    def __init__(self, assignment: ZigzagAssignment, instance: Instance, link: LinkToTarget) -> None:
        self._assignment = assignment
        self._instance = instance
        self._link = link
        self._lent: deque[Sequence] = deque()
        """Out of the scheduler's queue, and in no batch yet. The engine's thread adds."""
        self.handed: dict[str, PromptBatch] = {}
        """At the target, by id, in first-come order."""
        self.backlog: deque[PromptBatch] = deque()
        """Not handed over yet, or never: behind all that is."""
        self.lock = asyncio.Lock()
        """Held by who changes the backlog, and while batches are on their way to the target."""
        self.num_handed = 0
        self.pulled: set[str] = set()
        """Ids of batches of those that were pulled: the target does nothing more with them."""
        self._num_batches = 0

    async def lend(self, begin: Callable[[], None] = lambda: None) -> None:
        """Take what waits in the scheduler. ``begin()`` is called before, on the engine's thread."""

        def lend() -> None:
            begin()
            # Kept here at once: should the caller be cancelled, nothing is lost.
            self._lent.extend(self._instance.engine.loop.scheduler.lend())

        await self.call(lend)

    async def hand_over(
        self, tensors: Tensors, *, behind_seal: bool, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Everything, as far as the target has capacity, or ``until`` something; the rest waits here, behind that.
        Raises ``LinkLost``."""
        async with self.lock:
            sequences = [self._lent.popleft() for _ in range(len(self._lent))]
            fresh = self._batches(sequences)
            self.backlog.extend(fresh)
            while self.backlog and not until():
                if self.backlog[0].ended:
                    self.backlog.popleft()  # all of its requests were cancelled
                elif not await self._hand_over(self.backlog[0], tensors, behind_seal):
                    return

    def _batches(self, sequences: list[Sequence]) -> list[PromptBatch]:
        loop, num_layers = self._instance.engine.loop, self._instance.layout.num_layers
        # Without a measurement a batch's cost is only relative to the others'.
        token_s = loop.prefill_token_s or 1e-6
        batches = []
        config = self._instance.scheduler
        # All requests of a batch need slots at once.
        most_requests = max(1, config.max_num_sequences // SLOTS_SHARE)
        for pack in packed(sequences, config.prefill_chunk_tokens, most_requests):
            num_tokens = sum(s.num_tokens for s in pack)
            batch_id = f"{self._assignment.pair_id}-{self._num_batches}"
            self._num_batches += 1
            batches.append(PromptBatch(batch_id, -1, pack, token_s * num_tokens / num_layers))
        return batches

    async def _hand_over(self, batch: PromptBatch, tensors: Tensors, behind_seal: bool) -> bool:
        serial = self.num_handed
        message = HandOver(
            pair_id=self._assignment.pair_id,
            batch_id=batch.batch_id,
            serial=serial,
            layer_s=batch.layer_s,
            requests=batch.submits(self._assignment.target.instance_id, self._assignment.model),
            behind_seal=behind_seal,
        )
        # Before it is known: a pull may bring the batch back before the answer comes.
        self.handed[batch.batch_id] = self.backlog.popleft()
        try:
            await self._link.ask_pair("hand_over", message, Ack)
        except (Overloaded, BadRequest, PayloadTooLarge) as error:
            log.debug("batch %s stays here: %s", batch.batch_id, error)
            self.backlog.appendleft(self.handed.pop(batch.batch_id))
            return False
        self.num_handed += 1
        batch.serial = serial
        for sequence in batch.sequences:
            if sequence.finished:  # cancelled before its batch counted as handed over
                self._link.cancel(*sequence.key)
        # The transport cuts nothing off what it is given: the next hand-over need not wait for these to be there.
        tensors.send(await self._embedded(batch), serial, Kind.HANDED_HIDDEN)
        return True

    async def _embedded(self, batch: PromptBatch) -> Buffer:
        """Beside the engine's thread: of a long prompt this is much to copy, and decodes need not wait for it."""
        return await asyncio.to_thread(self._instance.engine.loop.engine.embed_tokens, batch.token_ids())

    def has_room(self) -> bool:
        """Whether the batch that probably comes next fits. On the engine's thread."""
        expected = next(iter([*self.handed.values(), *self.backlog]), None)
        return expected is None or self._instance.engine.loop.scheduler.reservations.fits(expected.lengths)

    def holds(self, request_id: str, attempt: int) -> bool:
        """Whether a request is at the target."""
        return any(s.key == (request_id, attempt) for batch in self.handed.values() for s in batch.sequences)

    async def end(self, doubt: ErrorInfo | None = None) -> None:
        """What the target does not own waits in the scheduler again, at its old places; no more is lent.

        ``doubt``: the target may own any of what it has and did not give. These requests end with this error.
        """
        doubtful = [b for b in self.handed.values() if b.batch_id not in self.pulled] if doubt is not None else []
        batches = [b for b in (*self.handed.values(), *self.backlog) if b not in doubtful]
        self.handed.clear()
        self.backlog.clear()

        def end() -> None:
            scheduler = self._instance.engine.loop.scheduler
            scheduler.table.lending = False
            # Looked at here, not before: a batch may just have been begun.
            scheduler.take_back([s for batch in batches if not batch.begun for s in batch.sequences])
            if doubt is not None:
                scheduler.abort([s for batch in doubtful for s in batch.sequences], doubt)
            scheduler.take_back([self._lent.popleft() for _ in range(len(self._lent))])

        await self.call(end)

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine's thread, between two layers."""
        return await asyncio.wrap_future(self._instance.engine.call(lambda _: function(), between_layers=True))
