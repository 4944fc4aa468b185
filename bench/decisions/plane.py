"""The cores of pool, monitor, planner and one gateway of two, and what passes between them. Each step is measured.

What a shell does beside (messages, Redis, the copy of the registry that readers keep) is not in the figures. Nothing
happens by itself: who drives it says when something does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import cast

from bench.decisions.population import Population
from bench.decisions.stopwatch import Stopwatch
from bench.sim.clock import Clock
from bench.sim.registry import FOREVER_S, SimRegistry
from services.gateway.core.router import Assignment, Router
from services.gateway.core.routes import RouteView
from services.gateway.core.stream import StreamState
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.watch import Watch
from services.planner.core.operations.operation import Operation
from services.planner.core.planner import Planner
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.settings import PlanSettings
from services.pool.core.cluster import ClusterView
from services.pool.core.copies_policy import copy_rules
from services.pool.core.loads import LoadLimits
from shared.messages.generation import SamplingParams
from shared.messages.load import Demand, LoadReport, QueueReport
from shared.messages.progress import ScaleProgress
from shared.messages.registry import LeaseBatch, LeaseVerdict, WorkerHeartbeat

BEGIN_S = 100.0
"""A unix time of 0 means "not yet" here and there."""
REPEAT_S = 1.0
TERM = 1
OURS, OTHER = "gateway-0", "gateway-1"
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 200


class ControlPlane:
    """Knows the whole population from the beginning."""

    def __init__(self, population: Population, stopwatch: Stopwatch) -> None:
        self._clock = Clock()
        self._clock.run(BEGIN_S)
        self._watch = stopwatch
        self._population = population
        self._ids: Counter[str] = Counter()
        self._settings = PlanSettings()
        self._pool = SimRegistry(self._clock, lambda _model, _routes: None)
        self._copies = ClusterView((), LoadLimits())
        self._rules = copy_rules("one", self._copies)
        self._seen = 0
        """The registry's version that placement knows."""
        self._monitor = Watch(DemandPolicy(), repeat_s=REPEAT_S)
        self._planner = Planner(self._settings, self._new_id, lambda **_: population.profile)
        self._routes = RouteView()
        self._router = Router(max_queued_requests=1_000_000, gateway_id=OURS)
        self._open: dict[str, deque[str]] = {}
        """Requests at instances, by model, the oldest first."""
        for model in population.models:
            self._pool.put_model(model)
        for worker in population.workers.values():
            self.heartbeat(worker.heartbeat())
        self.placement_reads()
        self.snapshot()
        self._take_view()

    def _new_id(self, kind: str) -> str:
        self._ids[kind] += 1
        return f"{kind}-{self._ids[kind]:06}"

    def _take_view(self) -> None:
        self._pool.registry.routes.take("sim")
        changed = self._routes.apply_view(self._pool.view())
        for name in sorted(changed.models):
            self._take_routes(name)

    def _take_routes(self, name: str) -> None:
        model = self._routes.models[name]
        self._router.set_routes(name, model.record.model_hash, model.routes.values())

    # --- time --------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def passes(self, seconds: float) -> None:
        """Time."""
        self._clock.run(self.now_s + seconds)

    @property
    def _moment(self) -> Moment:
        return Moment(self.now_s, self.now_s)

    # --- the pool ----------------------------------------------------------------------------

    def heartbeat(self, report: WorkerHeartbeat, what: str = "heartbeat") -> None:
        """A worker reports."""
        with self._watch("pool", what):
            self._pool.registry.take(report, self.now_s, FOREVER_S)

    def placement_reads(self) -> None:
        """Placement learns what changed in the registry."""
        with self._watch("pool", "placement reads a change"):
            changes = self._pool.registry.changes(self._seen)
            self._seen = changes.version
            for worker_id in changes.gone_workers:
                self._copies.forget(worker_id)
            for record in changes.models:
                self._copies.copies.put_model(record)
            for report in changes.reports:
                self._copies.put_report(report, self.now_s)
            self._copies.refresh()

    def placement_looks(self) -> None:
        """Twice a second. What it would have done is not done."""
        with self._watch("pool", "placement looks"):
            self._copies.outstanding.expire(self.now_s)
            placement = self._rules.look(self.now_s)
        for step in placement.steps:
            self._copies.outstanding.hold_not_sent(step.key)
            self._copies.outstanding.drop_over(step.key)

    def pool_ticks(self) -> None:
        """Several times a second."""
        with self._watch("pool", "tick"):
            self._pool.registry.silent(self.now_s)
            self._pool.registry.end_leases(self.now_s)
            self._pool.registry.models.end_floors(self.now_s)

    @property
    def num_leased(self) -> int:
        """Workers that are promised to a plan."""
        return len(self._pool.registry.leases)

    def dies(self, worker_id: str) -> None:
        """A worker is silent for too long."""
        with self._watch("pool", "forgets a worker"):
            self._pool.registry.forget([worker_id])

    # --- the gateway -------------------------------------------------------------------------

    def routes_change(self) -> None:
        """What the pool says of routes reaches the gateway."""
        with self._watch("pool", "cuts route changes"):
            events, _ = self._pool.registry.routes.take("sim")
        for event in events:
            with self._watch("gateway", "route change"):
                changed = self._routes.apply_changes(event)
                for name in sorted(changed.models):
                    self._take_routes(name)

    def request(self, model: str, what: str = "assignment") -> Assignment | None:
        """One comes, and gets an instance if any takes it. Beyond two for each instance, the oldest ends."""
        stream = StreamState(
            request_id=self._new_id("request"),
            model=model,
            model_hash=self._routes.models[model].record.model_hash,
            prompt_token_ids=cast(tuple[int, ...], range(PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0),
            arrived_at_s=self.now_s,
        )
        with self._watch("gateway", what):
            self._router.enqueue(stream, deadline_s=self.now_s + 60.0, retry_after_s=1.0)
            dispatched = self._router.dispatch(model, now_s=self.now_s)
        self._router.bookings.started(stream.request_id)
        there = self._open.setdefault(model, deque())
        there.append(stream.request_id)
        if len(there) > 2 * len(self._routes.models[model].routes):
            with self._watch("gateway", "end of a request"):
                self._router.finish(there.popleft(), model)
        return dispatched.assignments[0] if dispatched.assignments else None

    def gateway_ticks(self) -> None:
        """Twenty times a second, and what it does twice a second."""
        with self._watch("gateway", "tick"):
            self._router.expired(now_s=self.now_s)
            for model in self._routes.models:
                self._router.dispatch(model, now_s=self.now_s)
        with self._watch("gateway", "prune"):
            self._router.prune(now_s=self.now_s)

    # --- load --------------------------------------------------------------------------------

    def load(self, report: LoadReport) -> None:
        """An instance reports."""
        with self._watch("gateway", "load report"):
            self._router.reported(report, now_s=self.now_s)
        with self._watch("monitor", "load report"):
            self._monitor.on_load(report, self.now_s)
        with self._watch("planner", "load report"):
            self._planner.on_load(report, self._moment)

    def queues(self, report: QueueReport) -> None:
        """A gateway reports."""
        with self._watch("gateway", "queue report"):
            self._router.others_reported(report, now_s=self.now_s)
        with self._watch("monitor", "queue report"):
            self._monitor.on_queue(report, self.now_s)
        with self._watch("planner", "queue report"):
            self._planner.on_queue(report, self._moment)

    # --- the monitor -------------------------------------------------------------------------

    def snapshot(self) -> None:
        """Once a second, and when routes have changed."""
        view = self._pool.view()
        with self._watch("monitor", "snapshot"):
            self._monitor.on_snapshot(view, lambda _model, _worker: self._population.profile)

    def evaluate(self) -> int:
        """Ten times a second. How many demands come of it."""
        with self._watch("monitor", "evaluation"):
            wishes = self._monitor.evaluate(self.now_s, connected_since_s=-FOREVER_S, leads=True)
        return len(wishes)

    # --- the planner -------------------------------------------------------------------------

    def demand(self, model: str, desired: int, observed: int) -> None:
        """The monitor says what a model needs."""
        demand = Demand(
            publisher="monitor",
            sequence=1,
            model=model,
            role="colocated",
            desired=desired,
            observed=observed,
            triggered_ago_s=0.0,
            reason="load",
            term=TERM,
            spare=0,
            urgent=desired,
            deficit=max(0, desired - observed) / max(1, observed),
        )
        with self._watch("planner", "demand"):
            self._planner.on_demand(demand, self._moment)

    def round(self) -> list[Operation]:
        """All that waits is decided, leased and written down, however long it takes."""
        planner, rounds = self._planner, self._planner.rounds
        view = self._pool.view()
        with self._watch("planner", "round"):
            deciding = rounds.begin(self._moment)
            rounds.decide(deciding, view, self._moment)
            leases = deciding.leases(self._settings.lease_ttl_s, TERM)
        verdicts: tuple[LeaseVerdict, ...] = ()
        if leases:
            with self._watch("pool", "leases"):
                verdicts = self._pool.lease(LeaseBatch(leases=tuple(leases), term=TERM)).verdicts
        told = []
        with self._watch("planner", "plans"):
            granted, _ = rounds.granted(deciding, verdicts, self._moment)
            for one in granted:
                told.append(planner.writer.begin(one.step, one.grant, TERM, self._moment))
                rounds.settle(one.one)
        operations = [begun.operation for begun in told]
        for operation in operations:
            operation.planned(self.now_s)
        return operations

    def progress(self, event: ScaleProgress) -> None:
        """A worker tells how far it is."""
        with self._watch("planner", "progress"):
            self._planner.tracker.on_progress(event, self._moment)

    def planner_ticks(self) -> None:
        """Twice a second; some of it once."""
        view = self._pool.view()
        with self._watch("planner", "tick"):
            self._planner.forget(self._moment)
            if self._planner.operations.running():
                self._planner.tracker.check(view, self._moment)
            self._planner.operations.just_finished()
            self._planner.evacuations(view, self._moment)
            self._planner.migrations.make_room(view, self._moment, TERM)

    def tries_again(self) -> None:
        """Instances are gone."""
        with self._watch("planner", "instances gone"):
            self._planner.rounds.try_again(self._moment)

    # --- undoing -----------------------------------------------------------------------------

    def undo(self, operations: Iterable[Operation]) -> None:
        """Nothing comes of these: their workers are not leased any more."""
        for operation in operations:
            leased = [worker_id for worker_id, _ in operation.open_targets]
            operation.fail("undone")
            self._pool.registry.release(operation.plan_id, leased)
        self._planner.operations.just_finished()
