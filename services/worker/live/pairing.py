"""The pairs of one worker: at most one as source, one as target. Assignments and the members' messages come in here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from services.worker.instance import Instance
from services.worker.live.peer import Peer
from services.worker.live.report import declined
from services.worker.live.source import LiveSource
from services.worker.live.target import LiveTarget
from services.worker.live.tensors import Tensors
from services.worker.peers import Peers
from services.worker.progress import ProgressReporter
from services.worker.serving import Serving
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.errors import BlitzError, Conflict, NotFound
from shared.messages.common import Ack
from shared.messages.live import (
    Dissolve,
    Dissolved,
    HandOver,
    LiveOffer,
    PairEnded,
    PlanSplit,
    Pull,
    Pulled,
    Seal,
    Settle,
    Taken,
    ZigzagAssignment,
)
from shared.messages.scaling import ChainMember
from shared.telemetry import tracer
from shared.transport.base import TensorTransport

log = logging.getLogger(__name__)

LIVE_LANE = 1
"""Hidden states do not wait behind the weights that are posted to the same worker."""
SPLIT_TIMEOUT_S = 1.0
PAIRED_QUEUE_FACTOR = 2
MAX_PARTED = 8
LEAVE_S = 2.0


class Pairing:
    """Event loop only."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        worker_id: str,
        peers: Peers,
        serving: Serving,
        progress: ProgressReporter,
        instance: Callable[[], Instance | None],
        changed: Callable[[], None],
        *,
        silence_s: float,
    ) -> None:
        """``instance()``: this worker's; ``changed()``: its state did. ``silence_s``: a member that says nothing for so
        long is gone."""
        self._bus = bus
        self._transport = transport
        self._worker_id = worker_id
        self._peers = peers
        self._serving = serving
        self._progress = progress
        self._instance = instance
        self._changed = changed
        self._silence_s = silence_s
        self.source: LiveSource | None = None
        self.target: LiveTarget | None = None
        self._offering = asyncio.Lock()
        self._parted: OrderedDict[str, Dissolved] = OrderedDict()
        """What was agreed in pairs that have ended: the answer may have been lost."""
        self._run: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def subscribe(self) -> list[Subscription]:
        """Listen; the caller closes what is returned."""
        bus, me = self._bus, self._worker_id

        def live(operation: str) -> str:
            return subjects.worker_live(me, operation)

        return [
            await bus.respond(live("offer"), LiveOffer, self.on_offer),
            await bus.respond(live("hand_over"), HandOver, self._on_hand_over),
            await bus.respond(live("seal"), Seal, self._on_seal),
            await bus.respond(live("pull"), Pull, self._on_pull),
            await bus.respond(live("settle"), Settle, self._on_settle),
            await bus.respond(live("dissolve"), Dissolve, self._on_dissolve),
            await bus.respond(live("taken"), Taken, self._on_taken),
            await bus.subscribe(subjects.worker_pair_ended(me), PairEnded, self._on_pair_ended),
            await bus.subscribe_events(subjects.zigzag_assignments(), ZigzagAssignment, self.on_assignment),
        ]

    # --- as source ---------------------------------------------------------------------------

    async def on_assignment(self, assignment: ZigzagAssignment) -> None:
        """Begin a pair as its source; as its target only take the gates. Others' are ignored."""
        target = self.target
        if assignment.target.worker_id == self._worker_id:
            if assignment.revision and target is not None and target.assignment.pair_id == assignment.pair_id:
                target.set_gates(assignment.gates)
            return
        if assignment.source.worker_id != self._worker_id or assignment.revision:
            return
        instance = self._instance()
        reason = ""
        if time.time() > assignment.expires_at_s:
            reason = "it came too late"
        elif instance is None or instance.instance_id != assignment.source.instance_id:
            reason = "its source is not here any more"
        elif instance.state != "serving":
            reason = f"its source is {instance.state}"
        elif self.source is not None:
            if self.source.assignment.pair_id == assignment.pair_id:
                return  # delivered again
            reason = f"the source is in {self.source.assignment.pair_id}"
        elif self.target is not None:
            reason = f"its source still finishes what it kept of {self.target.assignment.pair_id}"
        if reason or instance is None:
            log.info("pair %s is not made: %s", assignment.pair_id, reason)
            await self._bus.publish(subjects.live_reports(), declined(assignment, reason))
            return
        await self._begin(assignment, instance)

    async def _begin(self, assignment: ZigzagAssignment, instance: Instance) -> None:
        target, pair_id = assignment.target, assignment.pair_id

        async def connect() -> Tensors:
            return await self._tensors(target, target.epoch)

        async def ask_split(request: PlanSplit) -> None:
            await self._bus.request(subjects.planner("split"), request, Ack, timeout_s=SPLIT_TIMEOUT_S)

        peer = Peer(self._bus, target.worker_id, pair_id, silence_s=self._silence_s)

        def lending(begun: bool) -> None:
            instance.queue_factor = PAIRED_QUEUE_FACTOR if begun else 1
            self._changed()

        self.source = LiveSource(assignment, instance, peer, connect, self._serving, ask_split, lending)
        self._run = asyncio.create_task(self._run_source(self.source))

    async def _run_source(self, source: LiveSource) -> None:
        assignment = source.assignment
        attributes = {
            "blitz.pair_id": assignment.pair_id,
            "blitz.plan_id": assignment.plan_id,
            "blitz.worker_id": self._worker_id,
            "blitz.target": assignment.target.worker_id,
            "blitz.policy": assignment.policy,
            "blitz.why": assignment.why,
        }
        try:
            with tracer().start_as_current_span("worker.live", attributes=attributes) as span:
                report = await source.run()
                for batch in report.batches:
                    span.add_event(
                        "batch",
                        {
                            "blitz.batch_id": batch.batch_id,
                            "blitz.tokens": batch.num_tokens,
                            "blitz.target_layers": batch.target_layers,
                            "blitz.source_layers": batch.source_layers,
                        },
                        timestamp=int(batch.first_token_at_s * 1e9),
                    )
                if report.first_cooperative_token_at_s is not None:
                    span.add_event("first_cooperative_token", timestamp=int(report.first_cooperative_token_at_s * 1e9))
                for name, runs in (("source_layers", report.source_runs), ("target_layers", report.target_runs)):
                    if runs is not None:
                        span.set_attribute(f"blitz.{name}_per_{round(runs.bucket_s * 1000)}ms", runs.counts)
                span.set_attribute("blitz.outcome", report.outcome)
                await self._bus.publish(subjects.live_reports(), report)
            log.info("pair %s %s: %d batches", report.pair_id, report.outcome, len(report.batches))
        except BlitzError as error:
            log.warning("pair %s ended without a report: %s", assignment.pair_id, error)
        finally:
            self.source = None

    async def _on_taken(self, message: Taken) -> Ack:
        source = self.source
        if source is None or source.assignment.pair_id != message.pair_id:
            raise NotFound(f"{self._worker_id} is not the source of pair {message.pair_id}")
        return source.on_taken(message)

    # --- as target ---------------------------------------------------------------------------

    async def on_offer(self, offer: LiveOffer) -> Ack:
        """Accept a pair. Raises ``NotFound`` while the instance is not here, ``Conflict`` when it needs no pair."""
        async with self._offering:  # a repeat waits for what it repeats
            return await self._accept(offer.assignment)

    async def _accept(self, assignment: ZigzagAssignment) -> Ack:
        if self.target is not None and self.target.assignment.pair_id == assignment.pair_id:
            return Ack()
        instance, wanted = self._instance(), assignment.target
        if instance is None or instance.instance_id != wanted.instance_id:
            raise NotFound(f"{self._worker_id} does not load {wanted.instance_id}")
        if instance.epoch != wanted.epoch or instance.state != "loading" or self.target is not None:
            raise Conflict(f"{wanted.instance_id} is {instance.state} under epoch {instance.epoch}: no pair")
        tensors = await self._tensors(assignment.source, wanted.epoch)
        if self._instance() is not instance or instance.state != "loading" or self.target is not None:
            raise Conflict(f"{wanted.instance_id} is {instance.state}: no pair")
        instance.go_live()
        target = LiveTarget(assignment, instance, self._bus, tensors, self._serving, silence_s=self._silence_s)
        self.target = target
        instance.on_layer_ready = target.layers_ready
        target.begin()
        self._changed()
        self._spawn(self._until_ended(target))
        await self._progress.tell(
            assignment.plan_id, instance.instance_id, "live", detail=f"with {assignment.source.worker_id}"
        )
        return Ack()

    async def _until_ended(self, target: LiveTarget) -> None:
        await target.ended.wait()
        if target.shares is not None:
            self._parted[target.assignment.pair_id] = target.shares
            if len(self._parted) > MAX_PARTED:
                self._parted.popitem(last=False)
        if self.target is target:
            self.target = None
            target.instance.on_layer_ready = lambda: None

    def loaded(self, instance: Instance) -> None:
        """The instance has everything."""
        if self.target is not None and self.target.instance is instance:
            self.target.layers_ready()

    async def instance_gone(self, instance: Instance, reason: str) -> None:
        """The instance's engine is about to stop: its pair ends before."""
        if self.target is not None and self.target.instance is instance:
            await self.target.fail(reason)
        if self.source is not None and self.source.instance is instance and self._run is not None:
            self.source.lost(reason)
            await asyncio.wait({self._run}, timeout=LEAVE_S)

    async def _on_hand_over(self, message: HandOver) -> Ack:
        return await self._target(message.pair_id).on_hand_over(message)

    async def _on_seal(self, message: Seal) -> Ack:
        return await self._target(message.pair_id).on_seal(message)

    async def _on_pull(self, message: Pull) -> Pulled:
        return await self._target(message.pair_id).on_pull(message)

    async def _on_settle(self, message: Settle) -> Ack:
        return await self._target(message.pair_id).on_settle(message)

    async def _on_dissolve(self, message: Dissolve) -> Dissolved:
        if (shares := self._parted.get(message.pair_id)) is not None:
            return shares
        return await self._target(message.pair_id).on_dissolve(message)

    def _target(self, pair_id: str) -> LiveTarget:
        if self.target is None or self.target.assignment.pair_id != pair_id:
            raise NotFound(f"{self._worker_id} is not the target of pair {pair_id}")
        return self.target

    # --- as either ---------------------------------------------------------------------------

    def _on_pair_ended(self, message: PairEnded) -> None:
        if self.source is not None and self.source.assignment.pair_id == message.pair_id:
            self.source.lost(f"the target ended the pair: {message.reason}", message.finished)
        if self.target is not None and self.target.assignment.pair_id == message.pair_id:
            self._spawn(self.target.fail(f"the source ended the pair: {message.reason}", tell=False))

    def arrived(self) -> None:
        """A request was accepted here."""
        if self.source is not None:
            self.source.arrived()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more; the other member has to know as well."""
        if self.target is not None:
            self.target.cancel(request_id, attempt)
        if self.source is not None:
            self.source.cancel(request_id, attempt)

    def cancel_gateway(self, gateway_id: str) -> None:
        """A gateway is gone. The other member notices by itself."""
        if self.target is not None:
            self.target.cancel_gateway(gateway_id)

    async def close(self) -> None:
        """Leave both pairs and wait for what runs."""
        if self.source is not None:
            await self.source.leave("the source leaves")
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
        if self.target is not None:
            await self.target.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tensors(self, other: ChainMember, epoch: int) -> Tensors:
        channel = await self._peers.channel(other.transport_address, other.host, lane=LIVE_LANE)
        return Tensors(self._transport, channel, epoch, timeout_s=self._silence_s)
