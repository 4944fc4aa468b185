"""A worker as the target of pairs, of one at a time: offers, and the source's messages to the pair that they mean."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from services.worker.instance.instance import Instance
from services.worker.instance.progress import ProgressReporter
from services.worker.live.target import LiveTarget
from services.worker.live.tensors import Tensors
from services.worker.requests.inbox import Serving
from services.worker.scheduling.gateways import Gone
from shared.bus.base import Bus
from shared.errors import Conflict, NotFound
from shared.messages.common import Ack
from shared.messages.live import (
    Dissolve,
    Dissolved,
    HandOver,
    LiveOffer,
    PairEnded,
    Pull,
    Pulled,
    PullKv,
    Seal,
    Settle,
    ZigzagAssignment,
)
from shared.messages.scaling import ChainMember

log = logging.getLogger(__name__)

MAX_PARTED = 8


class TargetSide:
    """Event loop only. Messages to a pair that is not here raise ``NotFound``."""

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        serving: Serving,
        progress: ProgressReporter,
        instance: Callable[[], Instance | None],
        changed: Callable[[], None],
        connect: Callable[[ChainMember, int], Awaitable[Tensors]],
        *,
        silence_s: float,
    ) -> None:
        """``instance()``: this worker's; ``changed()``: its state did; ``connect(source, epoch)``: for tensors.
        ``silence_s``: a source that says nothing for so long is gone."""
        self._bus = bus
        self._worker_id = worker_id
        self._serving = serving
        self._progress = progress
        self._instance = instance
        self._changed = changed
        self._connect = connect
        self._silence_s = silence_s
        self.target: LiveTarget | None = None
        self._offering = asyncio.Lock()
        self._parted: OrderedDict[str, Dissolved] = OrderedDict()
        """What was agreed in pairs that have ended: the answer may have been lost."""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- from the source ---------------------------------------------------------------------

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
        tensors = await self._connect(assignment.source, wanted.epoch)
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

    async def on_hand_over(self, message: HandOver) -> Ack:
        """A batch comes."""
        return await self._target(message.pair_id).on_hand_over(message)

    async def on_seal(self, message: Seal) -> Ack:
        """All that waited has come."""
        return await self._target(message.pair_id).on_seal(message)

    async def on_pull(self, message: Pull) -> Pulled:
        """The source is free for a batch."""
        return await self._target(message.pair_id).on_pull(message)

    async def on_pull_kv(self, message: PullKv) -> Ack:
        """The source has room for KV of a batch that it pulled."""
        return await self._target(message.pair_id).on_pull_kv(message)

    async def on_settle(self, message: Settle) -> Ack:
        """The source has what it pulled, or only lives."""
        return await self._target(message.pair_id).on_settle(message)

    async def on_dissolve(self, message: Dissolve) -> Dissolved:
        """Part, or say again what was agreed."""
        if (shares := self._parted.get(message.pair_id)) is not None:
            return shares
        return await self._target(message.pair_id).on_dissolve(message)

    def on_pair_ended(self, message: PairEnded) -> None:
        """The source says that the pair is over."""
        if self.target is not None and self.target.assignment.pair_id == message.pair_id:
            self._spawn(self.target.fail(f"the source ended the pair: {message.reason}", tell=False))

    def _target(self, pair_id: str) -> LiveTarget:
        if self.target is None or self.target.assignment.pair_id != pair_id:
            raise NotFound(f"{self._worker_id} is not the target of pair {pair_id}")
        return self.target

    # --- from the planner --------------------------------------------------------------------

    def on_assignment(self, assignment: ZigzagAssignment) -> None:
        """Take the gates of a later revision. The first one comes as the source's offer."""
        target = self.target
        if assignment.revision and target is not None and target.assignment.pair_id == assignment.pair_id:
            target.set_gates(assignment.gates)

    # --- from this worker --------------------------------------------------------------------

    def loaded(self, instance: Instance) -> None:
        """The instance has everything."""
        if self.target is not None and self.target.instance is instance:
            self.target.layers_ready()

    async def instance_gone(self, instance: Instance, reason: str) -> None:
        """The instance's engine is about to stop: its pair ends before."""
        if self.target is not None and self.target.instance is instance:
            await self.target.fail(reason)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more."""
        if self.target is not None:
            self.target.cancel(request_id, attempt)

    def cancel_gateway(self, gone: Gone) -> None:
        """Gateways are gone."""
        if self.target is not None:
            self.target.cancel_gateway(gone)

    async def close(self) -> None:
        """Leave the pair and wait for what runs."""
        if self.target is not None:
            await self.target.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a pair broke at its target", exc_info=error)
