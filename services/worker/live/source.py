"""The source of a pair: it carries out what its machine (``services.worker.core.live.source``) decides.

Every request of the pair was accepted by the source's scheduler and stays accepted there, so that the source can
compute it whether or not the target lives.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from opentelemetry import trace

from services.worker.core.live import source_words as core
from services.worker.core.live.batch import Key, Request
from services.worker.core.live.machine import Abort, Begin, Cancelled, Finish, Over, RunPart, SendHidden, TellEnded
from services.worker.core.live.source import SourceMachine
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import LANDED, Completion, Landed, landed
from services.worker.engine.loop import StepOutput
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.sender import KvSender
from services.worker.link import LinkLost
from services.worker.live.batches import PromptBatch
from services.worker.live.kv_fetch import KvFetch
from services.worker.live.links import LinkToTarget
from services.worker.live.member import Carriers, PairMember
from services.worker.live.report import MAX_BATCHES, PairRecord, Timeline
from services.worker.live.tensors import Kind, PairTensors
from services.worker.requests.inbox import Inbox
from shared.errors import (
    BadRequest,
    BlitzError,
    DeadlineExceeded,
    Internal,
    Overloaded,
    PayloadTooLarge,
    TransportError,
)
from shared.messages.codec import Message
from shared.messages.common import TAKES_PROMPTS, Ack
from shared.messages.live import (
    Dissolve,
    Dissolved,
    HandOver,
    LiveReport,
    PlanSplit,
    Pull,
    Pulled,
    Seal,
    Taken,
    ZigzagAssignment,
)

log = logging.getLogger(__name__)


class LiveSource(PairMember[SourceMachine]):
    """From the offer to the end of the last batch that it pulled: ``run``."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        instance: Instance,
        link: LinkToTarget,
        connect: Callable[[], Awaitable[PairTensors]],
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
        accepted (monotonic). ``pull_s``: what a pull took in the pair before."""
        config = instance.scheduler
        super().__init__(
            SourceMachine(
                assignment,
                instance.layout.num_layers,
                chunk_tokens=config.prefill_chunk_tokens,
                max_sequences=config.max_num_sequences,
                max_batches=MAX_BATCHES,
                pull_s=pull_s,
            ),
            instance.layered,
            decode_interval_s=assignment.slo_tbt_s / 2,
        )
        self.assignment = assignment
        self.instance = instance
        self.record = PairRecord(assignment)
        self.layers, self.tokens = Timeline(self.record.started_s), Timeline(self.record.started_s)
        self._until_s = until_s
        self._link = link
        self._connect = connect
        self._inbox = inbox
        self._kv_sender = kv_sender
        self._ask_split = ask_split
        self._lending = lending
        self._num_layers = instance.layout.num_layers
        self._sequences: dict[Key, ActiveSequence] = {}
        """Lent, and in no batch of ``_held``."""
        self.held: dict[str, PromptBatch] = {}
        self._tensors: PairTensors | None = None
        self._living: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._span = trace.get_current_span()

    @property
    def pull_s(self) -> float:
        """What a pull takes, as measured."""
        return self.machine.time.pull_s

    async def run(self) -> LiveReport:
        """Cooperate until the pair ends, well or not, and everything that the source has is on its way."""
        self._context, self._span = contextvars.copy_context(), trace.get_current_span()
        self.handle(Begin())
        await self._over.wait()
        await self.until_done(TellEnded)
        return self.record.report(self.machine.life.state, self.machine.failure, self.layers, self.tokens)

    async def until_kv_is_over(self) -> None:
        """Until nothing is written into blocks any more but by the engine. Short once the pair is lost."""
        await self.until_done(core.FetchKv)

    # --- what it is told ---------------------------------------------------------------------

    def arrived(self) -> None:
        """A request was accepted: it goes the way of the others."""
        self.handle(core.RequestArrived())

    def cancel(self, request_id: str, attempt: int) -> None:
        """A request was cancelled, which the scheduler may have heard, or not yet: the target is told in any case."""
        self.handle(Cancelled(((request_id, attempt),)))

    async def on_taken(self, message: Taken) -> Message:
        """The target finished batches: their requests are its own. Raises ``Conflict`` once the pair has failed: the
        target must finish nothing any more."""
        return await self._asked(lambda number: core.TargetAsks(number, message))

    def ended_by_target(self, reason: str, finished: tuple[str, ...]) -> None:
        """The target says that the pair is over, and which batches it owns."""
        self.handle(core.TargetEnded(reason, finished))

    async def fail(self, reason: str) -> None:
        """The pair is over here, and the target is told."""
        self.lose(reason)
        await self.until_done(TellEnded)

    # --- PartialWork -------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.machine.has_runs

    def stepped(self, output: StepOutput) -> None:
        """See ``PartialWork``."""
        if output.outputs:
            self.tokens.add(time.monotonic(), sum(len(o.token_ids) for o in output.outputs))
        self._look()

    # --- where the engine is -----------------------------------------------------------------

    def _look(self, _: core.Look | None = None) -> None:
        """Another batch may be asked for, if there is nothing else to run soon, and room for more."""
        scheduler = self._engine.loop.scheduler
        with self._lock:
            lengths, is_idle = self.machine.expected_lengths, self.machine.is_idle
        if is_idle and not scheduler.has_prefill and (not lengths or scheduler.reservations.fits(lengths)):
            self.handle(core.EngineFree())

    def _lend(self, action: core.Lend) -> core.Lent | None:
        loop = self._engine.loop
        if action.begins:
            if loop.partial is not None:
                return None
            loop.partial = self
            loop.scheduler.table.lending = True
        lent = loop.scheduler.lend()
        self._sequences.update((s.key, s) for s in lent)
        return core.Lent(tuple(Request(s.key, s.num_tokens) for s in lent), loop.prefill_token_s)

    def batch(self, batch_id: str) -> PromptBatch:
        """From either thread."""
        with self._lock:
            held = self.held.get(batch_id)
            if held is None:
                keys = self.machine.batches[batch_id].keys
                held = self.held[batch_id] = PromptBatch(batch_id, tuple(self._sequences.pop(key) for key in keys))
        return held

    def _begin_batch(self, action: core.BeginBatch) -> object:
        """Its KV may be imported from now on, if it is run from another layer than the first."""
        batch, loop = self.batch(action.batch_id), self._engine.loop
        if not batch.ended and not loop.scheduler.reservations.reserve(batch.sequences):
            return False
        now_s = time.monotonic()
        for sequence in batch.sequences:
            sequence.first_scheduled_s = sequence.first_scheduled_s or now_s
        if not action.first_layer or batch.ended:
            return True
        try:
            steps = loop.batches.of_prompts(batch.sequences)
            resumed = batch.activation = loop.engine.resume(steps, batch.hidden, next_layer=action.first_layer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the batch ends with it in its turn
            self._failed(batch, error)
            return True
        return self._land(action, batch, resumed, lambda _: self._resumed(batch, resumed))

    def _resumed(self, batch: PromptBatch, resumed: Completion[Any]) -> bool:
        if resumed.error is not None:
            self._failed(batch, resumed.error)
        return True

    def _run_part(self, action: RunPart) -> object:
        batch, loop = self.batch(action.batch_id), self._engine.loop
        if batch.ended:
            return self._launch(action, batch, LANDED, lambda _: self._not_run(batch))
        try:
            if batch.broken is not None:
                raise batch.broken
            if batch.activation is None:
                batch.activation = loop.engine.embed(loop.batches.of_prompts(batch.sequences))
            ran = loop.engine.run_part(batch.activation, action.layer, action.begin, action.end)
        except Exception as error:  # noqa: BLE001 - an engine may raise anything
            ran = Landed(error=error)
        return self._launch(action, batch, ran, lambda busy_s: self._part_ran(action, batch, ran, busy_s))

    def _not_run(self, batch: PromptBatch) -> core.Ran:
        batch.forget_tensors()
        return core.Ran.NOT

    def _part_ran(self, action: RunPart, batch: PromptBatch, ran: Completion[None], busy_s: float) -> core.Ran:
        if (error := ran.error or batch.broken) is not None:
            return self._failed(batch, error)
        batch.busy_s += busy_s
        if action.end == batch.num_tokens:
            self.ran_layer()
            if action.kv_leaves:
                batch.tell_layers(self._engine.loop, action.layer + 1)
        return core.Ran.WELL

    @staticmethod
    def _failed(batch: PromptBatch, error: Exception) -> core.Ran:
        """Ordinary steps find out which request the engine fails on."""
        if batch.breaks(error):
            log.error("batch %s failed: its requests are computed in steps", batch.batch_id, exc_info=error)
        return core.Ran.FAILED

    def _finish(self, action: Finish) -> object:
        batch, loop = self.batch(action.batch_id), self._engine.loop
        try:
            if batch.activation is None:
                raise Internal(f"batch {batch.batch_id} has nothing to sample from")
            sampled = loop.engine.sample(batch.activation)
        except Exception as error:  # noqa: BLE001 - as above
            sampled = Landed(error=error)
        return self._launch(action, batch, sampled, lambda busy_s: self._sampled(action, batch, sampled, busy_s))

    def _sampled(
        self, action: Finish, batch: PromptBatch, sampled: Completion[list[Sampled]], busy_s: float
    ) -> core.Ran:
        loop = self._engine.loop
        try:
            self._output = batch.adopt(loop, sampled.result(), kv_here=action.kv_here)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(batch, error)
        if action.kv_direct:
            for sequence in batch.sequences:
                if (token := loop.scheduler.reservations.token_of(sequence)) is not None:
                    self._soon(self._kv_sender.computed_rest, sequence, token)
        seconds = (batch.busy_s + busy_s) * self._num_layers / (self._num_layers - action.first_layer)
        loop.measured_prefill(batch.num_tokens, seconds)
        batch.forget_tensors()
        return core.Ran.WELL

    def _conclude(self, action: core.Conclude) -> None:
        reservations = self._engine.loop.scheduler.reservations
        action.how.apply(reservations, self.batch(action.batch_id).sequences)

    def _release_to_target(self, action: core.ReleaseToTarget) -> None:
        sequences = [s for i in action.batch_ids for s in self.batch(i).sequences]
        self._engine.loop.scheduler.release_to_target(sequences)

    def _restore(self, action: core.Restore) -> None:
        scheduler = self._engine.loop.scheduler
        scheduler.table.lending = False
        scheduler.take_back([s for i in action.batch_ids for s in self.batch(i).sequences])
        if action.doubt is not None:
            scheduler.abort([s for i in action.in_doubt for s in self.batch(i).sequences], action.doubt)
        scheduler.take_back([self._sequences[key] for key in action.keys])

    # --- on the event loop: what the target is asked -----------------------------------------

    async def _offer(self, _: core.AskOffer) -> None:
        await self._link.offer(self.assignment, self._until_s)
        self._tensors = tensors = await self._connect()
        self._link.watch(tensors)

    @property
    def _connected(self) -> PairTensors:
        if self._tensors is None:
            raise LinkLost("there is no connection to the target")
        return self._tensors

    async def _hand_over(self, action: core.AskHandOver) -> core.HandOverAnswer:
        batch, record = self.batch(action.batch.batch_id), self.instance.record
        if batch.ended:
            return core.HandOverAnswer(taken=False, asked=False)
        message = HandOver(
            pair_id=self.assignment.pair_id,
            batch_id=batch.batch_id,
            serial=action.serial,
            layer_s=action.batch.layer_s,
            requests=batch.submits(self.assignment.target.instance_id, record.name, record.model_hash),
            behind_seal=action.behind_seal,
        )
        try:
            await self._link.ask_pair("hand_over", message, Ack)
        except (Overloaded, BadRequest, PayloadTooLarge) as error:
            log.debug("batch %s stays here: %s", batch.batch_id, error)
            return core.HandOverAnswer(taken=False)
        return core.HandOverAnswer(taken=True, ended=tuple(s.key for s in batch.sequences if s.finished))

    async def _send_hidden(self, action: SendHidden) -> None:
        """Embedded beside the engine's thread: of a long prompt this is much to copy, and decodes need not wait for it.
        The transport cuts nothing off what it is given: the next hand-over need not wait for these to be there."""
        tokens, engine = self.batch(action.batch_id).token_ids(), self._engine.loop.engine
        hidden = await landed(await asyncio.to_thread(engine.embed_tokens, tokens))
        if self.machine.life.ended:
            return  # nobody would wait for it, nor give it up
        self._connected.send(hidden, action.serial, Kind.HANDED_HIDDEN)

    async def _ask(self, action: core.AskTarget) -> tuple[Message, bool]:
        asked = action.message
        answer: Message
        match asked:
            case Seal():
                answer = await self._link.ask_pair("seal", asked, Ack)
                self._span.add_event("sealed", {"blitz.batches": asked.count})
            case Pull():
                answer = await self._link.ask_pair("pull", asked, Pulled, wait_s=asked.wait_s)
            case Dissolve():
                answer = parted = await self._link.ask_pair("dissolve", asked, Dissolved)
                self.record.target_ran(parted.layer_runs)
            case _:
                answer = await self._link.settle_now()
        return answer, self.instance.state == "serving" and self.instance.role in TAKES_PROMPTS

    async def _split(self, action: core.AskSplit) -> None:
        pair_id = self.assignment.pair_id
        try:
            await self._ask_split(
                PlanSplit(
                    pair_id=pair_id,
                    batches=action.batches,
                    source_free_s=action.source_free_s,
                    pull_s=action.pull_s,
                )
            )
        except BlitzError as error:
            log.info("pair %s goes without a split: %s", pair_id, error)

    async def _receive_hidden(self, action: core.ReceiveHidden) -> bool:
        batch = self.batch(action.batch_id)
        num_bytes = batch.num_tokens * self._engine.loop.engine.hidden_bytes_per_token
        try:
            receiving = self._connected.receive(num_bytes, action.serial, Kind.PULLED_HIDDEN)
            batch.hidden = await self._link.until(receiving)
        except (TransportError, DeadlineExceeded) as error:
            log.warning("batch %s is computed from the beginning: %s", action.batch_id, error)
        return batch.hidden is not None

    def _send_rest(self, action: core.SendRest) -> None:
        async def over() -> None:
            self.handle(core.RestOver(action.batch_id))

        self._kv_sender.send_rest(self.batch(action.batch_id).sequences, action.first_layer, over)

    async def _fetch_kv(self, action: core.FetchKv) -> bool:
        kv = KvFetch(self.assignment.pair_id, self._engine.loop.engine, self._link, self._connected)
        return await kv.fetch(self.batch(action.batch_id), action.serial, action.first_layer)

    # --- on the event loop: the rest ---------------------------------------------------------

    def _keep_alive(self, action: core.KeepAlive) -> None:
        if self._living is not None:
            self._living.cancel()
        self._living = self._start_acting(action, self._link.keep_alive()) if action.on else None

    def _batch_done(self, action: core.Done) -> None:
        batch = self.batch(action.batch_id)
        if action.forget:
            self._kv_sender.forget(batch.sequences)  # it is computed from the beginning
        self.record.done(batch, first_layer=action.first_layer, num_layers=self._num_layers, at_s=action.at_s)

    def _moved(self, action: core.Moved) -> None:
        for batch_id in action.batch_ids:
            batch = self.batch(batch_id)
            self.record.done(batch, first_layer=self._num_layers, num_layers=self._num_layers, at_s=action.at_s)
            self._inbox.moved(batch.sequences, self.assignment.target.worker)

    def _abort(self, action: Abort) -> None:
        self._link.lose(action.reason)
        if self._tensors is not None:
            self._tensors.abort()

    def _tell_ended(self, action: TellEnded) -> Coroutine[Any, Any, None]:
        log.warning("pair %s failed: %s", self.assignment.pair_id, action.reason)
        self._span.add_event("failed", {"blitz.reason": action.reason})
        return self._link.tell_ended(action.reason)

    def _tell_cancelled(self, action: core.TellCancelled) -> None:
        for key in action.keys:
            self._link.cancel(*key)

    def _carriers(self) -> Carriers:
        return {
            core.Lend: self._lend,
            core.Look: self._look,
            core.BeginBatch: self._begin_batch,
            RunPart: self._run_part,
            Finish: self._finish,
            core.Conclude: self._conclude,
            core.LookAtRest: lambda action: self.batch(action.batch_id).ended,
            core.ReleaseToTarget: self._release_to_target,
            core.Restore: self._restore,
            core.AskOffer: self._offer,
            core.AskHandOver: self._hand_over,
            SendHidden: self._send_hidden,
            core.AskTarget: self._ask,
            core.AskSplit: self._split,
            core.ReceiveHidden: self._receive_hidden,
            core.SendRest: self._send_rest,
            core.FetchKv: self._fetch_kv,
            core.KeepAlive: self._keep_alive,
            core.Lending: lambda action: self._lending(action.begun),
            core.Done: self._batch_done,
            core.WithholdKv: lambda action: self._kv_sender.forget(self.batch(action.batch_id).sequences),
            core.SettleSoon: lambda action: self._link.settle(action.claim_id),
            core.TellCancelled: self._tell_cancelled,
            core.Moved: self._moved,
            Abort: self._abort,
            TellEnded: self._tell_ended,
            Over: lambda _: self._over.set(),
        }
