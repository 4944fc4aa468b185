"""The runs of a lab once more in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from bench.evaluate.models import find_model
from bench.evaluate.run import LEAD_IN_S
from bench.evaluate.saved_run import Plan, digest
from bench.evaluate.simulated import SimulatedLab
from bench.fidelity.condensed import Condensed, Event, Figures
from bench.replay.objectives import Slo
from bench.sim.cluster import known_cluster
from bench.sim.monitor import INTERVAL_S
from bench.sim.run_result import RunResult, all_gaps
from bench.sim.setup import Imposed
from bench.systems import find
from bench.traces.request import Trace
from bench.traces.scaling import scale_rate, spread_seconds
from shared.errors import BadRequest

LEAST_PHASES = 5


class Simulation:
    """Of runs on one trace, as it was published."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._scaled = lru_cache(maxsize=1)(self._scale)
        self._lab = cache(_lab)

    def _scale(self, factor: float, seed: int) -> Trace:
        return scale_rate(spread_seconds(self._trace, seed=seed), factor, seed=seed)

    def check(self, plan: Plan) -> None:
        """Raises ``BadRequest`` if the plan is not of this trace, or of a system, a model, settings or links other than
        those that are simulated."""
        _check_played(plan)
        scaled = self._scaled(plan.scale_rate, plan.seed)
        if digest(scaled, plan.window, LEAD_IN_S) != plan.digest:
            raise BadRequest(f"{plan.name} is a run of other requests than those of {self._trace.name}", param="trace")

    def figures(self, run: Condensed, *, phase: float, imposed: bool = False) -> Figures:
        """What a run comes to. ``phase``: 0 to 1, how far the monitor is between two looks when the run begins, which
        in the lab is by chance. ``imposed``: the planner is asked for what it was asked for in the lab, then."""
        plan = run.plan
        result = self._lab(plan.model, plan.workers, plan.seed).run(
            find(plan.system),
            plan,
            self._scaled(plan.scale_rate, plan.seed),
            placed=run.placed,
            looks_after_s=phase * INTERVAL_S,
            imposed=_imposed(run) if imposed else None,
        )
        return _figures(result)

    def repeated(self, runs: Sequence[Condensed]) -> list[Figures]:
        """As often as in the lab, five times at least, with phases that are evenly spread."""
        number = max(LEAST_PHASES, len(runs))
        return [self.figures(runs[i % len(runs)], phase=i / number) for i in range(number)]

    def imposed(self, runs: Sequence[Condensed]) -> list[Figures]:
        """Each with its own scale events. Of systems that do not scale there are none."""
        if not find(runs[0].plan.system).scales:
            return []
        return [self.figures(run, phase=0.0, imposed=True) for run in runs]


def _imposed(run: Condensed) -> list[Imposed]:
    """What had been asked for when the replay began, part of which may still load, and each event of it."""
    events = [e for e in run.figures.events if e.direction in ("out", "in", "mutate")]
    begun = [Imposed(0.0, role, number) for role, number in run.held.items()]
    return begun + [Imposed(e.at_s, e.role, e.desired) for e in events]


def _check_played(plan: Plan) -> None:
    system, model, cluster = find(plan.system), find_model(plan.model), known_cluster("lab")
    if plan.nic_gbps != cluster.nic_gbps:
        raise BadRequest(
            f"{plan.name} had NICs of {plan.nic_gbps:g} Gbit/s: those that are simulated have {cluster.nic_gbps:g}",
            param="runs",
        )
    settings = system.environ(give_back_s=plan.give_back_s)
    others = sorted(name for name in {*settings, *plan.settings} if settings.get(name) != plan.settings.get(name))
    if others:
        raise BadRequest(
            f"{plan.name} had other settings than {system.name} has when it is simulated: {', '.join(others)}",
            param="runs",
        )
    if Slo(plan.slo_ttft_s, plan.slo_tbt_s) != model.slo:
        raise BadRequest(f"{plan.name} had other objectives than {model.name} has when it is simulated", param="runs")
    if set(plan.instances) != set(system.roles):
        raise BadRequest(f"{plan.name} had instances of other roles than {system.name} has", param="runs")


def _lab(model: str, workers: int, seed: int) -> SimulatedLab:
    return SimulatedLab.of(find_model(model), known_cluster("lab"), workers=workers, seed=seed)


def _figures(result: RunResult) -> Figures:
    by_index = {record.index: record for record in result.records if record.failure is None}
    found = [by_index.get(request.index) for request in result.requests]
    gaps = all_gaps(list(by_index.values()))
    events = [Event.of(operation, zero_s=result.zero_s) for operation in result.cluster.operations]
    return Figures(
        ttft_s=tuple(None if record is None else record.ttft_s for record in found),
        mean_gap_s=tuple(None if record is None else record.mean_gap_s for record in found),
        tbt_mean_s=float(gaps.mean()) if len(gaps) else None,
        tbt_p99_s=float(np.percentile(gaps, 99)) if len(gaps) else None,
        gpu_seconds=result.cluster.gpu_seconds,
        failed=len(found) - len(by_index),
        # As of the lab, those of the window.
        events=tuple(event for event in events if event.at_s >= 0),
    )
