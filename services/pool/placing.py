"""Keeps one host copy of every model: has workers hold and drop them, and says which copies may go."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from services.pool.core.copies import copies_by_hash, gpu_copy_id, host_copy_id
from services.pool.core.outstanding import OutstandingSteps
from services.pool.core.placement import place
from services.pool.core.registry import Registry
from services.pool.core.steps import Drop, Hold
from services.pool.store import Store
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, DeadlineExceeded
from shared.messages.common import Ack
from shared.messages.copies import DropCopy, HoldCopy, RetireCopy
from shared.messages.registry import ModelRecord, Unplaced, WorkerHeartbeat

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
RPC_TIMEOUT_S = 2.0


class PlacementMetrics:
    """What a pool process shows of it, leading or not."""

    def __init__(self, registry: object) -> None:
        prometheus: Any = registry
        self.host_bytes = Gauge("blitz_pool_host_copy_bytes", "Bytes of host copies", ["host"], registry=prometheus)
        self.no_copy = Gauge(
            "blitz_pool_models_without_copy", "Models without a complete copy in any memory", registry=prometheus
        )
        self.no_host_copy = Gauge(
            "blitz_pool_models_without_host_copy", "Models without a complete placed host copy", registry=prometheus
        )
        self.steps = Counter("blitz_pool_placement_steps_total", "Steps sent to workers", ["step"], registry=prometheus)


class Placing:
    """Decides (``core.placement``) from the registry, and carries the steps out, beside the registry's own work.

    What it sent and no report shows yet is known to it alone; after a restart the reports are enough, because nothing
    is done before every worker had the time for one.
    """

    def __init__(self, bus: Bus, store: Store, registry: Registry, metrics: PlacementMetrics) -> None:
        self._bus = bus
        self._store = store
        self._registry = registry
        self._metrics = metrics
        self._outstanding = OutstandingSteps()
        self._next_s = 0.0
        self._unplaced: tuple[Unplaced, ...] = ()
        self._hosts: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel what runs: a worker that already has the request goes on by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self, now_s: float, *, may_act: bool) -> None:
        """Begin a look at the registry, and take the next steps if ``may_act``; often called, and does something every
        ``INTERVAL_S``."""
        if now_s < self._next_s or (self._looking is not None and not self._looking.done()):
            return
        self._next_s = now_s + INTERVAL_S
        self._looking = self._start(self._look(now_s, may_act=may_act))

    async def _look(self, now_s: float, *, may_act: bool) -> None:
        try:
            await self._look_and_act(now_s, may_act=may_act)
        except (RedisError, BlitzError) as error:
            log.warning("placement: this look failed: %s", error)
        except Exception:
            # Whatever broke, the registry goes on: the next look decides anew.
            log.exception("placement: this look failed")

    async def _look_and_act(self, now_s: float, *, may_act: bool) -> None:
        models, reports = self._registry.models(), self._registry.reports()
        self._show(models, reports)
        hosts_offer = any(report.worker.host_cache_bytes for report in reports)
        if not may_act:
            return
        for failure in self._outstanding.observe(reports, now_s):
            log.warning("placement: %s", failure)
        removed = tuple(self._registry.removed())
        decided = await asyncio.to_thread(place, models, reports, removed=removed, outstanding=self._outstanding.now())
        for step in decided.steps:
            if isinstance(step, Hold):
                await self._send_hold(step, now_s)
            else:
                self._send_drop(step, now_s)
        for entry in decided.unplaced:
            if entry not in self._unplaced:
                level = logging.WARNING if hosts_offer else logging.INFO
                log.log(level, "placement: no host copy of %s: %s", entry.model, entry.reason)
        if decided.unplaced != self._unplaced:
            self._unplaced = decided.unplaced
            self._registry.set_unplaced(decided.unplaced)
            await self._store.set_unplaced(decided.unplaced)

    async def _send_hold(self, step: Hold, now_s: float) -> None:
        first = step.sources[0] if step.sources else None
        log.info(
            "placement: worker %s is to hold a host copy of %s (%d bytes) from %s: %s",
            step.worker_id,
            step.record.name,
            step.record.weights_bytes,
            f"{first.kind} memory of {first.worker_id}" if first else "disk",
            step.reason,
        )
        request = HoldCopy(model=step.record, epoch=await self._store.next_epoch(), sources=step.sources)
        self._outstanding.hold_sent(step.key, step.record.weights_bytes, now_s)
        self._metrics.steps.labels("hold").inc()
        self._start(self._ask_to_hold(step, request, now_s))

    async def _ask_to_hold(self, step: Hold, request: HoldCopy, now_s: float) -> None:
        subject = subjects.worker_hold_copy(step.worker_id)
        try:
            await self._bus.request(subject, request, Ack, timeout_s=RPC_TIMEOUT_S)
        except DeadlineExceeded as error:
            # It may have accepted: its reports will tell.
            log.warning(
                "placement: worker %s did not say whether it holds %s: %s", step.worker_id, step.record.name, error
            )
        except BlitzError as error:
            log.warning("placement: worker %s does not hold %s: %s", step.worker_id, step.record.name, error)
            self._outstanding.hold_failed(step.key, now_s)

    def _send_drop(self, step: Drop, now_s: float) -> None:
        log.info("placement: worker %s is to drop its host copy of %s: %s", step.worker_id, step.model, step.reason)
        self._outstanding.drop_sent(step.key, now_s)
        self._metrics.steps.labels("drop").inc()
        self._start(self._ask_to_drop(step))

    async def _ask_to_drop(self, step: Drop) -> None:
        subject = subjects.worker_drop_copy(step.worker_id)
        try:
            await self._bus.request(subject, DropCopy(model_hash=step.model_hash), Ack, timeout_s=RPC_TIMEOUT_S)
        except BlitzError as error:
            # It stays marked until its time is over, so that a worker in trouble is not asked twice a second.
            log.warning("placement: worker %s does not drop %s: %s", step.worker_id, step.model, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def retire(self, request: RetireCopy, now_s: float) -> None:
        """Let a copy go, or count it again. Raises ``Conflict`` if it is its model's last."""
        on_host = request.kind == "host"
        worker_id, key = request.worker_id, (request.worker_id, request.model_hash)
        copy_id = host_copy_id(worker_id) if on_host else gpu_copy_id(worker_id, request.instance_id)
        if request.undo:
            await self._store.unretire(request.model_hash, copy_id)
            if on_host:
                self._outstanding.take_back(key)
            return
        models, reports = self._registry.models(), self._registry.reports()
        if request.leaving:
            incarnation = next((r.worker.incarnation for r in reports if r.worker.worker_id == worker_id), "")
            self._outstanding.leaves(worker_id, incarnation, now_s)
        needed = self._needed(request, models, reports)
        if await self._retired(request, copy_id, needed=needed):
            log.info("placement: the %s copy of %s on worker %s may go", request.kind, request.model, worker_id)
            return
        if request.leaving and not await self._replaceable(request.model_hash, models, reports):
            await self._retired(request, copy_id, needed=False)
            log.warning(
                "placement: the last copy of %s goes with worker %s: no other worker has room", request.model, worker_id
            )
            return
        # A worker that was not told to drop its copy has reasons of its own.
        if on_host and not self._outstanding.drop_over(key):
            self._outstanding.give_up(key, now_s)
        self._next_s = 0.0
        raise Conflict(f"the {request.kind} copy of {request.model} on worker {worker_id} is the last: it must stay")

    async def _retired(self, request: RetireCopy, copy_id: str, *, needed: bool) -> bool:
        agreed = await self._store.retire(request.model_hash, copy_id, needed=needed, sequence=request.sequence)
        if agreed:
            self._registry.retired(request.worker_id, copy_id)
        return agreed

    def _needed(self, request: RetireCopy, models: Sequence[ModelRecord], reports: Sequence[WorkerHeartbeat]) -> bool:
        """Whether the model is registered, or lost rather than removed.

        A GPU copy is not if no worker's host memory could ever hold the model: scaling to zero would hang.
        """
        record = next((m for m in models if m.model_hash == request.model_hash), None)
        if request.kind == "gpu":
            num_bytes = record.weights_bytes if record is not None else 1
            if all(report.worker.host_cache_bytes < num_bytes for report in reports):
                return False
        if record is not None:
            return True
        replaced = any(m.name == request.model for m in models)
        return not replaced and not self._registry.was_removed(request.model)

    async def _replaceable(
        self, model_hash: str, models: Sequence[ModelRecord], reports: Sequence[WorkerHeartbeat]
    ) -> bool:
        """Whether the last copy, of a worker that stops, can have a successor on one that does not."""
        removed = tuple(self._registry.removed())
        decided = await asyncio.to_thread(place, models, reports, removed=removed, outstanding=self._outstanding.now())
        return model_hash not in decided.hopeless

    def _show(self, models: Sequence[ModelRecord], reports: Sequence[WorkerHeartbeat]) -> None:
        used: dict[str, int] = defaultdict(int)
        for report in reports:
            used[report.worker.host] += sum(copy.num_bytes for copy in report.host_copies)
        for host in self._hosts - set(used):
            self._metrics.host_bytes.remove(host)
        self._hosts = set(used)
        for host, num_bytes in used.items():
            self._metrics.host_bytes.labels(host).set(num_bytes)
        copies = copies_by_hash(models, reports)
        placed = {h for h, c in copies.items() if any(held.copy.state == "ready" for held in c.placed)}
        self._metrics.no_copy.set(sum(copies[m.model_hash].num_complete == 0 for m in models))
        self._metrics.no_host_copy.set(sum(m.model_hash not in placed for m in models))
