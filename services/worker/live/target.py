"""The target of a pair: its conversation with the source, and its life up to the dissolution.

Everything here runs on the event loop. The batches are in ``target_batches``; the engine's part is in
``steppers``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.pair import PairLife, PairState
from services.worker.core.pairing.target_work import TargetWork
from services.worker.core.scheduling.gateways import Gone
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.sender import KvSender
from services.worker.link import ASK_TIMEOUT_S
from services.worker.live.links import LinkToSource
from services.worker.live.steppers import TargetBatch, TargetStepper
from services.worker.live.target_batches import TargetBatches
from services.worker.live.tensors import Tensors
from services.worker.requests.inbox import Inbox
from shared.aio import OwnedTasks, Wakeup
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, Unavailable
from shared.messages.common import Ack, ErrorInfo
from shared.messages.live import (
    Dissolve,
    Dissolved,
    Given,
    HandOver,
    Pull,
    Pulled,
    PullKv,
    Seal,
    Settle,
    ZigzagAssignment,
)

log = logging.getLogger(__name__)

WATCH_S = 0.05
LOOK_S = 0.05


class LiveTarget:
    """From the offer to the last of its batches. ``ended`` is set then."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        instance: Instance,
        bus: Bus,
        tensors: Tensors,
        inbox: Inbox,
        kv_sender: KvSender,
        *,
        silence_s: float,
    ) -> None:
        """``silence_s``: a source that says nothing for so long is gone."""
        self.assignment = assignment
        self.instance = instance
        self.life = PairLife()
        self.ended = asyncio.Event()
        self._tensors = tensors
        self._inbox = inbox
        self._link = LinkToSource(assignment, bus, tensors, self.life, silence_s=silence_s)
        self._event_loop = asyncio.get_running_loop()
        self._changed = Wakeup()
        self.shares: Dissolved | None = None
        """What was agreed at the dissolution."""
        self._dissolving = asyncio.Lock()
        self._source_knows = asyncio.Event()
        """That this one is loaded, or the pair has ended."""
        self._failure = ""
        self._tasks = OwnedTasks(lambda error: self._fail_soon(f"{type(error).__name__}: {error}"))
        num_layers, part_tokens = instance.layout.num_layers, instance.scheduler.prefill_chunk_tokens
        self._work: TargetWork[TargetBatch] = TargetWork(num_layers, part_tokens, assignment)
        self.stepper = TargetStepper(
            instance.engine.loop,
            self._work,
            decode_interval_s=assignment.slo_tbt_s / 2,
            start_s=time.monotonic(),
            on_layer=self._from_engine(self._changed.fire),
            on_finished=self._from_engine(self._finished),
            on_broken=self._from_engine(self._engine_failed),
        )
        self.batches = TargetBatches(instance, self._work, self.stepper, tensors, inbox, kv_sender, self._changed)

    def begin(self) -> None:
        """The offer is accepted: hand-overs may come."""
        self.instance.engine.call(lambda loop: setattr(loop, "partial", self.stepper))
        self.life.move_to(PairState.REDIRECTING)
        self.layers_ready()
        self._tasks.start(self._watch())

    # --- from the source ---------------------------------------------------------------------

    async def on_hand_over(self, message: HandOver) -> Ack:
        """Take a batch. Raises what ``TargetBatches.hand_over`` raises."""
        self._check_lives()
        held = await self.batches.hand_over(message)
        if held is not None:
            self._tasks.start(self.batches.fetch(held))
        return Ack()

    async def on_seal(self, message: Seal) -> Ack:
        """All that waited is here. Raises ``Conflict`` if a batch is missing."""
        self._check_lives()
        if self.batches.num_known < message.count:
            raise Conflict(f"{self.batches.num_known} batches of {message.count} are here")
        if self.life.state is PairState.REDIRECTING:
            self.life.move_to(PairState.COOPERATING)
            self._move_on()
        return Ack()

    async def on_pull(self, message: Pull) -> Pulled:
        """The earliest batch for the source; waits up to ``wait_s`` for one that it may have."""
        claim = await self.batches.pull(message, self._check_lives)
        if claim is not None:
            self._tasks.start(self.batches.send_pulled(claim, message.serial))
            # What was in the way of a later batch is gone.
            self.batches.look_again()
        kv_direct = claim is not None and self.batches.goes_direct(claim)
        return self.batches.answer(claim, kv_direct=kv_direct)

    async def on_pull_kv(self, message: PullKv) -> Ack:
        """The source has room for KV of a batch that it pulled. Raises what ``TargetBatches.kv_wanted`` raises."""
        self._check_lives()
        held = self.batches.kv_wanted(message)
        if held is not None:
            self._tasks.start(self.batches.send_kv(held, message))
        return Ack()

    async def on_settle(self, message: Settle) -> Ack:
        """The source has these batches. Without claims it only says that it lives."""
        self._check_lives()
        await self.batches.settle(message.claim_ids)
        return Ack()

    # --- the dissolution ---------------------------------------------------------------------

    async def on_dissolve(self, message: Dissolve) -> Dissolved:
        """Begun batches stay, untouched ones are shared. Repeating gives the same shares."""
        self._check_lives()
        if self.batches.loaded:
            # The source knows by now; its answer is about to be here.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    await self._source_knows.wait()
        async with self._dissolving:
            if self.shares is None:
                self.shares = await self._agreed(message)
                self.batches.take(self.shares.kept)
                self.batches.look_again()
            if not self.life.ended:
                self.life.move_to(PairState.DISSOLVED)
                num_kept, num_given = len(self.shares.kept), len(self.shares.given)
                log.info("pair %s is dissolved: %d kept, %d given", message.pair_id, num_kept, num_given)
                self._tasks.start(self._hand_back(self.shares))
            return self.shares

    async def _agreed(self, message: Dissolve) -> Dissolved:
        while True:
            self._check_lives()
            call = self.instance.engine.call(lambda _: self._share(message))
            if (shares := await asyncio.wrap_future(call)) is not None:
                return shares
            await self._changed.wait(LOOK_S)

    def _share(self, message: Dissolve) -> Dissolved | None:
        """Between two steps; None while a batch is inside a layer that only the source could go on from."""
        with self.stepper.lock:
            shares = self._work.share(message.claim_id, message.source_busy_s)
            finished = tuple(self._work.finished)
            kept = [held for i, held in self._work.batches.items() if shares is not None and i in shares.kept]
        if shares is None:
            return None
        # Said on this thread: with all layers here, the next steps finish them.
        self._inbox.announce([s for held in kept for s in held.batch.sequences if not s.finished])
        return Dissolved(
            kept=shares.kept,
            given=tuple(
                Given(batch_id=claim.batch_id, first_layer=claim.first_layer, serial=message.first_serial + i)
                for i, claim in enumerate(shares.given)
            ),
            finished=finished,
            layer_runs=self.stepper.layers.runs(),
        )

    async def _hand_back(self, shares: Dissolved) -> None:
        """Send what was begun of the given batches, free all that are the source's, wait for the end of the kept."""
        try:
            await self._send_given(shares)
            await self._changed.until(lambda: not self._work.batches)
        finally:
            await self._detach()

    async def _send_given(self, shares: Dissolved) -> None:
        begun = [
            (self._work.batches[g.batch_id], g)
            for g in shares.given
            if g.first_layer and g.batch_id in self._work.batches
        ]
        await self._drop_all_but({*shares.finished, *(given.batch_id for _, given in begun)})
        sends = [self.batches.send(held, given.serial) for held, given in begun]
        for failure in await asyncio.gather(*sends, return_exceptions=True):
            if failure is not None:
                log.error("a batch was not handed back: the source computes it", exc_info=failure)
        while self._work.queue.open_claims() and not self._link.why_lost():
            await self._changed.wait(LOOK_S)
        await self._drop_all_but(set(shares.finished))

    async def _drop_all_but(self, batch_ids: set[str]) -> None:
        await self.batches.drop([batch_id for batch_id in self.batches.not_taken if batch_id not in batch_ids])

    async def _abandon_kept(self, error: BlitzError) -> None:
        """The engine failed on what was kept: ordinary steps find out on which request. Before everything is loaded
        there are none; then those requests end with an error, and gateways try elsewhere."""
        info = ErrorInfo.of(error)

        def abandon(loop: EngineLoop) -> StepOutput:
            batches = [held.batch for held in self._work.batches.values()]
            kept = [s for b in batches if b.batch_id not in self.batches.not_taken for s in b.sequences]
            outputs = []
            if self.batches.loaded:
                loop.scheduler.reservations.compute_here(kept)
            else:
                for sequence in kept:
                    if not sequence.finished:
                        sequence.finished = True
                        outputs.append(sequence.end("error", info))
            self.stepper.close()
            return StepOutput(tuple(outputs))

        async with self._dissolving:  # then it is settled whose they are
            self._inbox.on_output(await asyncio.wrap_future(self.instance.engine.call(abandon)))
        self._changed.fire()

    # --- from the instance -------------------------------------------------------------------

    def layers_ready(self) -> None:
        """A layer more is loaded, or everything."""
        copy = self.instance.copy
        self.batches.set_layers_ready(copy.layers_ready)
        if copy.complete and not self.batches.loaded:
            self.batches.loaded = True
            self._changed.fire()
            self._move_on()
            self._tasks.start(self._finish_from_now_on())

    async def _finish_from_now_on(self) -> None:
        """The source has to know before that this one finishes batches: should the two lose each other, it must not
        compute what may be finished here."""
        if await self._link.tell_taken(loaded=True):
            self.batches.set_layers_ready(self.instance.layout.num_layers, complete=True)
        self._source_knows.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """A request was cancelled."""
        self._tasks.start(self.batches.cancel(lambda sequence: sequence.key == (request_id, attempt)))

    def cancel_gateway(self, gone: Gone) -> None:
        """Gateways are gone."""
        self._tasks.start(self.batches.cancel(lambda s: gone.had(s.gateway_id, s.gateway_incarnation)))

    # --- inside ------------------------------------------------------------------------------

    def _from_engine(self, function: Callable[..., None]) -> Callable[..., None]:
        """Call ``function`` on the event loop, from the engine's thread."""

        def call(*arguments: object) -> None:
            self._event_loop.call_soon_threadsafe(function, *arguments)

        return call

    def _check_lives(self) -> None:
        """The source lives; do we?"""
        self._link.heard()
        if self.life.state is PairState.FAILED:
            raise Conflict(f"pair {self.assignment.pair_id} has failed here: {self._failure}")

    def _move_on(self) -> None:
        if self.batches.loaded and self.life.state is PairState.COOPERATING:
            self.life.move_to(PairState.LOADED)

    def _finished(self, batch: PromptBatch) -> None:
        self.batches.finished(batch)
        if not self.life.ended:
            self._tasks.start(self._tell_finished(batch))

    async def _tell_finished(self, batch: PromptBatch) -> None:
        if await self._link.tell_taken(batch.batch_id, loaded=self.batches.loaded):
            self.batches.source_knows(batch.batch_id)

    async def _watch(self) -> None:
        """Until the pair ends: does the source still live, do layers come as planned?"""
        while not self.life.ended:
            await asyncio.sleep(WATCH_S)
            if self.batches.lapse_if_late(time.monotonic() - self.instance.ordered_s):
                log.info("pair %s: layers are late, the split is off", self.assignment.pair_id)
            if reason := self._link.why_lost():
                self._fail_soon(reason)

    def _fail_soon(self, reason: str) -> None:
        if not self.life.ended:
            self._tasks.start(self.fail(reason))

    async def fail(self, reason: str, *, tell: bool = True) -> None:
        """The pair is over: everything that is not owned here is dropped."""
        if not self.life.fail():
            return
        self._failure = reason
        log.warning("pair %s failed: %s", self.assignment.pair_id, reason)
        self._tensors.abort()
        await self.batches.close()
        if tell:
            await self._link.tell_ended(reason, self.batches.finished_ids)
        await self._detach()

    def _engine_failed(self, error: Exception) -> None:
        if self._work.queue.dissolved:
            # What was kept is the target's alone, even if the source does not know yet.
            self._tasks.start(self._abandon_kept(Unavailable(f"the engine failed: {type(error).__name__}: {error}")))
        else:
            self._fail_soon(f"the target's engine failed: {error}")

    async def _detach(self) -> None:
        def detach(loop: EngineLoop) -> None:
            if loop.partial is self.stepper:
                loop.partial = None

        with contextlib.suppress(BlitzError):  # the engine has stopped
            await asyncio.wrap_future(self.instance.engine.call(detach))
        self.ended.set()

    async def close(self) -> None:
        """The instance or the process goes: leave the pair, and wait for what is under way."""
        await self.fail("the target leaves")
        await self._tasks.close()
