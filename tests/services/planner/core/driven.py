"""A planner's core in virtual time, and a pool that leases whatever is free."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.planner import Planner
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.plan_writer import AnyPlan
from services.planner.core.rounds.round import Round
from services.planner.core.rounds.settings import PlanSettings
from services.planner.core.rounds.unplanned import Refused
from services.planner.core.rounds.waiting import Waiting
from shared.errors import BlitzError, Conflict
from shared.messages.common import Role
from shared.messages.load import Demand
from shared.messages.progress import ProgressEvent, ScaleProgress
from shared.messages.registry import LeaseGrant, LeaseVerdict, LeaseWorkers, ModelRecord, WorkerRecord
from shared.registry_view import RegistryView


class Driven:
    """Does what a shell does, at once. Time begins at 100 s, and moves when a test says so."""

    def __init__(
        self, models: Iterable[ModelRecord], workers: Iterable[WorkerRecord], settings: PlanSettings | None = None
    ) -> None:
        self.settings = settings or PlanSettings()
        numbers = itertools.count(1)
        self.planner = Planner(self.settings, lambda kind: f"{kind}-{next(numbers)}", lambda **_: None)
        self.models = tuple(models)
        self.workers = tuple(workers)
        self.now_s = 100.0
        self.plans: list[AnyPlan] = []
        self.refused: list[Refused] = []
        self.settled: list[Waiting] = []
        self.errors: list[BlitzError] = []
        """What the pool says to the next leases."""

    @property
    def moment(self) -> Moment:
        return Moment(self.now_s, self.now_s)

    @property
    def view(self) -> RegistryView:
        return RegistryView({model.name: model for model in self.models}, self.workers, {})

    def demand(
        self,
        name: str,
        desired: int,
        observed: int = 0,
        *,
        role: Role = "colocated",
        idle: int = 0,
        idle_for_s: float | None = None,
    ) -> None:
        message = Demand(
            publisher="monitor",
            sequence=1,
            model=name,
            role=role,
            desired=desired,
            observed=observed,
            triggered_ago_s=0.0,
            reason="load",
            idle=idle,
            idle_for_s=idle_for_s,
            term=1,
            spare=idle,
            urgent=desired,
        )
        self.planner.on_demand(message, self.moment)

    def ask(self, name: str, desired: int, role: Role = "colocated") -> Waiting:
        request = ScaleRequest(name, desired, self.now_s, "asked", role=role, by_hand=True)
        return self.planner.rounds.ask(request, self.moment)

    @property
    def due_in_s(self) -> float:
        """When the next round is due, from now."""
        return self.planner.rounds.due_s - self.now_s

    def wait_until_due(self) -> None:
        self.now_s = max(self.now_s, self.planner.rounds.due_s)

    def round(self, spent_s: Callable[[], float] = lambda: 0.0) -> Round:
        """One, if it is due or not."""
        rounds = self.planner.rounds
        begun = rounds.begin(self.moment)
        rounds.decide(begun, self.view, self.moment, spent_s)
        leases = begun.leases(self.settings.lease_ttl_s, term=1)
        granted, refused = rounds.granted(begun, [self.verdict(lease) for lease in leases], self.moment)
        self.refused += begun.refused + refused
        self.settled += begun.settled
        for one in granted:
            told = self.planner.writer.begin(one.step, one.grant, 1, self.moment)
            self.plans += told.plans
            told.operation.planned(self.now_s)
            rounds.settle(one.one)
        return begun

    def verdict(self, lease: LeaseWorkers) -> LeaseVerdict:
        if self.errors:
            return LeaseVerdict.refused(lease.plan_id, self.errors.pop(0))
        if not {at.worker for at in lease.workers} <= {record.worker.process for record in self.workers}:
            return LeaseVerdict.refused(lease.plan_id, Conflict("a worker is another process by now"))
        self.workers = tuple(
            msgspec.structs.replace(w, lease_plan_id=lease.plan_id, lease_model=lease.model, lease_role=lease.role)
            if w.worker.worker_id in lease.worker_ids
            else w
            for w in self.workers
        )
        epochs = tuple((worker_id, 1) for worker_id in lease.worker_ids)
        grant = LeaseGrant(plan_id=lease.plan_id, epochs=epochs)
        return LeaseVerdict(plan_id=lease.plan_id, grant=grant)

    def report(
        self, plan_id: str, event: ProgressEvent, worker_id: str, instance_id: str, moment: Moment | None = None
    ) -> None:
        message = ScaleProgress(
            plan_id=plan_id, worker_id=worker_id, instance_id=instance_id, event=event, after_s=self.now_s
        )
        self.planner.tracker.on_progress(message, moment or self.moment)
