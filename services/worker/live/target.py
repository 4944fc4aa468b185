"""The target of a pair: it carries out what its machine (``services.worker.core.live.target``) decides."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec

from services.worker.core.live import target_words as core
from services.worker.core.live.batch import Batch, Key, Request
from services.worker.core.live.life import PairState
from services.worker.core.live.machine import (
    Abort,
    AnswerQuestion,
    Begin,
    Cancelled,
    Detach,
    Finish,
    HasLanded,
    Lost,
    Over,
    RunPart,
    SendHidden,
    TellEnded,
)
from services.worker.core.live.target import WATCH_S, TargetMachine
from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion, Landed, landed
from services.worker.engine.loop import StepOutput
from services.worker.engine.thread import After
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.sender import KvSender
from services.worker.live.batches import PromptBatch
from services.worker.live.links import LinkToSource
from services.worker.live.member import LATER, Carriers, PairMember
from services.worker.live.tensors import Kind, PairTensors
from services.worker.requests.inbox import Inbox
from shared.bus.base import Bus
from shared.errors import BadRequest, BlitzError, Internal
from shared.messages.codec import Message
from shared.messages.live import (
    Dissolve,
    Dissolved,
    Gate,
    HandOver,
    Pull,
    Pulled,
    PullKv,
    Seal,
    Settle,
    ZigzagAssignment,
)

log = logging.getLogger(__name__)


class LiveTarget(PairMember[TargetMachine]):
    """From the offer to the last of its batches. ``ended`` is set then."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        instance: Instance,
        bus: Bus,
        tensors: PairTensors,
        inbox: Inbox,
        kv_sender: KvSender,
        *,
        silence_s: float,
    ) -> None:
        """``silence_s``: a source that says nothing for so long is gone."""
        config = instance.scheduler
        super().__init__(
            TargetMachine(
                assignment,
                instance.layout.num_layers,
                part_tokens=config.prefill_chunk_tokens,
                limit_tokens=config.limit_tokens,
                ordered_s=instance.ordered_s,
            ),
            instance.layered,
            decode_interval_s=assignment.slo_tbt_s / 2,
        )
        self.assignment = assignment
        self.instance = instance
        self.ended = asyncio.Event()
        self.shares: Dissolved | None = None
        """What was agreed in the end."""
        self._tensors = tensors
        self._inbox = inbox
        self._kv_sender = kv_sender
        self._link = LinkToSource(assignment, bus, tensors, self.machine.life, silence_s=silence_s)
        self.offered: dict[str, PromptBatch] = {}
        """Batches of hand-overs that are not answered."""
        self.held: dict[str, PromptBatch] = {}
        """Those that are here, and those of which blocks are about to be free."""

    def begin(self) -> None:
        """The offer is accepted: hand-overs may come."""
        self.instance.layered.call(lambda loop: setattr(loop, "partial", self))
        self.handle(Begin())
        self.layers_ready()
        self._start(self._watch())

    # --- from the source ---------------------------------------------------------------------

    async def on_hand_over(self, message: HandOver) -> Message:
        """Take a batch. Raises ``Overloaded`` when there is no capacity now, ``BadRequest`` when there will never be,
        ``Conflict`` when the pair is over."""
        if not message.requests or not 0 < message.layer_s < math.inf or message.serial < 0:
            raise BadRequest(f"batch {message.batch_id!r} cannot be: {message.layer_s!r} s a layer", param="layer_s")
        sequences = tuple(self.instance.sequence_of(request) for request in message.requests)
        requests = tuple(Request(s.key, s.num_tokens) for s in sequences)
        batch = Batch(message.batch_id, requests, message.layer_s)
        self.offered.setdefault(message.batch_id, PromptBatch(message.batch_id, sequences, message.requests))
        try:
            self._link.heard()
            return await self._asked(lambda n: core.HandedOver(n, batch, message.serial, message.behind_seal))
        finally:
            self.offered.pop(message.batch_id, None)

    async def on_question(self, message: Seal | Pull | PullKv | Settle | Dissolve) -> Message:
        """Any other. Raises ``Conflict`` if the pair has failed, a sealed batch is missing, or KV is not the source's,
        ``BadRequest`` for layers that were not run."""
        self._link.heard()
        return await self._asked(lambda n: core.SourceAsks(n, message))

    # --- from the instance -------------------------------------------------------------------

    def layers_ready(self) -> None:
        """A layer more is loaded, or everything."""
        copy = self.instance.copy
        self.handle(core.LayersReady(copy.layers_ready, copy.complete))

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split was computed: hold both sides to it."""
        self.handle(core.GatesCame(gates))

    def cancel(self, request_id: str, attempt: int) -> None:
        """A request was cancelled."""
        self._cancel([(request_id, attempt)])

    def cancel_gateway(self, gone: Gone) -> None:
        """Gateways are gone."""
        self._cancel([s.key for s in self._sequences() if gone.had(s.gateway_id, s.gateway_incarnation)])

    def _cancel(self, keys: Iterable[Key]) -> None:
        self.handle(Cancelled(tuple(keys)))

    def _sequences(self) -> list[ActiveSequence]:
        return [s for batch in list(self.held.values()) for s in batch.sequences]

    async def _watch(self) -> None:
        """Until it is over: does the source still live?"""
        while not self.ended.is_set():
            await asyncio.sleep(WATCH_S)
            if reason := self._link.why_lost():
                self.lose(reason)

    async def fail(self, reason: str, *, tell: bool = True) -> None:
        """The pair is over: everything that is not owned here is dropped. ``tell``: the source may not know."""
        was_over = self.machine.life.ended
        self.handle(Lost(reason, tell))
        if not was_over:
            await self.ended.wait()
            await self.until_done(TellEnded)

    async def leave(self, reason: str) -> None:
        """The instance's engine is about to stop. Afterwards this member has left the pair."""
        await self.fail(reason)
        self.handle(core.EngineStops(reason))
        await self.ended.wait()

    async def close(self) -> None:
        """The instance or the process goes: leave the pair, and wait for what is under way."""
        await self.fail("the target leaves")
        await super().close()
        self._call(functools.partial(self._detach, Detach()))

    # --- PartialWork -------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.machine.may_run

    @property
    def num_requests(self) -> int:  # type: ignore[override]
        return self.machine.num_requests

    @property
    def queued(self) -> tuple[int, int]:  # type: ignore[override]
        return self.machine.queued

    # --- where the engine is -----------------------------------------------------------------

    def _reserve(self, action: core.Reserve) -> bool:
        batch = self.offered.get(action.batch_id)
        if batch is None or not self._engine.loop.scheduler.reservations.reserve(batch.sequences):
            return False
        self.held[action.batch_id] = batch
        return True

    def _free(self, action: core.Free) -> None:
        for batch_id in action.batch_ids:
            batch = self.held[batch_id]
            batch.forget_tensors()
            self._engine.loop.scheduler.reservations.release(batch.sequences)

    def _embed(self, action: core.Embed) -> object:
        batch = self.held.get(action.batch_id)
        if batch is None:
            return None  # what is decided where the engine is may have freed it before
        embedded = self._engine.loop.engine.embed_tokens(batch.token_ids())
        return self._land(action, batch, embedded, lambda _: setattr(batch, "hidden", embedded.result()))

    def _end_requests(self, action: core.EndRequests) -> None:
        for sequence in self._sequences():
            if sequence.key in action.keys:
                # The request may just be about to decode here.
                if sequence.reserved or sequence.id < 0:
                    sequence.finished = True
                elif not sequence.finished:
                    self._engine.loop.scheduler.cancel(*sequence.key)

    def _run_part(self, action: RunPart) -> object:
        batch, loop = self.held[action.batch_id], self._engine.loop
        try:
            if batch.activation is None:
                steps = loop.batches.of_prompts(batch.sequences)
                batch.activation = loop.engine.resume(steps, batch.hidden, next_layer=0)
                batch.hidden = None
                batch.tell_layers(loop, 0)
            ran = loop.engine.run_part(batch.activation, action.layer, action.begin, action.end)
        except Exception as error:  # noqa: BLE001 - an engine may raise anything
            ran = Landed(error=error)
        return self._launch(action, batch, ran, lambda _: self._part_ran(action, batch, ran))

    def _part_ran(self, action: RunPart, batch: PromptBatch, ran: Completion[None]) -> str | None:
        if (error := ran.error or batch.broken) is not None:  # the source computes these batches then
            if batch.breaks(error):
                log.error("layer %d of batch %s failed", action.layer, batch.batch_id, exc_info=error)
            return str(batch.broken)
        if action.end == batch.num_tokens:
            self.ran_layer()
            batch.tell_layers(self._engine.loop, action.layer + 1)
        return None

    def _finish(self, action: Finish) -> object:
        batch = self.held[action.batch_id]
        try:
            if batch.activation is None:
                raise Internal(f"batch {batch.batch_id} has nothing to sample from")
            sampled = self._engine.loop.engine.sample(batch.activation)
        except Exception as error:  # noqa: BLE001 - as above
            sampled = Landed(error=error)
        return self._launch(action, batch, sampled, lambda _: self._sampled(batch, sampled))

    def _sampled(self, batch: PromptBatch, sampled: Completion[list[Sampled]]) -> str | None:
        try:
            self._output = batch.adopt(self._engine.loop, sampled.result())
        except Exception as error:  # as above
            log.exception("the first tokens of batch %s cannot be sampled", batch.batch_id)
            return f"{type(error).__name__}: {error}"
        return None

    def _announce(self, action: core.Announce) -> None:
        batches = [self.held[i] for i in action.batch_ids if self.machine.holds(i)]
        self._inbox.announce([s for batch in batches for s in batch.sequences if not s.finished])

    def _abandon(self, action: core.Abandon) -> None:
        """Ordinary steps find out on which request the engine failed. Before everything is loaded there are none; then
        those requests end with an error, and gateways try elsewhere."""
        sequences = [s for i in action.batch_ids for s in self.held[i].sequences]
        if action.error is None:
            self._engine.loop.scheduler.reservations.compute_here(sequences)
            return
        outputs = []
        for sequence in sequences:
            if not sequence.finished:
                sequence.finished = True
                outputs.append(sequence.end("error", action.error))
        self._inbox.on_output(StepOutput(tuple(outputs)))

    # --- on the event loop -------------------------------------------------------------------

    def _reply(self, action: AnswerQuestion) -> None:
        """Of what was pulled it is said whether its KV goes straight on; of the end, which layers were run."""
        answer = action.message
        if isinstance(answer, Pulled) and answer.batch_id:
            answer = msgspec.structs.replace(answer, kv_direct=self._goes_direct(answer))
        if isinstance(answer, Dissolved):
            if self.shares is None:
                self.shares = msgspec.structs.replace(answer, layer_runs=self.layers.runs())
            answer = self.shares
        self._answered(action.question, answer)

    def _goes_direct(self, claimed: Pulled) -> bool:
        """Whether the KV of what was run of a claimed batch leaves here for the decode instances. Settled by the first
        answer; if not, it waits here for the source alone."""
        batch = self.held.get(claimed.batch_id)
        if batch is None:
            return False
        if batch.kv_direct is None:
            batch.kv_direct = self._kv_sender.share(batch.sequences, claimed.first_layer)
            if not batch.kv_direct:
                self._kv_sender.forget(batch.sequences)
        return batch.kv_direct

    async def _host(self, action: core.HostBatch) -> bool:
        batch = self.held.get(action.batch_id)
        if batch is None:
            return False  # the pair has failed meanwhile
        self._inbox.host(batch.requests)
        num_bytes = batch.num_tokens * self._engine.loop.engine.hidden_bytes_per_token
        try:
            batch.hidden = await self._tensors.receive(num_bytes, action.serial, Kind.HANDED_HIDDEN)
        except BlitzError as error:
            log.warning("the hidden states of batch %s did not arrive: %s", batch.batch_id, error)
        return batch.hidden is not None

    def _send_hidden(self, action: SendHidden) -> Coroutine[Any, Any, None]:
        return self._send_activation(action.batch_id, self.held[action.batch_id].activation, action.serial)

    async def _send_activation(self, batch_id: str, activation: Any, serial: int) -> None:
        """A failure of the transport is the source's to notice."""
        engine = self._engine.loop.engine
        try:
            hidden = await landed(await asyncio.to_thread(engine.hidden_states, activation))
        except Exception:  # an engine may raise anything; the source waits in vain, and computes it
            log.exception("batch %s is not sent back: the source computes it", batch_id)
            return
        if self.machine.life.state is PairState.FAILED:
            return  # nobody would give it up
        failure = await self._tensors.sent(self._tensors.send(hidden, serial, Kind.PULLED_HIDDEN))
        if failure is not None:
            log.info("batch %s: %s; the source computes it from the beginning", batch_id, failure)

    async def _send_kv(self, action: core.SendKv) -> None:
        """A failure of the transport is the source's to notice."""
        batch = self.held.get(action.batch_id)
        if batch is None:
            return  # settled meanwhile
        kv = batch.kv(action.first_layer, action.last_layer)
        tag = self._tensors.kv_tag(action.serial, action.first_layer)
        # Its blocks may be freed meanwhile, and written by another batch.
        outflow = self._tensors.kv_outflow(self._engine.loop.engine)
        sent = await outflow.send(kv, [tag], lies_there=lambda: self.machine.holds(action.batch_id))
        failure = await self._tensors.sent(*sent)
        if failure is not None:
            log.info("KV of batch %s: %s; the source computes it again", action.batch_id, failure)

    def _forget(self, action: core.Forget) -> None:
        for batch_id in action.batch_ids:
            batch = self.held.pop(batch_id, None)
            if batch is not None and action.theirs:
                self._kv_sender.forget(batch.sequences)
                self._inbox.unhost(batch.sequences)

    def _note(self, action: core.Note) -> None:
        log.log(logging.WARNING if action.warns else logging.INFO, "%s", action.text)

    def _await_step_end(self, action: core.AwaitStepEnd) -> object:
        self._call(lambda: self.handle(HasLanded(action)), after=After.ALL)
        return LATER

    def _carriers(self) -> Carriers:
        return {
            core.Reserve: self._reserve,
            core.Free: self._free,
            core.Embed: self._embed,
            core.EndRequests: self._end_requests,
            core.Wake: lambda _: None,  # the call itself has woken it
            RunPart: self._run_part,
            Finish: self._finish,
            core.Announce: self._announce,
            core.Abandon: self._abandon,
            AnswerQuestion: self._reply,
            core.HostBatch: self._host,
            SendHidden: self._send_hidden,
            core.SendKv: self._send_kv,
            core.Forget: self._forget,
            core.TellTaken: lambda action: self._link.tell_taken(*action.batch_ids, loaded=action.loaded),
            TellEnded: lambda action: self._link.tell_ended(action.reason, action.finished),
            core.AwaitStepEnd: self._await_step_end,
            Abort: lambda _: self._tensors.abort(),
            core.Note: self._note,
            Over: lambda _: self.ended.set(),
        }
