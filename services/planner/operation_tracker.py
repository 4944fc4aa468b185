"""Hears how far operations are, tells the callers that wait for their records, and stores them.

``core/rounds/tracker`` follows the operations.
"""

from __future__ import annotations

import logging
import time

from prometheus_client import CollectorRegistry

from services.planner.clock import now
from services.planner.core.operations.operations import bounded_record
from services.planner.core.planner import Planner
from services.planner.core.rounds.tracker import frees_its_lease
from services.planner.leases import Leases
from services.planner.plan_stream import PlanStream
from services.planner.scale_seconds import ScaleSeconds
from shared.aio import OwnedTasks, Wakeup
from shared.errors import PlanNotFound
from shared.leading import Leader
from shared.messages.live import LiveReport
from shared.messages.operations import GetScaleRecord, ScaleRecord
from shared.messages.progress import ScaleProgress

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
MAX_WAIT_S = 30.0
"""Longest that one record RPC waits; callers ask again."""


class OperationTracker:
    """The operations of a leader."""

    def __init__(
        self, stream: PlanStream, leader: Leader, planner: Planner, leases: Leases, metrics: CollectorRegistry
    ) -> None:
        self._leader = leader
        self._planner = planner
        self._operations = planner.operations
        self._leases = leases
        self._stream = stream
        self._scale_seconds = ScaleSeconds(metrics)
        self._changed = Wakeup()
        self._tasks = OwnedTasks()

    async def finish(self) -> None:
        """Wait for what is being told."""
        await self._tasks.finish()

    def on_progress(self, event: ScaleProgress) -> None:
        """A worker tells how far it is."""
        operation = self._planner.tracker.on_progress(event, now())
        if operation is None:
            return
        if event.event == "failed":
            log.warning("%s: %s failed: %s", event.plan_id, event.worker_id, event.detail)
        if frees_its_lease(event, operation):
            self._tasks.start(self.release(operation.plan_id, event.worker_id))
        if operation.finished:
            self._tasks.start(self.tell_waiters())

    def on_live_report(self, report: LiveReport) -> None:
        """The source of a pair tells what it did."""
        operation = self._planner.tracker.on_live_report(report, now())
        if operation is None or report.outcome == "running":
            return
        level = logging.INFO if report.outcome == "dissolved" else logging.WARNING
        log.log(level, "%s: %s %s", report.pair_id, report.outcome, report.reason)
        if operation.finished:
            self._tasks.start(self.tell_waiters())

    async def release(self, plan_id: str, *worker_ids: str) -> None:
        """Workers that refused their plan are free again; those that took it have used the lease up."""
        self._leases.give_back(plan_id, worker_ids)
        await self._leases.release(self._leader.term)

    async def tell_waiters(self) -> None:
        """Wake the callers that wait for a record, and store the records of operations that ended."""
        for operation in self._operations.just_finished():
            record = bounded_record(operation)
            self._scale_seconds.observe(record)
            self._stream.add_record(record)
        self._changed.fire()
        await self._stream.store_records()

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
