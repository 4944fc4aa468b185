"""Follows the scale operations under way: from what workers report, from the registry, and by deadlines."""

from __future__ import annotations

import logging
import time

from services.planner.core.operations.operation import Operation
from services.planner.core.operations.operations import Operations, bounded_record
from services.planner.core.operations.refusals import Refusals
from services.planner.leases import Leases
from services.planner.mutations import Mutations
from services.planner.pair_planner import PairPlanner
from services.planner.plan_stream import PlanStream
from shared.aio import OwnedTasks, Wakeup
from shared.errors import PlanNotFound
from shared.leading import Leader
from shared.messages.live import LiveReport
from shared.messages.scaling import GetScaleRecord, ScaleProgress, ScaleRecord
from shared.registry import RegistryView

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
MAX_WAIT_S = 30.0
"""Longest that one record RPC waits; callers ask again."""
BLAMELESS = ("superseded by", "the model was removed")
"""How a worker's message begins when it gave up a load through no fault of its own."""


class OperationTracker:
    """Updates the operations of a leader, and wakes the callers that wait for their records."""

    def __init__(
        self,
        stream: PlanStream,
        leader: Leader,
        operations: Operations,
        refusals: Refusals,
        mutations: Mutations,
        pairs: PairPlanner,
        leases: Leases,
    ) -> None:
        self._leader = leader
        self._operations = operations
        self._refusals = refusals
        self._mutations = mutations
        self._pairs = pairs
        self._leases = leases
        self._stream = stream
        self._changed = Wakeup()
        self._tasks = OwnedTasks()

    async def finish(self) -> None:
        """Wait for what is being told."""
        await self._tasks.finish()

    def on_progress(self, event: ScaleProgress) -> None:
        """A worker tells how far it is."""
        operation = self._operations.get(event.plan_id)
        if operation is None:
            return
        operation.apply(event)
        if event.event == "layer_ready" and event.layer == 0:
            for pair in operation.pairs.values():
                if pair.assignment.target.worker_id == event.worker_id:
                    self._pairs.first_layer(pair, event.at_s)
        if event.event == "serving" and operation.direction == "mutate":
            self._mutations.done(operation, event.worker_id)
        elif event.event == "serving":
            self._refusals.served(event.worker_id, operation.model)
        if event.event == "failed":
            log.warning("%s: %s failed: %s", event.plan_id, event.worker_id, event.detail)
            self._failed(operation, event.worker_id, event.detail)
        if event.event == "failed" and operation.direction != "mutate":
            self._tasks.start(self.release(operation.plan_id, event.worker_id))
        if operation.finished:
            self._tasks.start(self.tell_waiters())

    def on_live_report(self, report: LiveReport) -> None:
        """The source of a pair tells what it did."""
        operation = self._operations.get(report.plan_id)
        if operation is None:
            return
        operation.apply_live(report)
        level = logging.INFO if report.outcome == "dissolved" else logging.WARNING
        log.log(level, "%s: %s %s", report.pair_id, report.outcome, report.reason)
        if operation.finished:
            self._tasks.start(self.tell_waiters())

    def _failed(self, operation: Operation, worker_id: str, why: str) -> None:
        if operation.direction == "mutate":
            self._mutations.failed(operation, worker_id, why)
        if operation.direction == "out" and not operation.recalled and not why.startswith(BLAMELESS):
            self._refusals.failed(worker_id, operation.model, why, time.monotonic())

    async def release(self, plan_id: str, *worker_ids: str) -> None:
        """Workers that refused their plan are free again; those that took it have used the lease up."""
        self._leases.give_back(plan_id, worker_ids)
        await self._leases.release(self._leader.term)

    async def tell_waiters(self) -> None:
        """Wake the callers that wait for a record, and store the records of operations that ended."""
        for operation in self._operations.just_finished():
            self._stream.add_record(bounded_record(operation))
        self._changed.fire()
        await self._stream.store_records()

    def check(self, view: RegistryView) -> None:
        """End targets that are past their deadline, or whose worker is gone or never took the plan. The registry
        replaces reports that were lost."""
        workers = {w.worker.worker_id: w for w in view.workers}
        for operation in self._operations.running():
            before = {worker_id for worker_id, _ in operation.open_targets}
            operation.check(workers, time.time())
            for worker_id, why in operation.failures.items():
                if worker_id in before:
                    self._failed(operation, worker_id, why)

    async def on_get_record(self, request: GetScaleRecord) -> ScaleRecord:
        """The record, once the operation has ended or the caller's wait is over. Raises ``PlanNotFound``."""
        operation = self._operations.get(request.plan_id)
        if operation is None:
            past = self._operations.past(request.plan_id)
            if past is not None:
                return past
            raise PlanNotFound(f"no scale operation {request.plan_id!r} is known", param="plan_id")
        deadline = time.monotonic() + min(max(0.0, request.wait_s), MAX_WAIT_S)
        while not operation.finished and (left := deadline - time.monotonic()) > 0:
            self._leader.check()
            await self._changed.wait(min(left, CHECK_INTERVAL_S))
        return operation.record()
