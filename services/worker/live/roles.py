"""Who this worker is in which pair: the source of at most one, and the target of at most one. All that concerns its
pairs comes in here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.worker.core.live.life import check_target, why_no_source
from services.worker.core.live.machine import EngineStopped
from services.worker.core.scheduling.gateways import Gone
from services.worker.instance.instance import Instance, InstanceSlot
from services.worker.instance.progress import ProgressReporter
from services.worker.kv_transfer.connector import KvConnector
from services.worker.kv_transfer.sender import KvSender
from services.worker.live.links import LinkToTarget
from services.worker.live.report import REPORT_EVERY_S, annotate, declined
from services.worker.live.source import LiveSource
from services.worker.live.target import LiveTarget
from services.worker.live.tensors import PairTensors
from services.worker.requests.inbox import Inbox
from services.worker.weights.peers import TENSOR_LANE, PeerChannels
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus, Subscription
from shared.errors import BlitzError, Conflict, NotFound
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.live import (
    Dissolve,
    Dissolved,
    HandOver,
    LiveOffer,
    PairEnded,
    PlanSplit,
    Pull,
    PullKv,
    Seal,
    Settle,
    Taken,
    ZigzagAssignment,
)
from shared.messages.plans import ChainMember
from shared.subjects import Process
from shared.telemetry import tracer

log = logging.getLogger(__name__)

SPLIT_TIMEOUT_S = 1.0
PAIRED_QUEUE_FACTOR = 2
LEAVE_S = 2.0
MAX_DISSOLVED = 8

M = TypeVar("M", HandOver, Seal, Pull, PullKv, Settle)


class PairRoles:
    """Event loop only. Messages to a pair that is not here raise ``NotFound``."""

    def __init__(
        self,
        bus: Bus,
        connector: KvConnector,
        worker: Process,
        peers: PeerChannels,
        inbox: Inbox,
        kv_sender: KvSender,
        progress: ProgressReporter,
        slot: InstanceSlot,
        *,
        silence_s: float,
    ) -> None:
        """``slot``: this worker's. ``silence_s``: a member that says nothing for so long is gone."""
        self._bus = bus
        self._connector = connector
        self._worker = worker
        self._peers = peers
        self._inbox = inbox
        self._kv_sender = kv_sender
        self._progress = progress
        self._instance = slot.current
        self._changed = slot.changed
        self._silence_s = silence_s
        self.source: LiveSource | None = None
        """The pair whose source this worker is."""
        self.target: LiveTarget | None = None
        """The pair whose target this worker is."""
        self.pull_s = 0.0
        """What a pull took in the last pair: the next one expects as much."""
        self._run: asyncio.Task[None] | None = None
        """The source's."""
        self._offering = asyncio.Lock()
        self._dissolved: OrderedDict[str, Dissolved] = OrderedDict()
        """What was agreed in pairs that have ended: the answer may have been lost."""
        self._tasks = OwnedTasks()

    async def subscribe(self) -> list[Subscription]:
        """Listen; the caller closes what is returned."""
        bus, me, of_target = self._bus, self._worker, self._of_target

        def live(operation: str) -> str:
            return subjects.worker_live(me, operation)

        return [
            await bus.respond(live("offer"), LiveOffer, self.on_offer),
            await bus.respond(live("hand_over"), HandOver, of_target(LiveTarget.on_hand_over)),
            await bus.respond(live("seal"), Seal, of_target(LiveTarget.on_question)),
            await bus.respond(live("pull"), Pull, of_target(LiveTarget.on_question)),
            await bus.respond(live("pull_kv"), PullKv, of_target(LiveTarget.on_question)),
            await bus.respond(live("settle"), Settle, of_target(LiveTarget.on_question)),
            await bus.respond(live("dissolve"), Dissolve, self._on_dissolve),
            await bus.respond(live("taken"), Taken, self._on_taken),
            await bus.subscribe(subjects.worker_pair_ended(me), PairEnded, self._on_pair_ended),
        ]

    def _of_target(self, answer: Callable[[LiveTarget, M], Awaitable[Message]]) -> Callable[[M], Awaitable[Message]]:
        """``answer``, called with the pair that a message is about."""

        async def respond(message: M) -> Message:
            return await answer(self._target(message.pair_id), message)

        return respond

    def _target(self, pair_id: str) -> LiveTarget:
        if self.target is None or self.target.assignment.pair_id != pair_id:
            raise NotFound(f"{self._worker} is not the target of pair {pair_id}")
        return self.target

    def _source(self, pair_id: str) -> LiveSource | None:
        source = self.source
        return source if source is not None and source.assignment.pair_id == pair_id else None

    async def _on_dissolve(self, message: Dissolve) -> Message:
        """Dissolve the pair, or say again what was agreed."""
        if (shares := self._dissolved.get(message.pair_id)) is not None:
            return shares
        return await self._target(message.pair_id).on_question(message)

    async def _on_taken(self, message: Taken) -> Message:
        """The target finished batches."""
        source = self._source(message.pair_id)
        if source is None:
            raise NotFound(f"{self._worker} is not the source of pair {message.pair_id}")
        return await source.on_taken(message)

    def _on_pair_ended(self, message: PairEnded) -> None:
        """The other member says that the pair is over."""
        if (source := self._source(message.pair_id)) is not None:
            source.ended_by_target(f"the target ended the pair: {message.reason}", message.finished)
        if self.target is not None and self.target.assignment.pair_id == message.pair_id:
            self._tasks.start(self.target.fail(f"the source ended the pair: {message.reason}", tell=False))

    # --- from the planner --------------------------------------------------------------------

    async def on_assignment(self, assignment: ZigzagAssignment, stored_s: float) -> None:
        """Begin a pair as its source. As its target take the gates of a later revision; the first one comes as the
        source's offer. Others' assignments are ignored. ``stored_s``: when the stream took it (monotonic)."""
        if assignment.target.worker == self._worker:
            target = self.target
            if assignment.revision and target is not None and target.assignment.pair_id == assignment.pair_id:
                target.set_gates(assignment.gates)
        elif assignment.source.worker == self._worker and not assignment.revision:
            await self._begin_as_source(assignment, stored_s + assignment.valid_s)

    # --- as source ---------------------------------------------------------------------------

    async def _begin_as_source(self, assignment: ZigzagAssignment, until_s: float) -> None:
        """Begin a pair, or report why not."""
        instance = self._instance()
        if self._source(assignment.pair_id) is not None:
            return  # delivered again
        reason = why_no_source(
            assignment,
            left_s=until_s - time.monotonic(),
            instance_id="" if instance is None else instance.instance_id,
            state="spare" if instance is None else instance.state,
            role="colocated" if instance is None else instance.role,
            as_source="" if self.source is None else self.source.assignment.pair_id,
            as_target="" if self.target is None else self.target.assignment.pair_id,
        )
        if reason or instance is None:
            log.info("pair %s is not made: %s", assignment.pair_id, reason)
            await self._bus.publish(subjects.live_reports(), declined(assignment, reason))
            return
        target = assignment.target

        async def connect() -> PairTensors:
            return await self._connect(target, target.epoch)

        async def ask_split(request: PlanSplit) -> None:
            await self._bus.request(subjects.planner("split"), request, Ack, timeout_s=SPLIT_TIMEOUT_S)

        link = LinkToTarget(self._bus, target.worker, assignment.pair_id, silence_s=self._silence_s)

        def lending(begun: bool) -> None:
            instance.queue_factor = PAIRED_QUEUE_FACTOR if begun else 1
            self._changed()

        self.source = LiveSource(
            assignment,
            instance,
            link,
            connect,
            self._inbox,
            self._kv_sender,
            ask_split,
            lending,
            until_s=until_s,
            pull_s=self.pull_s,
        )
        self._run = asyncio.create_task(self._cooperate(self.source))

    async def _cooperate(self, source: LiveSource) -> None:
        assignment = source.assignment
        attributes = {
            "blitz.pair_id": assignment.pair_id,
            "blitz.plan_id": assignment.plan_id,
            "blitz.worker_id": self._worker.id,
            "blitz.target": assignment.target.worker_id,
            "blitz.policy": assignment.policy,
            "blitz.why": assignment.why,
        }
        try:
            with tracer().start_as_current_span("worker.live", attributes=attributes) as span:
                telling = asyncio.create_task(self._tell_news(source))
                try:
                    report = await source.run()
                finally:
                    telling.cancel()
                    await asyncio.wait([telling])
                self.pull_s = source.pull_s
                annotate(span, report)
                await self._bus.publish(subjects.live_reports(), report)
            log.info("pair %s %s: %d batches", report.pair_id, report.outcome, len(report.batches))
        except BlitzError as error:
            log.warning("pair %s ended without a report: %s", assignment.pair_id, error)
        finally:
            self.source = None

    async def _tell_news(self, source: LiveSource) -> None:
        """Until cancelled: whoever looks sees batches as they are done."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if (news := source.record.news()) is not None:
                with contextlib.suppress(BlitzError):
                    await self._bus.publish(subjects.live_reports(), news)

    # --- as target ---------------------------------------------------------------------------

    async def on_offer(self, offer: LiveOffer) -> Ack:
        """Accept a pair. Raises ``NotFound`` while the instance is not here, ``Conflict`` when it needs no pair."""
        async with self._offering:  # a repeat waits for what it repeats
            return await self._accept(offer.assignment)

    async def _accept(self, assignment: ZigzagAssignment) -> Ack:
        if self.target is not None and self.target.assignment.pair_id == assignment.pair_id:
            return Ack()
        instance, wanted = self._instance(), assignment.target
        if instance is None:
            raise NotFound(f"{self._worker} does not load {wanted.instance_id}")
        check_target(assignment, instance_id=instance.instance_id, epoch=instance.epoch, state=instance.state)
        if self.target is not None:
            raise Conflict(f"{wanted.instance_id} is in {self.target.assignment.pair_id}: no pair")
        tensors = await self._connect(assignment.source, wanted.epoch)
        if self._instance() is not instance or instance.state != "loading" or self.target is not None:
            raise Conflict(f"{wanted.instance_id} is {instance.state}: no pair")
        instance.go_live()
        silence_s = self._silence_s
        target = LiveTarget(assignment, instance, self._bus, tensors, self._inbox, self._kv_sender, silence_s=silence_s)
        self.target = target
        instance.on_layer_ready = target.layers_ready
        target.begin()
        self._changed()
        self._tasks.start(self._until_ended(target))
        await self._progress.tell(
            assignment.plan_id, instance.instance_id, "live", detail=f"with {assignment.source.worker_id}"
        )
        return Ack()

    async def _until_ended(self, target: LiveTarget) -> None:
        await target.ended.wait()
        if target.shares is not None:
            self._dissolved[target.assignment.pair_id] = target.shares
            if len(self._dissolved) > MAX_DISSOLVED:
                self._dissolved.popitem(last=False)
        if self.target is target:
            self.target = None
            target.instance.on_layer_ready = lambda: None

    # --- from this worker --------------------------------------------------------------------

    def loaded(self, instance: Instance) -> None:
        """The instance has everything."""
        if self.target is not None and self.target.instance is instance:
            self.target.layers_ready()

    async def instance_gone(self, instance: Instance, reason: str) -> None:
        """The instance's engine is about to stop: its pairs end before."""
        if self.target is not None and self.target.instance is instance:
            with contextlib.suppress(TimeoutError):  # the engine is stuck: it ends without this
                async with asyncio.timeout(LEAVE_S):
                    await self.target.leave(reason)
        source = self.source
        if source is not None and source.instance is instance and self._run is not None:
            source.lose(reason)
            await source.until_kv_is_over()
            _, left = await asyncio.wait({self._run}, timeout=LEAVE_S)
            if left:  # layers that it would not run any more: it ends their requests with the others
                source.handle(EngineStopped())

    def arrived(self) -> None:
        """A request was accepted here."""
        if self.source is not None:
            self.source.arrived()

    def cancel(self, request_id: str, attempt: int) -> None:
        """A request is not wanted any more; the other member has to know as well."""
        if self.target is not None:
            self.target.cancel(request_id, attempt)
        if self.source is not None:
            self.source.cancel(request_id, attempt)

    def cancel_gateway(self, gone: Gone) -> None:
        """Gateways are gone. The other member notices by itself."""
        if self.target is not None:
            self.target.cancel_gateway(gone)

    async def close(self) -> None:
        """Leave both pairs and wait for what runs."""
        source = self.source
        if source is not None:
            await source.fail("the source leaves")
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
        if source is not None:
            await source.close()
        if self.target is not None:
            await self.target.close()
        await self._tasks.close()

    async def _connect(self, other: ChainMember, epoch: int) -> PairTensors:
        """For tensors to and from the other member, under the target's epoch."""
        channel = await self._peers.channel(other.transport_address, other.host, lane=TENSOR_LANE)
        return PairTensors(self._connector, channel, epoch, timeout_s=self._silence_s)
