"""The source of a pair: it hands its queue over, pulls batches back, and keeps what clients were promised.

Everything here runs on the event loop; the engine's part is in ``steppers``. Every request of the pair was accepted by
the source's scheduler and stays accepted there, so that the source can compute it whether or not the target lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from opentelemetry import trace

from services.worker.core.pairing.pair import PairLife, PairState
from services.worker.core.pairing.source_work import AfterPull, after_pull, parts
from services.worker.engine.loop import StepOutput
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.sender import KvSender
from services.worker.link import LinkLost
from services.worker.live.handover import HandedOver
from services.worker.live.links import LinkToTarget
from services.worker.live.pulls import Puller
from services.worker.live.report import PairRecord
from services.worker.live.steppers import SourceBatch, SourceStepper
from services.worker.live.tensors import Tensors
from services.worker.requests.inbox import Inbox
from shared.errors import BlitzError, Conflict, Unavailable
from shared.messages.common import TAKES_PROMPTS, Ack, ErrorInfo
from shared.messages.live import (
    Dissolve,
    Dissolved,
    LiveReport,
    PlanSplit,
    Seal,
    Taken,
    ZigzagAssignment,
)

log = logging.getLogger(__name__)


class LiveSource:
    """From the offer to the end of the last batch that it pulled: ``run``."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        instance: Instance,
        link: LinkToTarget,
        connect: Callable[[], Awaitable[Tensors]],
        inbox: Inbox,
        kv_sender: KvSender,
        ask_split: Callable[[PlanSplit], Awaitable[None]],
        lending: Callable[[bool], None],
        *,
        until_s: float,
        pull_s: float = 0.0,
    ) -> None:
        """``connect()``: to the target; ``ask_split``: tells the planner what waits, who may answer with gates;
        ``lending``: told when the queue begins and ends to be two instances'. ``until_s``: when the target must have
        accepted (monotonic). ``pull_s``: what a pull took in the pair
        before."""
        self.assignment = assignment
        self._until_s = until_s
        self.instance = instance
        self.life = PairLife()
        self._link = link
        self._connect = connect
        self._inbox = inbox
        self._kv_sender = kv_sender
        self._ask_split = ask_split
        self._lending = lending
        self._event_loop = asyncio.get_running_loop()
        self._num_layers = instance.layout.num_layers
        self.record = PairRecord(assignment)
        self._tensors: Tensors | None = None
        self._puller: Puller | None = None
        self.pull_s = pull_s
        self.handed_over = HandedOver(assignment, instance, link)
        self.target_loaded = False
        """It finishes batches itself, and owns their requests then: not before it has heard that this is known here."""
        self._has_last_word = False
        """The target ended the pair, and said what it owns."""
        self._failure = ""
        self._arrivals = asyncio.Event()
        self.is_ending = False
        """Nothing more is handed over."""
        self._done = asyncio.Event()
        self._stepper = SourceStepper(
            instance.engine.loop,
            decode_interval_s=assignment.slo_tbt_s / 2,
            start_s=self.record.started_s,
            on_done=lambda pulled: self._from_engine(self._batch_done, pulled, time.monotonic()),
            on_free=lambda: self._from_engine(self._look),
            on_token=lambda sequence, token: self._from_engine(kv_sender.computed_rest, sequence, token),
            has_room=self.handed_over.has_room,
        )

    # --- the whole of it ---------------------------------------------------------------------

    async def run(self) -> LiveReport:
        """Cooperate until the pair ends, well or not, and everything that the source has is on its way."""
        try:
            tensors = await self._offer()
            await self._redirect(tensors)
            self._puller = puller = Puller(
                self.assignment.pair_id,
                self.instance,
                self.handed_over,
                self._link,
                self._stepper,
                tensors,
                self._kv_sender,
                pull_s=self.pull_s,
            )
            async with asyncio.TaskGroup() as group:
                handed_over = group.create_task(self._hand_arrivals(tensors))
                alive = group.create_task(self._link.keep_alive())
                await self._pull_until_over(puller)
                # A batch whose hand-over was answered has its hidden states sent: not cancelled in between.
                self.is_ending = True
                self._arrivals.set()
                await handed_over
                await puller.until_all_is_over()
                alive.cancel()
            await self._dissolve(puller)
        except* (LinkLost, BlitzError) as errors:
            await self.fail(str(errors.exceptions[0]))
        except* Exception as errors:  # a bug of ours must not keep what clients wait for
            log.error("pair %s broke", self.assignment.pair_id, exc_info=errors)
            await self.fail(f"{type(errors.exceptions[0]).__name__}: {errors.exceptions[0]}")
        await self.until_kv_is_over()
        with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
            await self.handed_over.end(self._doubt())
            while self._stepper.ready:
                self._done.clear()
                await self._done.wait()
            await self.handed_over.call(self._detach)
        self._lending(False)
        if self._puller is not None:
            self.pull_s = self._puller.time.pull_s
        return self.record.report(self.life.state, self._failure, self._stepper.layers, self._stepper.tokens)

    async def until_kv_is_over(self) -> None:
        """Until nothing is written into blocks any more but by the engine. Short once the pair is lost."""
        if self._puller is not None:
            await self._puller.until_kv_is_over()

    async def close(self) -> None:
        """After ``run``, which may have been cancelled: the process ends."""
        if self._puller is not None:
            await self._puller.stop()

    def arrived(self) -> None:
        """A request was accepted: it goes the way of the others."""
        self._arrivals.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """A request was cancelled: the target need not compute it."""
        self.handed_over.cancelled(request_id, attempt)

    def ended_by_target(self, reason: str, finished: Iterable[str]) -> None:
        """The target says that the pair is over, and which batches it owns."""
        if not self.life.ended:
            self._has_last_word = True
            self._taken_by_target(finished)
        self._link.lose(reason)

    def lost(self, reason: str) -> None:
        """The pair cannot go on."""
        self._link.lose(reason)

    # --- offered, redirecting ------------------------------------------------------------------

    async def _offer(self) -> Tensors:
        await self._link.offer(self.assignment, self._until_s)
        self._tensors = tensors = await self._connect()
        self._link.watch(tensors)
        self.life.move_to(PairState.REDIRECTING)
        return tensors

    async def _redirect(self, tensors: Tensors) -> None:
        handed_over = self.handed_over
        await handed_over.lend(self._begin_lending)
        self._lending(True)
        await handed_over.hand_over(tensors, behind_seal=False)
        await self._link.ask_pair(
            "seal", Seal(pair_id=self.assignment.pair_id, count=handed_over.queue.num_handed), Ack
        )
        self.life.move_to(PairState.COOPERATING)
        trace.get_current_span().add_event("sealed", {"blitz.batches": handed_over.queue.num_handed})
        await self._ask_for_split()

    def _begin_lending(self) -> None:
        loop = self.instance.engine.loop
        if loop.partial is not None:
            raise Conflict(f"{self.instance.instance_id} is in another pair")
        loop.partial = self._stepper
        loop.scheduler.table.lending = True

    async def _hand_arrivals(self, tensors: Tensors) -> None:
        while not self.is_ending:
            await self._arrivals.wait()
            self._arrivals.clear()
            if not self.is_ending:
                await self.handed_over.lend()
                await self.handed_over.hand_over(tensors, behind_seal=True, until=lambda: self.is_ending)

    async def _ask_for_split(self) -> None:
        waiting = self.handed_over.queue.to_split(self.assignment.policy, self.instance.engine.loop.prefill_token_s)
        if not waiting:
            return
        try:
            await self._ask_split(
                PlanSplit(
                    pair_id=self.assignment.pair_id,
                    batches=waiting,
                    source_free_s=self._stepper.remaining_s,
                    pull_s=self.pull_s,
                )
            )
        except BlitzError as error:
            log.info("pair %s goes without a split: %s", self.assignment.pair_id, error)

    # --- cooperating, loaded -------------------------------------------------------------------

    async def _pull_until_over(self, puller: Puller) -> None:
        await self.handed_over.call(lambda: self._stepper.stepped(StepOutput(())))  # is it free already?
        while True:
            await puller.until_free()
            if self._is_over():
                break
            answer = await puller.pull()
            self.target_loaded = self.target_loaded or answer.loaded
            if self.target_loaded and self.life.state is PairState.COOPERATING:
                self.life.move_to(PairState.LOADED)
            then = after_pull(
                pulled=bool(answer.batch_id),
                can_dissolve=answer.can_dissolve,
                gets_prompts=self._gets_prompts(),
                has_backlog=bool(self.handed_over.queue.backlog),
            )
            if then is AfterPull.DISSOLVE:
                break
            if then is AfterPull.HAND_OVER:
                self._arrivals.set()
            elif then is AfterPull.RUN_BACKLOG:
                await puller.run_from_backlog()

    def _gets_prompts(self) -> bool:
        """Not once it drains, or decodes for others instead: then the pair shares what is there, and no more."""
        return self.instance.state == "serving" and self.instance.role in TAKES_PROMPTS

    def _look(self) -> None:
        if self._puller is not None:
            self._puller.free.set()

    # --- the end -----------------------------------------------------------------------------

    async def _dissolve(self, puller: Puller) -> None:
        pair_id = self.assignment.pair_id
        claim_id = f"{pair_id}-end"
        async with self.handed_over.lock:  # nothing is on its way there
            answer = await self._link.ask_pair(
                "dissolve",
                Dissolve(
                    pair_id=pair_id,
                    claim_id=claim_id,
                    first_serial=puller.num_claims,
                    source_busy_s=self._stepper.remaining_s,
                ),
                Dissolved,
            )
            self.life.move_to(PairState.DISSOLVED)
            self.record.target_ran(answer.layer_runs)
            self._taken_by_target((*answer.finished, *answer.kept))
        for given in answer.given:
            if given.first_layer and given.batch_id in self.handed_over.queue.handed:
                claim = f"{claim_id}/{given.batch_id}"
                await puller.receive(given.batch_id, given.first_layer, claim, given.serial)
        await puller.until_kv_is_over()
        if any(given.first_layer for given in answer.given):
            await self._link.settle_now()
        # Untouched ones are at the target still as far as we know: they come back with all that it does not own.

    def _doubt(self) -> ErrorInfo | None:
        """What requests end with that the target may own, or not. Two instances must not go on with one attempt, whose
        tokens need not agree; another attempt goes on from the tokens that the gateway has."""
        if self.life.state is not PairState.FAILED or not self.target_loaded or self._has_last_word:
            return None
        target = self.assignment.target.worker_id
        return ErrorInfo.of(Unavailable(f"{target} may have finished the prompt, and does not answer: {self._failure}"))

    def on_taken(self, message: Taken) -> Ack:
        """The target finished batches: their requests are its own. Raises ``Conflict`` once the pair has failed: the
        target must finish nothing any more."""
        if self.life.state is PairState.FAILED:
            raise Conflict(f"pair {self.assignment.pair_id} has failed here: {self._failure}")
        self._taken_by_target(message.batch_ids)
        if self.handed_over.queue.backlog:
            self._arrivals.set()  # the target has capacity now
        if message.loaded and not self.target_loaded:
            self.target_loaded = True
            if self._is_over():
                self._look()  # busy or not. Others ask for a batch once they are free, as ever
        return Ack()

    def _is_over(self) -> bool:
        parting = self.record.is_full or parts(self.assignment.policy, target_loaded=self.target_loaded)
        return parting and not self.life.ended

    def _taken_by_target(self, batch_ids: Iterable[str]) -> None:
        batches = self.handed_over.queue.taken_by_target(batch_ids)
        for batch in batches:
            self.record.done(batch, first_layer=self._num_layers, num_layers=self._num_layers, at_s=time.monotonic())
        sequences = [s for batch in batches for s in batch.sequences]
        self._inbox.moved(sequences, self.assignment.target.worker)
        self.instance.engine.call(lambda loop: loop.scheduler.release_to_target(sequences), between_layers=True)

    def _batch_done(self, pulled: SourceBatch, at_s: float) -> None:
        if pulled.has_failed and pulled.kv_direct:
            self._kv_sender.forget(pulled.batch.sequences)  # it is computed from the beginning
        self.record.done(pulled.batch, first_layer=pulled.first_layer, num_layers=self._num_layers, at_s=at_s)
        self._done.set()

    async def fail(self, reason: str) -> None:
        """The pair is over here, and the target is told."""
        if not self.life.fail():
            return
        self._failure = reason
        log.warning("pair %s failed: %s", self.assignment.pair_id, reason)
        trace.get_current_span().add_event("failed", {"blitz.reason": reason})
        self._link.lose(reason)
        if self._tensors is not None:
            self._tensors.abort()
        await self._link.tell_ended(reason)

    def _detach(self) -> None:
        loop = self.instance.engine.loop
        if loop.partial is self._stepper:
            loop.partial = None

    # --- inside ------------------------------------------------------------------------------

    def _from_engine(self, function: Callable[..., None], *arguments: object) -> None:
        self._event_loop.call_soon_threadsafe(function, *arguments)
