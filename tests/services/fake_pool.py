"""A registry made of nothing: answers on a memory bus what the tests tell it to, and remembers what it was asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable

import msgspec

from shared import subjects
from shared.errors import BlitzError, Conflict
from shared.messages.codec import M, R
from shared.messages.common import Ack
from shared.messages.copies import RetireCopy
from shared.messages.registry import (
    Floor,
    GetSnapshot,
    HeartbeatAck,
    Lead,
    Leadership,
    LeaseBatch,
    LeaseGrant,
    LeaseVerdict,
    LeaseVerdicts,
    LeaseWorkers,
    ModelRecord,
    ReleaseWorkers,
    RestoreModel,
    SetFloor,
    Snapshot,
    WorkerHeartbeat,
    WorkerRecord,
)
from tests.shared.bus.memory import MemoryBroker

FAR_FUTURE_S = 4e9
"""Unix time at which leases end unless a test says otherwise."""


class FakePool:
    """``models``, ``workers`` and ``floors`` are what snapshots show; ``errors[operation]`` are raised one by one."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = broker.bus("pool")
        self.models: tuple[ModelRecord, ...] = ()
        self.workers: tuple[WorkerRecord, ...] = ()
        self.floors: tuple[Floor, ...] = ()
        self.page_size = 500
        self.ack = HeartbeatAck(lease_s=0.6, planner_term=1)
        self.errors: dict[str, list[BlitzError]] = defaultdict(list)
        self.heartbeats: list[WorkerHeartbeat] = []
        self.restored: list[ModelRecord] = []
        self.leases: list[LeaseWorkers] = []
        self.releases: list[ReleaseWorkers] = []
        self.floors_set: list[SetFloor] = []
        self.retired: list[RetireCopy] = []
        self.retire_error: BlitzError | None = None
        """Raised for every copy that wants to go; None lets it."""
        self.num_snapshots = 0
        self.leader = ""
        self.term = 1
        self.shows_leases = False
        """Whether snapshots show what was leased, until a test says otherwise."""
        self._epoch = 100

    async def start(self) -> None:
        await self._respond("heartbeat", WorkerHeartbeat, self._on_heartbeat)
        await self._respond("restore_model", RestoreModel, self._on_restore)
        await self._respond("snapshot", GetSnapshot, self._on_snapshot)
        await self._respond("release", ReleaseWorkers, self._on_release)
        await self._respond("lease_batch", LeaseBatch, self._on_lease_batch)
        await self._respond("lead", Lead, self._on_lead)
        await self._respond("set_floor", SetFloor, self._on_set_floor)
        await self._respond("retire_copy", RetireCopy, self._on_retire)

    async def _respond(self, operation: str, kind: type[M], handler: Callable[[M], Awaitable[R]]) -> None:
        async def guarded(message: M) -> R:
            if self.errors[operation]:
                raise self.errors[operation].pop(0)
            return await handler(message)

        await self.bus.respond(subjects.pool(operation), kind, guarded)

    async def _on_retire(self, request: RetireCopy) -> Ack:
        self.retired.append(request)
        if self.retire_error is not None and not request.undo:
            raise self.retire_error
        return Ack()

    async def _on_heartbeat(self, report: WorkerHeartbeat) -> HeartbeatAck:
        self.heartbeats.append(report)
        return self.ack

    async def _on_restore(self, request: RestoreModel) -> Ack:
        self.restored.append(request.model)
        return Ack()

    async def _on_snapshot(self, request: GetSnapshot) -> Snapshot:
        self.num_snapshots += 1
        rest = [w for w in self.workers if w.worker.worker_id > request.cursor]
        page = rest[: self.page_size]
        return Snapshot(
            publisher="fake",
            version=f"fake/{self.num_snapshots}",
            routes_sequence=self.num_snapshots,
            models=self.models,
            workers=tuple(page),
            floors=self.floors,
            next_cursor=page[-1].worker.worker_id if len(page) < len(rest) else "",
        )

    def _lease(self, request: LeaseWorkers) -> LeaseGrant:
        self.leases.append(request)
        here = {record.worker.process for record in self.workers}
        gone = [at.worker for at in request.workers if at.worker not in here]
        if gone:
            raise Conflict(f"worker {gone[0]} is another process by now")
        self._epoch += len(request.worker_ids)
        epochs = tuple((worker_id, self._epoch + i) for i, worker_id in enumerate(request.worker_ids))
        if self.shows_leases:
            lease = {"lease_plan_id": request.plan_id, "lease_model": request.model, "lease_role": request.role}
            self.workers = tuple(
                msgspec.structs.replace(w, **lease) if w.worker.worker_id in request.worker_ids else w
                for w in self.workers
            )
        return LeaseGrant(plan_id=request.plan_id, epochs=epochs)

    async def _on_lease_batch(self, request: LeaseBatch) -> LeaseVerdicts:
        """``errors["lease"]`` are of its single leases, one by one."""
        verdicts = []
        for lease in request.leases:
            try:
                if self.errors["lease"]:
                    raise self.errors["lease"].pop(0)
                verdicts.append(LeaseVerdict(plan_id=lease.plan_id, grant=self._lease(lease)))
            except BlitzError as error:
                verdicts.append(LeaseVerdict.refused(lease.plan_id, error))
        return LeaseVerdicts(verdicts=tuple(verdicts))

    async def _on_lead(self, request: Lead) -> Leadership:
        """Whoever asks first leads, until it gives up or a test names another ``leader``."""
        if request.give_up:
            if self.leader == request.owner:
                self.leader = ""
            return Leadership(leads=False, term=self.term, leader=self.leader, expires_in_s=0.0)
        if not self.leader:
            self.leader = request.owner
            self.term += request.term != self.term
        leads = self.leader == request.owner
        return Leadership(leads=leads, term=self.term, leader=self.leader, expires_in_s=request.ttl_s)

    async def _on_release(self, request: ReleaseWorkers) -> Ack:
        self.releases.append(request)
        return Ack()

    async def _on_set_floor(self, request: SetFloor) -> Ack:
        self.floors_set.append(request)
        return Ack()
