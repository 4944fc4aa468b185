"""How the target of a pair parts from the source: each batch gets one owner for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.instance.instance import Instance
from services.worker.live.giving import Giving
from services.worker.live.target_batches import TargetBatches
from services.worker.live.target_stepper import TargetStepper
from services.worker.requests.inbox import Serving
from shared.aio import Wakeup
from shared.errors import BlitzError
from shared.messages.common import ErrorInfo
from shared.messages.live import Dissolve, Dissolved, Given
from shared.zigzag.queue import Queue

log = logging.getLogger(__name__)

LOOK_S = 0.05


class Parting:
    """Event loop only, but for what it has the engine's thread do."""

    def __init__(
        self,
        instance: Instance,
        queue: Queue,
        stepper: TargetStepper,
        batches: TargetBatches,
        giving: Giving,
        serving: Serving,
        changed: Wakeup,
    ) -> None:
        """``changed`` fires when the queue did."""
        self._instance = instance
        self._queue = queue
        self._stepper = stepper
        self._batches = batches
        self._giving = giving
        self._serving = serving
        self._changed = changed
        self._dissolving = asyncio.Lock()
        self.shares: Dissolved | None = None
        """What was agreed."""

    async def dissolve(self, message: Dissolve, check: Callable[[], None]) -> Dissolved:
        """Begun batches stay, untouched ones are shared. Repeating gives the same shares. ``hand_back`` must follow.
        ``check()`` is called before every look, and raises when the pair is over."""
        async with self._dissolving:
            while self.shares is None:
                check()
                self.shares = await asyncio.wrap_future(self._instance.engine.call(lambda _: self._dissolve(message)))
                if self.shares is None:
                    await self._changed.wait(LOOK_S)
                    continue
                kept = self._batches.own(self.shares.kept)
                self._serving.announce([s for batch in kept for s in batch.sequences])
                self._batches.look_again()
            return self.shares

    def _dissolve(self, message: Dissolve) -> Dissolved | None:
        """Between two steps; None while a batch is inside a layer that only the source could go on from."""
        with self._stepper.lock:
            if self._stepper.is_inside and not self._queue.loaded:
                return None
            # The source has what it pulled before it asks for this.
            for claim in self._queue.open_claims():
                self._queue.confirm(claim.claim_id)
            shares = self._queue.dissolve(message.claim_id, source_busy=message.source_busy_s)
            for claim in shares.given:
                if not (message.kv_apart and claim.first_layer):
                    self._queue.confirm(claim.claim_id)
            finished = tuple(self._stepper.finished)
        return Dissolved(
            kept=shares.kept,
            given=tuple(
                Given(batch_id=claim.batch_id, first_layer=claim.first_layer, serial=message.first_serial + i)
                for i, claim in enumerate(shares.given)
            ),
            finished=finished,
            layer_runs=self._stepper.layers.runs(),
            kv_apart=message.kv_apart,
        )

    async def hand_back(self, shares: Dissolved, why_lost: Callable[[], str]) -> None:
        """Send what was begun of the given batches, free all that are the source's, wait for the end of the kept.
        ``why_lost()``: why the source counts as lost, or empty; then nobody fetches what is left."""
        begun = [
            (self._stepper.batches[g.batch_id], g)
            for g in shares.given
            if g.first_layer and g.batch_id in self._stepper.batches
        ]
        await self._drop_all_but({*shares.finished, *(given.batch_id for _, given in begun)})
        apart = shares.kv_apart
        sends = [self._giving.send(held, g.first_layer, g.serial, kv_apart=apart) for held, g in begun]
        for failure in await asyncio.gather(*sends, return_exceptions=True):
            if failure is not None:
                log.error("a batch was not handed back: the source computes it", exc_info=failure)
        while self._queue.open_claims() and not why_lost():
            await self._changed.wait(LOOK_S)
        await self._drop_all_but(set(shares.finished))
        await self._changed.until(lambda: not self._stepper.batches)

    async def _drop_all_but(self, batch_ids: set[str]) -> None:
        await self._batches.drop([batch_id for batch_id in self._batches.borrowed if batch_id not in batch_ids])

    async def abandon(self, error: BlitzError) -> None:
        """The engine failed on what was kept: ordinary steps find out on which request. Before everything is loaded
        there are none; then those requests end with an error, and gateways try elsewhere."""
        info = ErrorInfo.of(error)

        def abandon(loop: EngineLoop) -> StepOutput:
            batches = [held.batch for held in self._stepper.batches.values()]
            kept = [s for b in batches if b.batch_id not in self._batches.borrowed for s in b.sequences]
            outputs = []
            if self._batches.loaded:
                loop.scheduler.reservations.compute_here(kept)
            else:
                for sequence in kept:
                    if not sequence.finished:
                        sequence.finished = True
                        outputs.append(sequence.end("error", info))
            self._stepper.close()
            return StepOutput(tuple(outputs))

        async with self._dissolving:  # then it is settled whose they are
            self._serving.on_output(await asyncio.wrap_future(self._instance.engine.call(abandon)))
        self._changed.fire()
