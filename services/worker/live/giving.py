"""How the target of a pair gives batches back to the source: pulls, what was computed so far, and their settlement."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable

from services.worker.instance.instance import Instance
from services.worker.live.target_batches import TargetBatches
from services.worker.live.target_stepper import TargetBatch, TargetStepper
from services.worker.live.tensors import Kind, Tensors
from shared.aio import Wakeup
from shared.errors import BadRequest, Conflict
from shared.messages.live import Pull, Pulled, PullKv
from shared.zigzag.queue import Claim, Policy, Queue, Wait

log = logging.getLogger(__name__)


class Giving:
    """Event loop only, but for what runs under the queue's lock."""

    def __init__(
        self,
        instance: Instance,
        queue: Queue,
        stepper: TargetStepper,
        batches: TargetBatches,
        tensors: Tensors,
        changed: Wakeup,
    ) -> None:
        """``changed`` fires when the queue did."""
        self._instance = instance
        self._queue = queue
        self._stepper = stepper
        self._batches = batches
        self._tensors = tensors
        self._changed = changed

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
            with self._stepper.lock:
                over = self._queue.dissolved or self.is_over
                found = None if over else self._queue.pull(message.claim_id)
                # The engine would begin the next layer before this had a chance to look. Once nobody waits, it must
                # not grant a claim any more that nobody takes.
                self._stepper.wanted = message.claim_id if isinstance(found, Wait) and left_s > 0 else ""
            if isinstance(found, Claim):
                return found
            if over or left_s <= 0:
                return None
            await self._changed.wait(left_s)

    def answer(self, claim: Claim | None, *, kv_apart: bool) -> Pulled:
        """What the source is told of a pull that found this."""
        return Pulled(
            batch_id="" if claim is None else claim.batch_id,
            first_layer=0 if claim is None else claim.first_layer,
            layers_ready=self._queue.layers_ready,
            loaded=self._batches.loaded,
            can_dissolve=claim is None and self.is_over,
            kv_apart=kv_apart,
        )

    async def give(self, claim: Claim, serial: int, *, kv_apart: bool) -> None:
        """Send what was computed of a claimed batch, once; the source has the rest."""
        held = self._stepper.batches.get(claim.batch_id)
        if claim.first_layer and held is not None and not held.is_sent:
            held.is_sent = True
            await self.send(held, claim.first_layer, serial, kv_apart=kv_apart)

    async def send(self, held: TargetBatch, num_layers: int, serial: int, *, kv_apart: bool) -> None:
        """Send a batch's hidden states, and unless it is asked for apart the KV of its first ``num_layers``. A failure
        of the transport is the source's to notice."""
        engine, batch = self._instance.engine.loop.engine, held.batch
        hidden = await asyncio.to_thread(engine.hidden_states, held.activation)
        transfers = [self._tensors.send(hidden, serial, Kind.PULLED_HIDDEN)]
        if not kv_apart:
            kv = await asyncio.to_thread(engine.export_kv, batch.block_tables, batch.lengths, num_layers)
            if not self._is_held(held):
                return
            transfers.append(self._tensors.send(kv, serial, Kind.PULLED_KV))
        failure = await self._tensors.sent(*transfers)
        if failure is not None:
            log.info("batch %s: %s; the source computes it from the beginning", batch.batch_id, failure)

    def kv_wanted(self, message: PullKv) -> TargetBatch | None:
        """The batch of which the source wants KV; None if it was asked for the same before. ``send_kv`` must follow.

        Raises ``Conflict`` unless the batch is here and the source's, ``BadRequest`` for layers that were not run.
        """
        with self._stepper.lock:
            held = self._stepper.batches.get(message.batch_id)
            claim = next((c for c in self._queue.open_claims() if c.batch_id == message.batch_id), None)
        if held is None or claim is None:
            raise Conflict(f"batch {message.batch_id!r} is not the source's to pull, or settled")
        if not 0 <= message.first_layer < message.last_layer <= claim.first_layer:
            layers = f"{message.first_layer}..{message.last_layer}"
            raise BadRequest(f"KV of layers {layers} of {claim.first_layer} that were run", param="last_layer")
        if message.first_layer in held.kv_sent:
            return None
        held.kv_sent.add(message.first_layer)
        return held

    async def send_kv(self, held: TargetBatch, message: PullKv) -> None:
        """Send KV that is wanted. A failure of the transport is the source's to notice."""
        engine, batch = self._instance.engine.loop.engine, held.batch
        first, last = message.first_layer, message.last_layer
        export = functools.partial(engine.export_kv, batch.block_tables, batch.lengths, last, first_layer=first)
        try:
            kv = await asyncio.to_thread(export)
        except Exception:  # what an engine finds in blocks that are another's by now is nobody's concern
            if self._is_held(held):
                raise
            return
        # Its blocks may have been freed meanwhile, and written.
        if self._is_held(held):
            failure = await self._tensors.sent(self._tensors.send_kv(kv, message.serial, first))
            if failure is not None:
                log.info("KV of batch %s: %s; the source computes it again", batch.batch_id, failure)

    def _is_held(self, held: TargetBatch) -> bool:
        with self._stepper.lock:
            return self._stepper.batches.get(held.batch.batch_id) is held

    async def settle(self, claim_ids: Iterable[str]) -> None:
        """The source has these: they are free here. Unknown and settled claims are ignored."""
        with self._stepper.lock:
            claims = {claim.claim_id: claim for claim in self._queue.open_claims()}
            settled = [claims[i] for i in claim_ids if i in claims]
            for claim in settled:
                self._queue.confirm(claim.claim_id)
        await self._batches.drop([claim.batch_id for claim in settled])
