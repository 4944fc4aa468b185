"""One scale operation and its record, built from progress events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Literal

from services.planner.core.multicast.chains import gbps_of, hops_of, links_of, predicted_s_of
from services.planner.core.multicast.overhead import Loaded, Way, ways_of
from services.planner.core.multicast.traffic import Link
from services.planner.core.operations.pair_record import LivePair
from services.planner.core.operations.target import Direction, NamedTarget, Target, since_ms
from shared.messages.common import Role
from shared.messages.live import LiveReport, ZigzagAssignment
from shared.messages.operations import HopRecord, ScaleRecord
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.messages.progress import ScaleProgress
from shared.messages.registry import WorkerRecord

DEADLINE_FINISHES = 3.0
"""A target may take this many times its predicted finish, where that is longer than what its bytes alone allow."""
LOST_WORD_S = 5.0
"""A target that is late by this, and takes ``DEADLINE_FINISHES`` times as long as predicted, has everything: its report
must have been lost."""
MISSING_S = 2.0
"""A worker that the registry has not known for this long is dead."""
LEAST_LOAD_S = 15.0
"""A target has at least this long, whatever is predicted: predictions do not know what else the hosts have to do."""
MUTATE_REPORT_S = 1.0
"""A mutation that was heard in time has been reported by then."""
STARTED_ANEW = "the worker was started anew before it accepted the plan"
LOAD_FACTOR = 10.0
"""A target must have everything within this multiple of its predicted finish."""


def give_up_s(num_bytes: int, floor_gbps: float, predicted_s: Iterable[float]) -> float:
    """How long targets may take: a multiple of what is predicted, and where nothing is, ``num_bytes`` at
    ``floor_gbps``. The plan carries it: targets that take longer give up by themselves."""
    slowest_s = num_bytes * 8 / (floor_gbps * 1e9)
    known = list(predicted_s)
    if not known or not all(known):
        return max(slowest_s, LEAST_LOAD_S)
    expected_s = LOAD_FACTOR * max(known)
    return max(LEAST_LOAD_S, min(expected_s, slowest_s), DEADLINE_FINISHES * max(known))


@dataclass(eq=False, kw_only=True)
class Operation:
    """One scale operation. ``apply`` takes events in any order. Times are by this planner's monotonic clock."""

    plan_id: str
    model: str
    direction: Direction
    desired: int
    reason: str
    triggered_s: float
    targets: InitVar[Iterable[NamedTarget]]
    assignments: InitVar[Iterable[ZigzagAssignment]] = ()
    """Which targets scale live, and with which instances."""
    triggered_at_s: float = 0.0
    """Unix time, for people."""
    role: Role = "colocated"
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    trace_id: str = ""
    accept_by_s: float = float("inf")
    """A target that has not accepted by then has failed."""
    deadline_s: float = float("inf")
    """A target that has not ended by then has failed, too."""
    links: tuple[Link, ...] = ()
    """Who sends weights to whom."""
    hops: tuple[HopRecord, ...] = ()
    """The same for people, with shares."""
    gbps: Mapping[Link, float] = field(default_factory=dict)
    """As predicted, between GPUs; also what targets of a hop send each other."""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each target should take once the plan is made; one that should take long has a later deadline."""
    overhead_s: Mapping[str, float] = field(default_factory=dict)
    """Of that, what it takes beside its bytes."""
    ways: Mapping[str, Way] = field(default_factory=dict)
    """How weights get to each target."""
    model_hash: str = ""
    """Of what is loaded."""
    revives: bool = False
    """The targets drain and shall serve again."""
    advice: bool = False
    """It was not carried out."""
    made_s: float = 0.0
    """When the plan was made: what it says in seconds, it says from then."""
    recalled: bool = False
    """It was begun under an earlier planner, and its end may have gone unseen."""

    def __post_init__(self, targets: Iterable[NamedTarget], assignments: Iterable[ZigzagAssignment]) -> None:
        self.pairs = {assignment.pair_id: LivePair(assignment) for assignment in assignments}
        self._targets = {t.worker_id: Target(t.worker, t.instance_id, self.direction) for t in targets}
        self._planned_s: float | None = None
        self._missing_since_s: dict[str, float] = {}
        self._failure = ""

    @classmethod
    def of_plan(
        cls, plan: ScalePlan, planned_s: float, pairs: Iterable[ZigzagAssignment] = (), *, recalled: bool = False
    ) -> Operation:
        """The operation that a plan of ``planned_s`` belongs to. Reports and the registry tell what its targets have
        done since."""
        return cls(
            plan_id=plan.plan_id,
            model=plan.model.name,
            direction="out",
            desired=plan.desired,
            reason=plan.reason,
            triggered_s=planned_s - plan.triggered_ago_s,
            triggered_at_s=plan.triggered_at_s,
            targets=plan.targets,
            explain=plan.explain,
            left_out=plan.left_out,
            trace_id=plan.trace_id,
            made_s=planned_s,
            accept_by_s=planned_s + plan.valid_s,
            deadline_s=planned_s + (plan.give_up_s or float("inf")),
            links=links_of(plan.chains),
            hops=hops_of(plan.chains),
            gbps=gbps_of(plan.chains, plan.model.weights_bytes),
            predicted_s=predicted_s_of(plan.chains),
            overhead_s={t: hop.overhead_s for chain in plan.chains for hop in chain.hops for t in hop.targets},
            ways=ways_of(plan.chains),
            model_hash=plan.model.model_hash,
            assignments=pairs,
            role=plan.role,
            recalled=recalled,
        )

    @classmethod
    def of_drain(
        cls,
        plan: DrainPlan,
        direction: Direction,
        planned_s: float,
        end_by_s: float,
        *,
        heed_by_s: float | None = None,
        recalled: bool = False,
    ) -> Operation:
        """The operation that a drain, or a revival (``direction`` "out"), is of. ``heed_by_s``: until when a target
        that is to drain may still serve; the drain itself ends when its requests do. None: as long as it may take."""
        return cls(
            plan_id=plan.plan_id,
            model=plan.model,
            direction=direction,
            desired=plan.desired,
            reason=plan.reason,
            triggered_s=planned_s - plan.triggered_ago_s,
            triggered_at_s=plan.triggered_at_s,
            targets=plan.targets,
            explain=(("revive: " if plan.revive else "drain: ") + ", ".join(t.worker_id for t in plan.targets),),
            trace_id=plan.trace_id,
            made_s=planned_s,
            accept_by_s=end_by_s if heed_by_s is None else heed_by_s,
            deadline_s=end_by_s,
            role=plan.role,
            revives=plan.revive,
            recalled=recalled,
        )

    @classmethod
    def of_mutation(cls, plan: MutatePlan, planned_s: float, *, recalled: bool = False) -> Operation:
        """The operation of a plan of ``planned_s`` that gives its targets another role."""
        operation = cls(
            plan_id=plan.plan_id,
            model=plan.model,
            direction="mutate",
            desired=plan.desired,
            reason=plan.reason,
            triggered_s=planned_s - plan.triggered_ago_s,
            triggered_at_s=plan.triggered_at_s,
            targets=plan.targets,
            explain=plan.explain,
            left_out=plan.left_out,
            trace_id=plan.trace_id,
            deadline_s=planned_s + plan.valid_s + MUTATE_REPORT_S,
            role=plan.role,
            made_s=planned_s,
            recalled=recalled,
        )
        for target in plan.targets:
            operation._targets[target.worker_id].was = target.was
        return operation

    @property
    def finished(self) -> bool:
        """Whether every target has ended, well or not, and no pair's report is still expected."""
        if self._failure:
            return True
        # Asked of every operation that runs, again and again: the first target that has not ended is enough.
        return all(t.ended for t in self._targets.values()) and not any(pair.running for pair in self.pairs.values())

    @property
    def untold_targets(self) -> tuple[str, ...]:
        """Worker ids of targets that have shown no sign of knowing the plan."""
        return tuple(t.worker_id for t in self._targets.values() if not t.knows_plan and not t.ended)

    @property
    def open_targets(self) -> tuple[tuple[str, str], ...]:
        """(worker_id, instance_id) of targets that have not ended."""
        return tuple((t.worker_id, t.instance_id) for t in self._targets.values() if not t.ended)

    @property
    def failures(self) -> dict[str, str]:
        """Why targets failed, by worker id."""
        return {t.worker_id: t.failure for t in self._targets.values() if t.failure}

    def has_failed(self, worker_id: str) -> bool:
        """Whether the operation failed, as a whole or on this target."""
        return bool(self._failure or self._targets[worker_id].failure)

    def running_links(self) -> list[Link]:
        """Transfers that go on: their target is open and has not reported ``loaded``."""
        return [link for link in self.links if self._loads(link[1])]

    def running_gbps(self) -> dict[Link, float]:
        """What GPUs send to targets that load."""
        return {link: gbps for link, gbps in self.gbps.items() if self._loads(link[1])}

    def served_since(self, worker_id: str) -> tuple[float, float] | None:
        """When a target began to serve, and how many seconds it took to load; None while it does not."""
        target = self._targets.get(worker_id)
        if target is None or target.serving_s is None or self._planned_s is None:
            return None
        load_s = max(0.0, target.serving_s - (target.accepted_s or target.serving_s))
        return self._planned_s + load_s, load_s

    def settled_links(self, since_s: float) -> list[Link]:
        """Transfers whose target reported ``loaded`` at or after ``since_s``."""
        return [link for link in self.links if (self._targets[link[1]].loaded_s or 0.0) >= since_s]

    def remaining_s(self, now_s: float) -> dict[tuple[str, str], float]:
        """Predicted seconds until each target that loads is whole, by (worker_id, instance_id); but for its overhead,
        which who loads from it has as well, and which is added there."""
        start_s = self._planned_s or now_s
        return {
            (t.worker_id, t.instance_id): max(0.0, start_s + self._transfer_s(t.worker_id) - now_s)
            for t in self._targets.values()
            if self.predicted_s.get(t.worker_id) and self._loads(t.worker_id)
        }

    def still_loads(self, worker_id: str, now_s: float) -> bool:
        """Whether a target may lack something: it has not said that it has everything, and is not so late that its
        word must have been lost."""
        predicted_s = self.predicted_s.get(worker_id, 0.0)
        latest_s = max(DEADLINE_FINISHES * predicted_s, predicted_s + LOST_WORD_S) if predicted_s else float("inf")
        return self._loads(worker_id) and now_s <= (self._planned_s or now_s) + latest_s

    def layers_ready_s(self, worker_id: str) -> tuple[float, ...]:
        """How long after the plan a target had each layer, up to the first layer that it has not reported."""
        target = self._targets.get(worker_id)
        times: list[float] = []
        while target is not None and (at_s := target.layers_s.get(len(times))) is not None:
            times.append(at_s - self.made_s)
        return tuple(times)

    @property
    def all_loaded(self) -> bool:
        """Whether every target that has not failed has everything."""
        return self.direction == "out" and all(t.loaded_s or t.failure for t in self._targets.values())

    @property
    def loads(self) -> tuple[Loaded, ...]:
        """What those took that have everything, where something was predicted."""
        return tuple(
            Loaded(
                self.ways[t.worker_id],
                t.first_byte_s - self.made_s,
                t.loaded_s - self.made_s - self._transfer_s(t.worker_id),
            )
            for t in self._targets.values()
            if t.first_byte_s and t.loaded_s and not t.failure
            if self.predicted_s.get(t.worker_id) and t.worker_id in self.ways
        )

    def _transfer_s(self, worker_id: str) -> float:
        return self.predicted_s[worker_id] - self.overhead_s.get(worker_id, 0.0)

    def _loads(self, worker_id: str) -> bool:
        target = self._targets[worker_id]
        ended = self._failure or target.failure or target.loaded_s or target.serving_s
        return self.direction == "out" and not ended

    def planned(self, at_s: float) -> None:
        """The plan was made and published."""
        self._planned_s = at_s

    def fail(self, why: str) -> None:
        """The operation as a whole failed (no plan, no publisher). What has ended stays so: an order may have been
        carried out of which the stream's word was lost."""
        if self.finished:
            return
        self._failure = self._failure or why
        for pair in self.pairs.values():
            pair.fail(why)

    def fail_target(self, worker_id: str, why: str) -> None:
        """A target will not end by itself."""
        target = self._targets.get(worker_id)
        if target is not None and not target.failure:
            target.failure = why

    def apply(self, event: ScaleProgress, now_s: float) -> None:
        """Take one progress event that came now; unknown workers are ignored (sources report too)."""
        target = self._targets.get(event.worker_id)
        if target is not None and target.instance_id == event.instance_id:
            target.apply(event, now_s)

    def apply_live(self, report: LiveReport, now_s: float) -> None:
        """Take the report of a pair, which came now; one of an unknown pair is ignored."""
        pair = self.pairs.get(report.pair_id)
        if pair is not None:
            pair.apply(report, now_s)

    def check(self, workers: Mapping[str, WorkerRecord], now_s: float) -> None:
        """Fail the open targets that will not end by themselves, given all living workers by id, and stop waiting for
        pairs that do not report."""
        self._check_targets(workers, now_s)
        for pair in self.pairs.values():
            ended = self._targets[pair.assignment.target.worker_id].ended
            pair.check(ended, now_s, source_gone=self._source_gone(pair, workers, now_s))

    def _source_gone(self, pair: LivePair, workers: Mapping[str, WorkerRecord], now_s: float) -> str:
        source = pair.assignment.source
        if self._is_dead(source.worker_id, workers, now_s):
            return "the source's worker died"
        worker = workers.get(source.worker_id)
        gone = worker is not None and not _holds(worker, source.instance_id)
        return "the source's worker does not hold its instance any more" if gone else ""

    def _is_dead(self, worker_id: str, workers: Mapping[str, WorkerRecord], now_s: float) -> bool:
        """Whether it has been missing for long. A registry that was emptied knows no worker for a moment."""
        if worker_id in workers:
            self._missing_since_s.pop(worker_id, None)
            return False
        return now_s - self._missing_since_s.setdefault(worker_id, now_s) >= MISSING_S

    def _check_targets(self, workers: Mapping[str, WorkerRecord], now_s: float) -> None:
        for worker_id, instance_id in self.open_targets:
            worker = workers.get(worker_id)
            target = self._targets[worker_id]
            if self._is_dead(worker_id, workers, now_s):
                self.fail_target(worker_id, "the worker died")
            if worker is None:
                continue
            if self.direction == "in":
                if not _holds(worker, instance_id):
                    target.spare_s = now_s  # its own report was lost
                elif worker.state == "serving" and now_s > self.accept_by_s:
                    # It counts again: draining it takes a new plan.
                    self.fail_target(worker_id, "it serves on: it never heard that it is to drain")
            elif self.direction == "mutate":
                self._check_role(worker, target, now_s)
            elif self._came_up(worker, instance_id):
                # Its own reports were lost, or came before this planner led. When that was is unknown.
                target.loaded_s = target.loaded_s or now_s
                target.serving_s = now_s
            elif worker.worker.process != target.worker:
                # Back before the registry missed it: what was meant for the process before never reaches this one.
                knew = target.knows_plan
                self.fail_target(worker_id, "the worker died and started again" if knew else STARTED_ANEW)
            elif now_s > self.deadline_s:
                self.fail_target(worker_id, "it did not end within the deadline")
            elif worker.lease_plan_id != self.plan_id and not _holds(worker, instance_id):
                if target.accepted_s is not None:
                    self.fail_target(worker_id, "its instance is gone")
                elif now_s > self.accept_by_s:
                    why = "how it ended is not known" if self.recalled else "the plan was never accepted"
                    self.fail_target(worker_id, why)

    def _check_role(self, worker: WorkerRecord, target: Target, now_s: float) -> None:
        if not _holds(worker, target.instance_id):
            self.fail_target(target.worker_id, "its instance is gone")
        elif worker.instance is not None and worker.instance.role == self.role:
            target.serving_s = now_s  # its own report was lost
        elif now_s > self.deadline_s:
            self.fail_target(target.worker_id, "it did not take its new role in time")

    def _came_up(self, worker: WorkerRecord, instance_id: str) -> bool:
        """Whether the registry shows that the target serves, with all weights, or has served."""
        is_whole = worker.instance is not None and worker.instance.is_complete
        shown = (worker.state == "serving" and is_whole) or (worker.state == "draining" and not self.revives)
        return shown and _holds(worker, instance_id)

    def record(self, *, details: bool = True) -> ScaleRecord:
        """The record as of now. ``details``: pairs with their batches and timelines."""
        targets = list(self._targets.values())
        layers = sorted({layer for t in targets for layer in t.layers_s})
        complete = [i for i in layers if all(i in t.layers_s for t in targets if not t.failure)]
        ready = tuple(self._ms(max(t.layers_s[i] for t in targets if i in t.layers_s)) or 0.0 for i in complete)
        failures = [f"{t.worker_id}: {t.failure}" for t in targets if t.failure]
        failed = bool(self._failure) or (self.finished and bool(failures))
        status: Literal["running", "done", "failed"] = "failed" if failed else "done" if self.finished else "running"
        first = min((t.first_byte_s for t in targets if t.first_byte_s), default=None)
        return ScaleRecord(
            plan_id=self.plan_id,
            model=self.model,
            role=self.role,
            status=status,
            direction=self.direction,
            desired=self.desired,
            reason=self._failure or self.reason,
            triggered_at_s=self.triggered_at_s,
            trigger_to_plan_ms=self._ms(self._planned_s),
            trigger_to_first_byte_ms=self._ms(first),
            layer_ready_ms=ready,
            trigger_to_loaded_ms=self._last_ms([t.loaded_s for t in targets]),
            predicted_loaded_ms=self._last_ms([self._predicted_s(t.worker_id) for t in targets]),
            trigger_to_serving_ms=self._last_ms([t.serving_s for t in targets]),
            trigger_to_spare_ms=self._last_ms([t.spare_s for t in targets]),
            bytes=sum(t.received_bytes for t in targets),
            gbps=min((g for g in (t.gbps for t in targets) if g is not None), default=0.0),
            targets=tuple(t.record(self.triggered_s) for t in targets),
            explain=self.explain,
            left_out=self.left_out,
            trace_id=self.trace_id,
            advice=self.advice,
            hops=self.hops,
            live=tuple(pair.record(self.triggered_s, details=details) for pair in self.pairs.values()),
            trigger_to_working_ms=self._ms(min((t.working_s for t in targets if t.working_s), default=None)),
        )

    def _predicted_s(self, worker_id: str) -> float | None:
        predicted_s = self.predicted_s.get(worker_id)
        return self.made_s + predicted_s if predicted_s else None

    def _ms(self, at_s: float | None) -> float | None:
        return since_ms(self.triggered_s, at_s)

    def _last_ms(self, times: list[float | None]) -> float | None:
        known = [t for t in times if t is not None]
        return self._ms(max(known)) if known and len(known) == len(times) else None


def _holds(worker: WorkerRecord, instance_id: str) -> bool:
    return worker.instance is not None and worker.instance.instance_id == instance_id
