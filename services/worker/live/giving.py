"""How the target of a pair gives batches back to the source: pulls, what was computed so far, and their settlement."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from services.worker.instance import Instance
from services.worker.live.target_batches import TargetBatches
from services.worker.live.target_work import Held, TargetWork
from services.worker.live.tensors import Kind, Tensors
from services.worker.signal import Signal
from shared.messages.live import Pull, Pulled
from shared.zigzag.queue import Claim, Policy, Queue, Wait

log = logging.getLogger(__name__)


class Giving:
    """Event loop only, but for what runs under the queue's lock."""

    def __init__(
        self,
        instance: Instance,
        queue: Queue,
        work: TargetWork,
        batches: TargetBatches,
        tensors: Tensors,
        changed: Signal,
    ) -> None:
        """``changed`` fires when the queue did."""
        self._instance = instance
        self._queue = queue
        self._work = work
        self._batches = batches
        self._tensors = tensors
        self._changed = changed
        self._sent: set[str] = set()
        """Claims whose tensors are on their way, or there."""

    @property
    def is_over(self) -> bool:
        """Cooperation has nothing left to gain. The baselines have none once everything is loaded."""
        return self._queue.can_dissolve if self._queue.policy is Policy.ZIGZAG else self._queue.loaded

    async def pull(self, message: Pull, check: Callable[[], None]) -> Claim | None:
        """Claim the earliest batch for the source; waits up to ``wait_s`` for one that it may have. ``give`` must
        follow. ``check()`` is called before every look, and raises when the pair is over."""
        deadline_s = time.monotonic() + message.wait_s
        while True:
            check()
            left_s = deadline_s - time.monotonic()
            with self._work.lock:
                over = self._queue.dissolved or self.is_over
                found = None if over else self._queue.pull(message.claim_id)
                # The engine would begin the next layer before this had a chance to look. Once nobody waits, it must
                # not grant a claim any more that nobody takes.
                self._work.wanted = message.claim_id if isinstance(found, Wait) and left_s > 0 else ""
            if isinstance(found, Claim):
                return found
            if over or left_s <= 0:
                return None
            await self._changed.wait(left_s)

    def answer(self, claim: Claim | None) -> Pulled:
        """What the source is told of a pull that found this."""
        return Pulled(
            batch_id="" if claim is None else claim.batch_id,
            first_layer=0 if claim is None else claim.first_layer,
            layers_ready=self._queue.layers_ready,
            loaded=self._batches.loaded,
            can_dissolve=claim is None and self.is_over,
        )

    async def give(self, claim: Claim, serial: int) -> None:
        """Send what was computed of a claimed batch, once; the source has the rest."""
        if claim.first_layer and claim.claim_id not in self._sent:
            self._sent.add(claim.claim_id)
            await self.send(self._work.held[claim.batch_id], claim.first_layer, serial)

    async def send(self, held: Held, num_layers: int, serial: int) -> None:
        """Send a batch's hidden states and the KV of its first ``num_layers``. A failure is the source's to notice."""
        engine, batch = self._instance.engine.loop.engine, held.batch
        hidden = await asyncio.to_thread(engine.hidden_states, held.activation)
        first = self._tensors.send(hidden, serial, Kind.PULLED_HIDDEN)
        kv = await asyncio.to_thread(engine.export_kv, batch.block_tables, batch.lengths, num_layers)
        failure = await self._tensors.sent(first, self._tensors.send(kv, serial, Kind.PULLED_KV))
        if failure is not None:
            log.info("batch %s: %s; the source computes it from the beginning", batch.batch_id, failure)

    async def settle(self, claim_ids: Iterable[str]) -> None:
        """The source has these: they are free here. Unknown and settled claims are ignored."""
        with self._work.lock:
            claims = {claim.claim_id: claim for claim in self._queue.open_claims()}
            settled = [claims[i] for i in claim_ids if i in claims]
            for claim in settled:
                self._queue.confirm(claim.claim_id)
        await self._batches.drop([claim.batch_id for claim in settled])
