"""How the source of a pair hands its batches over to the target, and takes them back at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.source_queue import SourceQueue
from services.worker.engine.loop import EngineLoop
from services.worker.instance.instance import Instance
from services.worker.live.links import LinkToTarget
from services.worker.live.tensors import Kind, Tensors
from shared.errors import BadRequest, Overloaded, PayloadTooLarge
from shared.messages.common import Ack, ErrorInfo
from shared.messages.live import HandOver, ZigzagAssignment
from shared.transport.base import Buffer

log = logging.getLogger(__name__)

T = TypeVar("T")


class HandedOver:
    """Event loop only, but for what it has the engine's thread do."""

    def __init__(self, assignment: ZigzagAssignment, instance: Instance, link: LinkToTarget) -> None:
        self._assignment = assignment
        self._instance = instance
        self._link = link
        self.queue = SourceQueue(assignment.pair_id, instance.layout.num_layers, instance.scheduler)
        """The engine's thread lends to it."""
        self.lock = asyncio.Lock()
        """Held by who changes the backlog, and while batches are on their way to the target."""

    async def lend(self, begin: Callable[[], None] = lambda: None) -> None:
        """Take what waits in the scheduler. ``begin()`` is called before, on the engine's thread."""

        def lend() -> None:
            begin()
            self.queue.lend(self._instance.engine.loop.scheduler)

        await self.call(lend)

    async def hand_over(
        self, tensors: Tensors, *, behind_seal: bool, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Everything, as far as the target has capacity, or ``until`` something; the rest waits here, behind that.
        Raises ``LinkLost``."""
        async with self.lock:
            self.queue.pack(self._instance.engine.loop.prefill_token_s)
            while not until() and (batch := self.queue.next_to_hand()) is not None:
                if not await self._hand_over(batch, tensors, behind_seal):
                    return

    async def _hand_over(self, batch: PromptBatch, tensors: Tensors, behind_seal: bool) -> bool:
        serial, record = self.queue.num_handed, self._instance.record
        message = HandOver(
            pair_id=self._assignment.pair_id,
            batch_id=batch.batch_id,
            serial=serial,
            layer_s=batch.layer_s,
            requests=batch.submits(self._assignment.target.instance_id, record.name, record.model_hash),
            behind_seal=behind_seal,
        )
        try:
            await self._link.ask_pair("hand_over", message, Ack)
        except (Overloaded, BadRequest, PayloadTooLarge) as error:
            log.debug("batch %s stays here: %s", batch.batch_id, error)
            self.queue.refused(batch)
            return False
        for sequence in self.queue.took(batch):
            self._link.cancel(*sequence.key)
        # The transport cuts nothing off what it is given: the next hand-over need not wait for these to be there.
        tensors.send(await self._embedded(batch), serial, Kind.HANDED_HIDDEN)
        return True

    async def _embedded(self, batch: PromptBatch) -> Buffer:
        """Beside the engine's thread: of a long prompt this is much to copy, and decodes need not wait for it."""
        engine = self._instance.engine.loop.engine
        return (await asyncio.to_thread(engine.embed_tokens, batch.token_ids())).result()

    def has_room(self) -> bool:
        """Whether the batch that probably comes next fits. On the engine's thread."""
        return self.queue.has_room(self._instance.engine.loop.scheduler)

    async def end(self, doubt: ErrorInfo | None = None) -> None:
        """What the target does not own waits in the scheduler again, at its old places; no more is lent.

        ``doubt``: the target may own any of what it has and did not give. These requests end with this error.
        """
        back, doubtful = self.queue.close(in_doubt=doubt is not None)
        scheduler = self._instance.engine.loop.scheduler
        await self.call(lambda: self.queue.restore(scheduler, back, doubtful, doubt))

    def cancelled(self, request_id: str, attempt: int) -> None:
        """A request was cancelled, which the scheduler hears at the end of its step: the target is told before."""
        queue, key, engine = self.queue, (request_id, attempt), self._instance.engine
        if key in engine.loop.scheduler.table.accepted:
            queue.unwanted(*key)
        else:  # it may have been submitted inside this layer: then it is accepted before this is looked at

            def look_again(loop: EngineLoop) -> None:
                if key in loop.scheduler.table.accepted:
                    queue.unwanted(*key)

            engine.call(look_again, between_layers=True)
        if queue.holds(*key):
            self._link.cancel(*key)

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine's thread, between two layers."""
        return await asyncio.wrap_future(self._instance.engine.call(lambda _: function(), between_layers=True))
