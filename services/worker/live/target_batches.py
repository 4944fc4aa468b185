"""The batches of a pair at its target, from the hand-over until they are settled, taken or dropped.

A batch is the target's once it is taken. Until then it is the source's: should the target go, the source computes it;
should the source go, the gateway submits it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.target_work import TargetWork
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import EngineLoop
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.sender import KvSender
from services.worker.live.steppers import TargetBatch, TargetStepper
from services.worker.live.tensors import Kind, Tensors
from services.worker.requests.inbox import Inbox
from shared.aio import Wakeup
from shared.errors import BadRequest, BlitzError, Conflict, Overloaded
from shared.messages.live import Gate, HandOver, Pull, Pulled, PullKv
from shared.zigzag.queue import Claim

log = logging.getLogger(__name__)


class TargetBatches:
    """Event loop only, but for what runs under the queue's lock."""

    def __init__(
        self,
        instance: Instance,
        work: TargetWork[TargetBatch],
        stepper: TargetStepper,
        tensors: Tensors,
        inbox: Inbox,
        kv_sender: KvSender,
        changed: Wakeup,
    ) -> None:
        """``work``: what the stepper runs. ``changed`` fires when the queue did."""
        self._instance = instance
        self._work = work
        self._stepper = stepper
        self._tensors = tensors
        self._inbox = inbox
        self._kv_sender = kv_sender
        self._changed = changed
        self._known: set[str] = set()
        """All that ever came."""
        self._handing_over = asyncio.Lock()
        self.not_taken: dict[str, PromptBatch] = {}
        """Those that are the source's, by id."""
        self.loaded = False
        """The target has everything."""
        self.closed = False

    @property
    def num_known(self) -> int:
        return len(self._known)

    @property
    def finished_ids(self) -> tuple[str, ...]:
        """Batches that were finished here, and of which the source may not know."""
        with self._stepper.lock:
            return tuple(self._work.finished)

    def source_knows(self, batch_id: str) -> None:
        """That this batch was finished here."""
        with self._stepper.lock:
            self._work.source_knows(batch_id)

    # --- hand-over ---------------------------------------------------------------------------

    async def hand_over(self, message: HandOver) -> TargetBatch | None:
        """Reserve blocks for a batch and queue it; None if it is here already. ``fetch`` must follow.

        Raises ``Overloaded`` when there is no capacity now, ``BadRequest`` when there will never be, ``Conflict`` when
        the pair is over.
        """
        if not message.requests or not 0 < message.layer_s < math.inf or message.serial < 0:
            raise BadRequest(f"batch {message.batch_id!r} cannot be: {message.layer_s!r} s a layer", param="layer_s")
        async with self._handing_over:  # a repeat must not be answered before what it repeats
            return await self._hand_over(message)

    async def _hand_over(self, message: HandOver) -> TargetBatch | None:
        if message.batch_id in self._known:
            return None
        sequences = [self._instance.sequence_of(request) for request in message.requests]
        limit = self._instance.scheduler.limit_tokens
        for sequence in sequences:
            if sequence.num_tokens >= limit:
                raise BadRequest(f"{sequence.num_tokens} tokens: the target takes up to {limit - 1}", param="requests")
        batch = PromptBatch(message.batch_id, message.serial, sequences, message.layer_s)
        self._known.add(batch.batch_id)
        engine = self._instance.engine
        reserve = engine.call(lambda loop: loop.scheduler.reservations.reserve(sequences), between_layers=True)
        if not await asyncio.wrap_future(reserve):
            self._known.discard(batch.batch_id)
            raise Overloaded(f"no capacity for {batch.num_tokens} tokens of KV now")
        held = TargetBatch(batch)
        with self._stepper.lock:
            if self.closed or self._work.queue.dissolved:
                engine.call(lambda loop: loop.scheduler.reservations.release(sequences), between_layers=True)
                raise Conflict(f"pair {message.pair_id} is over")
            self._work.add(held, behind_seal=message.behind_seal)
        self.not_taken[batch.batch_id] = batch
        self._inbox.host(message.requests)
        self._changed.fire()
        return held

    async def fetch(self, held: TargetBatch) -> None:
        """Receive a batch's hidden states; from then on the target may begin it."""
        batch, engine = held.batch, self._instance.engine
        num_bytes = batch.num_tokens * engine.loop.engine.hidden_bytes_per_token
        try:
            held.hidden = await self._tensors.receive(num_bytes, batch.serial, Kind.HANDED_HIDDEN)
        except BlitzError as error:
            # The source can have it back as it is. Should it stay here, there will be an embedding.
            log.warning("the hidden states of batch %s did not arrive: %s", batch.batch_id, error)
            await self._changed.until(lambda: self.loaded or self.closed)
            if self.closed:
                return
            tokens = batch.token_ids()
            held.hidden = await asyncio.wrap_future(engine.call(lambda loop: loop.engine.embed_tokens(tokens).result()))
        with self._stepper.lock:
            self._work.queue.arrived(batch.batch_id)
        self.look_again()

    # --- pulls -------------------------------------------------------------------------------

    async def pull(self, message: Pull, check: Callable[[], None]) -> Claim | None:
        """Claim the earliest batch for the source; waits up to ``wait_s`` for one that it may have. ``send_pulled``
        must follow. ``check()`` is called before every look, and raises when the pair is over."""
        deadline_s = time.monotonic() + message.wait_s
        while True:
            check()
            left_s = deadline_s - time.monotonic()
            with self._stepper.lock:
                over = self._work.is_over
                # The engine would begin the next layer before this had a chance to look: it grants what waits.
                claim = self._work.pull(message.claim_id, waits=left_s > 0)
            if claim is not None:
                return claim
            if over or left_s <= 0:
                return None
            await self._changed.wait(left_s)

    def goes_direct(self, claim: Claim) -> bool:
        """Whether the KV of what was run of a claimed batch leaves here for the decode instances. Settled by the first
        answer; if not, it waits here for the source alone."""
        held = self._work.batches.get(claim.batch_id)
        if held is None:
            return False
        if held.kv_direct is None:
            held.kv_direct = self._kv_sender.share(held.batch.sequences, claim.first_layer)
            if not held.kv_direct:
                self._kv_sender.forget(held.batch.sequences)
        return held.kv_direct

    def answer(self, claim: Claim | None, *, kv_direct: bool) -> Pulled:
        """What the source is told of a pull that found this."""
        return Pulled(
            batch_id="" if claim is None else claim.batch_id,
            first_layer=0 if claim is None else claim.first_layer,
            layers_ready=self._work.queue.layers_ready,
            loaded=self.loaded,
            can_dissolve=claim is None and self._work.can_dissolve,
            kv_direct=kv_direct,
        )

    async def send_pulled(self, claim: Claim, serial: int) -> None:
        """Send what was computed of a claimed batch, once; the source has the rest."""
        held = self._work.batches.get(claim.batch_id)
        if claim.first_layer and held is not None and not held.is_sent:
            held.is_sent = True
            await self.send(held, serial)

    async def send(self, held: TargetBatch, serial: int) -> None:
        """Send a batch's hidden states. A failure of the transport is the source's to notice."""
        engine, batch = self._instance.engine.loop.engine, held.batch
        hidden = (await asyncio.to_thread(engine.hidden_states, held.activation)).result()
        failure = await self._tensors.sent(self._tensors.send(hidden, serial, Kind.PULLED_HIDDEN))
        if failure is not None:
            log.info("batch %s: %s; the source computes it from the beginning", batch.batch_id, failure)

    def kv_wanted(self, message: PullKv) -> TargetBatch | None:
        """The batch of which the source wants KV; None if it was asked for the same before. ``send_kv`` must follow.

        Raises ``Conflict`` unless the batch is here and the source's, ``BadRequest`` for layers that were not run.
        """
        with self._stepper.lock:
            held, claim = self._work.batches.get(message.batch_id), self._work.claim_of(message.batch_id)
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
            kv = (await asyncio.to_thread(export)).result()
        except Exception:  # what an engine finds in blocks that are another batch's by now does not matter
            if self._is_held(held):
                raise
            return
        # Its blocks may have been freed by now, and written by another batch.
        if self._is_held(held):
            failure = await self._tensors.sent(self._tensors.send_kv(kv, message.serial, first))
            if failure is not None:
                log.info("KV of batch %s: %s; the source computes it again", batch.batch_id, failure)

    def _is_held(self, held: TargetBatch) -> bool:
        with self._stepper.lock:
            return self._work.batches.get(held.batch.batch_id) is held

    async def settle(self, claim_ids: Iterable[str]) -> None:
        """The source has these: they are free here. Unknown and settled claims are ignored."""
        with self._stepper.lock:
            settled = self._work.settle(set(claim_ids))
        await self.drop(settled)

    # --- dropping ----------------------------------------------------------------------------

    async def drop(self, batch_ids: list[str]) -> None:
        """Free what these have here: they are the source's, or every request of them has ended."""
        if not batch_ids:
            return
        call = self._instance.engine.call(lambda _: self._stepper.drop(tuple(batch_ids)), between_layers=True)
        await asyncio.wrap_future(call)
        for batch_id in batch_ids:
            if (batch := self.not_taken.pop(batch_id, None)) is not None:
                self._kv_sender.forget(batch.sequences)
                self._inbox.unhost(batch.sequences)
        self.look_again()

    async def cancel(self, is_gone: Callable[[ActiveSequence], bool]) -> None:
        """The requests of which ``is_gone`` says so are not wanted any more."""
        with self._stepper.lock:
            batches = {id(b): b for b in (*self.not_taken.values(), *(h.batch for h in self._work.batches.values()))}
        gone = [(b, s) for b in batches.values() for s in b.sequences if is_gone(s)]
        if not gone:
            return

        def end(loop: EngineLoop) -> None:
            # On the engine's thread: the request may just be about to decode here.
            for _, sequence in gone:
                if sequence.reserved or sequence.id < 0:
                    sequence.finished = True
                elif not sequence.finished:
                    loop.scheduler.cancel(*sequence.key)

        await asyncio.wrap_future(self._instance.engine.call(end, between_layers=True))
        ended = {batch.batch_id: batch for batch, _ in gone if batch.ended}
        with self._stepper.lock:
            free = [batch_id for batch_id in ended if self._work.cancel(batch_id)]
        await self.drop(free)

    async def close(self) -> None:
        """Drop everything that is not taken. Between two steps, so that none is inside a layer."""
        self.closed = True
        with contextlib.suppress(BlitzError):  # the engine has stopped, and freed everything
            await asyncio.wrap_future(self._instance.engine.call(lambda _: self._stepper.close()))
        for batch in self.not_taken.values():
            self._kv_sender.forget(batch.sequences)
            self._inbox.unhost(batch.sequences)
        self.not_taken.clear()
        self._changed.fire()

    # --- what happens to them ------------------------------------------------------------------

    def set_layers_ready(self, layers_ready: int, *, complete: bool = False) -> None:
        """More is loaded. ``complete``: everything is, and the source knows of it."""
        with self._stepper.lock:
            self._work.set_layers_ready(layers_ready, complete=complete)
        self.look_again()

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split was computed: hold both sides to it."""
        with self._stepper.lock:
            self._work.set_gates(gates)
        self.look_again()

    def lapse_if_late(self, since_plan_s: float) -> bool:
        """Whether the split was dropped now, because layers are late."""
        with self._stepper.lock:
            lapsed = self._work.gates.lapse_if_late(self._work.queue, since_plan_s)
        if lapsed:
            self.look_again()
        return lapsed

    def finished(self, batch: PromptBatch) -> None:
        """The engine finished a batch: its requests decode here."""
        self.take((batch.batch_id,))
        self._changed.fire()

    def take(self, batch_ids: Iterable[str]) -> list[PromptBatch]:
        """These are the target's from now on; those of which that is news."""
        return [self.not_taken.pop(i) for i in batch_ids if i in self.not_taken]

    def look_again(self) -> None:
        """There may be a layer to run, or a batch to pull."""
        with self._stepper.lock:
            self._stepper.changed()
        self._instance.engine.call(lambda _: None, between_layers=True)
        self._changed.fire()
