"""The planner in virtual time: ``services.planner.core.planner`` decides, and what it decides reaches the workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from bench.sim.clock import Clock, Event
from bench.sim.latencies import Latencies
from bench.sim.registry import SimRegistry
from services.planner.core.planner import Planner
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.pair_planner import FindProfile
from services.planner.core.rounds.plan_writer import Begun
from services.planner.core.rounds.round import Granted
from services.planner.core.rounds.settings import PlanSettings
from shared.messages.live import LiveReport, ZigzagAssignment
from shared.messages.load import Demand, LoadReport, QueueReport
from shared.messages.operations import ScaleRecord
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan
from shared.messages.progress import ScaleProgress
from shared.messages.registry import LeaseBatch, LeaseVerdict

TERM = 1
CHECK_S = 0.5
LOOK_S = 1.0
"""As ``services.planner.service``."""

AnyPlan = ScalePlan | DrainPlan | MutatePlan


class SimPlanner:
    """One planner, which leads from the beginning to the end."""

    def __init__(
        self,
        clock: Clock,
        latencies: Latencies,
        registry: SimRegistry,
        settings: PlanSettings,
        find_profile: FindProfile,
        *,
        on_plan: Callable[[AnyPlan], None],
        on_assignment: Callable[[ZigzagAssignment, float], None],
        on_move: Callable[[MigratePlan, float], None],
    ) -> None:
        """What is published reaches the workers; the delay is added here."""
        self._clock = clock
        self._latencies = latencies
        self._registry = registry
        self._settings = settings
        self._on_plan = on_plan
        self._on_assignment = on_assignment
        self._on_move = on_move
        self._ids: Counter[str] = Counter()
        self.planner = Planner(settings, self._new_id, find_profile)
        self._round: Event | None = None
        self.records: list[ScaleRecord] = []
        """Of the operations that ended, in that order."""
        self._looked_s = 0.0
        clock.after(CHECK_S, self._check)

    def _new_id(self, kind: str) -> str:
        self._ids[kind] += 1
        return f"{kind}-{self._ids[kind]:06}"

    def _now(self) -> Moment:
        return Moment(self._clock.now_s, self._clock.now_s)

    # --- what is heard -----------------------------------------------------------------------

    def on_demand(self, demand: Demand) -> None:
        """The monitor says what a model needs."""
        self.planner.on_demand(demand, self._now())
        self._wake()

    def on_load(self, report: LoadReport) -> None:
        """An instance reports."""
        self.planner.on_load(report, self._now())

    def on_queue(self, report: QueueReport) -> None:
        """A gateway reports."""
        self.planner.on_queue(report, self._now())

    def on_progress(self, said: ScaleProgress) -> None:
        """A worker tells how far it is."""
        self.planner.tracker.on_progress(said, self._now())

    def on_live_report(self, report: LiveReport) -> None:
        """The source of a pair tells what it did."""
        self.planner.tracker.on_live_report(report, self._now())

    def on_instances_gone(self) -> None:
        """A worker may be spare."""
        self.planner.rounds.try_again(self._now())
        self._wake()

    # --- rounds ------------------------------------------------------------------------------

    def _wake(self) -> None:
        due_s = self.planner.rounds.due_s
        if due_s == math.inf:
            return
        at_s = max(due_s, self._clock.now_s)
        if self._round is not None and self._round.pending:
            if self._round.time_s <= at_s:
                return
            self._clock.cancel(self._round)
        self._round = self._clock.at(at_s, self._decide)

    def _decide(self) -> None:
        self._round = None
        rounds = self.planner.rounds
        begun = rounds.begin(self._now())
        rounds.decide(begun, self._registry.view(), self._now())
        leases = begun.leases(self._settings.lease_ttl_s, TERM)
        verdicts: tuple[LeaseVerdict, ...] = ()
        if leases:
            verdicts = self._registry.lease(LeaseBatch(leases=tuple(leases), term=TERM)).verdicts
        granted, _ = rounds.granted(begun, verdicts, self._now())
        for one in granted:
            self._carry_out(one)
        self._wake()

    def _carry_out(self, granted: Granted) -> None:
        told = self.planner.writer.begin(granted.step, granted.grant, TERM, self._now())
        self._publish(told)
        self.planner.rounds.settle(granted.one)

    def _publish(self, told: Begun) -> None:
        delay_s = self._latencies.plan_s
        for plan in told.plans:
            self._clock.after(delay_s, self._on_plan, plan)
        for pair in told.operation.pairs.values():
            self._clock.after(delay_s, self._on_assignment, pair.assignment, self._clock.now_s)
        told.operation.planned(self._clock.now_s)

    # --- now and then ------------------------------------------------------------------------

    def _check(self) -> None:
        self._clock.after(CHECK_S, self._check)
        planner, now = self.planner, self._now()
        planner.forget(now)
        if planner.operations.running():
            planner.tracker.check(self._registry.view(), now)
        self.records += [operation.record() for operation in planner.operations.just_finished()]
        if now.monotonic_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now.monotonic_s
        for plan in planner.migrations.make_room(self._registry.view(), now, TERM):
            self._clock.after(self._latencies.plan_s, self._on_move, plan, self._clock.now_s)

    def all_records(self) -> list[ScaleRecord]:
        """Those of operations that run included."""
        ended = [operation.record() for operation in self.planner.operations.just_finished()]
        return [*self.records, *ended, *[operation.record() for operation in self.planner.operations.running()]]
