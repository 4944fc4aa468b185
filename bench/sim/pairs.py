"""All live pairs of a run: the planner's assignments, as the workers carry them out.

A split of a pair's batches is looked for by the planner's own search and its solver, which is bounded by nodes and
takes a fixed time: what a solver finds in so many seconds depends on the machine.
"""

from __future__ import annotations

from bench.sim.clock import Clock
from bench.sim.latencies import Latencies
from bench.sim.pair import SimPair
from bench.sim.pair_member import PairPaths
from bench.sim.planner import SimPlanner
from bench.sim.workers import Held, SimWorkers
from services.planner.core.live.request import SplitRequest
from services.planner.core.live.split import assign
from services.planner.core.operations.pair_record import LivePair
from services.worker.core.live.life import why_no_source
from shared.errors import BlitzError
from shared.messages.live import LiveReport, PlanSplit, ZigzagAssignment
from shared.messages.plans import ChainMember

SOLVER_NODES = 1
"""Of branch and bound: in the services' time limit it hardly gets to more, and what it starts from is hardly ever
improved."""


class SimPairs:
    """Those that are under way."""

    def __init__(
        self, clock: Clock, latencies: Latencies, workers: SimWorkers, planner: SimPlanner, paths: PairPaths
    ) -> None:
        self._clock = clock
        self._latencies = latencies
        self._workers = workers
        self._planner = planner
        self._paths = paths
        self._notice_s = latencies.silent_s
        self._by_target: dict[str, SimPair] = {}
        """By the instance id of the target, until its pair is over and it has all layers."""
        self._by_source: dict[str, SimPair] = {}
        self._newest: dict[str, PlanSplit] = {}
        """By pair: what is being split."""
        self._pull_s: dict[str, float] = {}
        """By source instance: what a pull took in its last pair."""

    def begin(self, assignment: ZigzagAssignment, stored_s: float) -> None:
        """An assignment that was published at ``stored_s`` reaches its members. The source reports why there is no
        pair, if there is none."""
        source, target = self._held(assignment.source), self._held(assignment.target)
        reason = self._refusal(assignment, stored_s, source, target)
        if reason or source is None or target is None or target.load is None:
            self._report(self._declined(assignment, reason))
            return
        pair = SimPair(
            self._clock,
            assignment,
            source.instance,
            target.instance,
            self._paths,
            pull_s=self._pull_s.get(source.instance_id, 0.0),
            ask_split=self._on_split,
            on_accepted=lambda: self._workers.live(assignment.target.worker_id),
            on_lending=lambda begun: self._workers.lends(assignment.source.worker_id, source, begun=begun),
            on_end=self._ended,
        )
        self._by_source[source.instance_id] = self._by_target[target.instance_id] = pair
        pair.begin()
        if target.load.layers_ready:
            pair.layers_ready(target.load.layers_ready)

    def _held(self, member: ChainMember) -> Held | None:
        held = self._workers[member.worker_id].held
        return held if held is not None and held.instance_id == member.instance_id else None

    def _refusal(self, assignment: ZigzagAssignment, stored_s: float, source: Held | None, target: Held | None) -> str:
        other = None if source is None else self._by_source.get(source.instance_id)
        reason = why_no_source(
            assignment,
            left_s=stored_s + assignment.valid_s - self._clock.now_s,
            instance_id="" if source is None else source.instance_id,
            state="spare" if source is None else source.instance.state,
            role="colocated" if source is None else source.instance.role,
            as_source="" if other is None else other.assignment.pair_id,
            as_target="another pair" if source is not None and source.instance.partial is not None else "",
        )
        return reason or ("" if target is not None and target.load is not None else "its target does not load")

    def _declined(self, assignment: ZigzagAssignment, reason: str) -> LiveReport:
        return LiveReport(
            pair_id=assignment.pair_id,
            plan_id=assignment.plan_id,
            source=assignment.source.worker_id,
            target=assignment.target.worker_id,
            policy=assignment.policy,
            outcome="failed",
            reason=reason,
            started_ago_s=0.0,
        )

    def _report(self, report: LiveReport) -> None:
        self._clock.after(self._latencies.progress_s, self._planner.on_live_report, report)

    def layers_ready(self, instance_id: str, num_layers: int) -> None:
        """A target has one more."""
        pair = self._by_target.get(instance_id)
        if pair is not None:
            pair.layers_ready(num_layers)

    def serves(self, instance_id: str) -> None:
        """A target has everything."""
        pair = self._by_target.pop(instance_id, None)
        if pair is not None:
            pair.layers_ready(pair.source.instance.compute.num_layers, complete=True)

    def worker_died(self, worker_id: str) -> None:
        """Its instance was in these pairs, and is gone; the other members do not know yet."""
        reason = f"worker {worker_id} died"
        for pair in self.under_way():
            if pair.source.instance.worker_id == worker_id:
                pair.source_gone(reason, self._notice_s)
                self._by_source.pop(pair.source.instance.instance_id, None)
                self._newest.pop(pair.assignment.pair_id, None)
            elif pair.target.instance.worker_id == worker_id:
                pair.target_gone(reason, self._notice_s)
            else:
                continue
            self._by_target.pop(pair.target.instance.instance_id, None)

    def under_way(self) -> list[SimPair]:
        """Pairs that are not over, or whose targets have not everything."""
        return list(dict.fromkeys([*self._by_source.values(), *self._by_target.values()]))

    def _ended(self, pair: SimPair) -> None:
        self._by_source.pop(pair.source.instance.instance_id, None)
        self._newest.pop(pair.assignment.pair_id, None)
        self._pull_s[pair.source.instance.instance_id] = pair.source.machine.time.pull_s
        if pair.report is not None:
            self._report(pair.report)

    # --- splits ------------------------------------------------------------------------------

    def _on_split(self, asked: PlanSplit) -> None:
        self._clock.after(self._latencies.progress_s, self._split, asked)

    def _split(self, asked: PlanSplit) -> None:
        try:
            pair, request = self._planner.planner.splits.request(asked, self._clock.now_s)
        except BlitzError:
            return  # it is over
        if request is not None:
            self._newest[asked.pair_id] = asked
            self._clock.after(self._latencies.split_s, self._answer, asked, pair, request)

    def _answer(self, asked: PlanSplit, pair: LivePair, request: SplitRequest) -> None:
        splits, now_s = self._planner.planner.splits, self._clock.now_s
        if self._newest.get(asked.pair_id) is not asked:
            return  # another request has come: that is answered
        del self._newest[asked.pair_id]
        if not splits.is_of_use(pair, now_s):
            return
        found = assign(
            request.jobs,
            request.loaded_at,
            source_free_at=request.source_free_at,
            pull_time=request.pull_time,
            # The service bounds its solver by time; that a simulation charges, whatever this machine takes.
            max_nodes=SOLVER_NODES,
        )
        revision = splits.gates(pair, found, self._latencies.split_s, now_s) if found.gates else None
        if revision is not None:
            self._clock.after(self._latencies.plan_s, self._set_gates, revision)

    def _set_gates(self, revision: ZigzagAssignment) -> None:
        pair = self._by_target.get(revision.target.instance_id)
        if pair is not None and pair.assignment.pair_id == revision.pair_id:
            pair.set_gates(revision.gates)
