"""Systems side by side on the same arrivals: who runs, with how many instances, and by which objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from bench.replay.objectives import FACTOR, Slo
from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.sim.compute import Compute
from bench.sim.outcome import Figures, Outcome, figures, means
from bench.sim.run import Setup, simulate
from bench.sim.search import ATTAINED, best_split, highest_factor
from bench.systems import SYSTEMS, Split, System
from bench.traces.request import Trace
from bench.traces.scaling import scale_rate
from services.worker.core.scheduling.prompt_cost import num_pairs
from shared.errors import BadRequest

FULL = SYSTEMS["static-full"]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What systems came to. Nothing in it depends on the machine that simulated."""

    trace: str
    cluster: str
    model: str
    degree: int
    weights_bytes: int
    num_gpus: int
    seed: int
    scale_rate: float
    compute_scale: float
    requests: int
    shortened: int
    """Of these, those that were longer than the model's context."""
    requests_per_s: float
    slo_ttft_s: float | None
    slo_tbt_s: float | None
    """The relative objectives."""
    slo_of: str
    """The system of whose means they are a multiple."""
    systems: dict[str, Figures]


@dataclass
class Evaluator:
    """One trace on one cluster."""

    setup: Setup
    trace: Trace
    shape: Shape
    say: Callable[[str], None]
    _splits: dict[tuple[int, float], Split] = field(default_factory=dict)

    def requests(self, factor: float) -> tuple[PlannedRequest, ...]:
        """The trace's, ``factor`` times as many. Raises ``BadRequest`` if none are left."""
        planned = plan_requests(scale_rate(self.trace, factor, seed=self.setup.seed), self.shape)
        if not planned:
            raise BadRequest(f"{self.trace.name}: no requests are left to simulate", param="trace")
        return planned

    def absolute(self) -> Slo:
        """The model's absolute objectives."""
        return Slo(self.setup.model.slo_ttft_s, self.setup.model.slo_tbt_s)

    def half(self) -> float:
        """Half of the highest rate at which ``static-full`` keeps the absolute objectives for 99 % of the requests that
        an idle instance keeps them for: a prompt that takes longer alone says nothing of the load.

        Raises ``BadRequest`` where it does at none.
        """

        def attains(factor: float) -> bool:
            requests = self.requests(factor)
            within = self._within_reach(requests)
            goal = ATTAINED * within / len(requests)
            share = self._run(FULL, requests, factor, enough=goal).judged_by(self.absolute()).share
            self.say(
                f"{FULL.name}: {share:.2%} within the absolute objectives at {factor:.4g} times the rate; of "
                f"{within / len(requests):.2%} that are within reach"
            )
            return share >= goal

        try:
            return highest_factor(attains) / 2
        except ValueError as error:
            raise BadRequest(f"{self.trace.name}: {error}", param="scale-rate") from error

    def _within_reach(self, requests: Sequence[PlannedRequest]) -> int:
        """Requests whose prompt an idle instance computes within the objective."""
        setup = self.setup
        compute, chunk = Compute(setup.model.profile, scale=setup.compute_scale), setup.worker.max_batch_tokens

        def prompt_s(num_tokens: int) -> float:
            starts = range(0, num_tokens, chunk)
            sizes = [min(chunk, num_tokens - start) for start in starts]
            return sum(
                compute.step_s(size, num_pairs(start, size), 0, 0) for start, size in zip(starts, sizes, strict=True)
            )

        return sum(prompt_s(request.input_tokens) < setup.model.slo_ttft_s for request in requests)

    def evaluate(self, systems: Sequence[System], factor: float) -> tuple[Evaluation, list[Outcome]]:
        """All of them, on the same requests."""
        requests = self.requests(factor)
        runs: dict[str, tuple[Outcome, Split | None]] = {}
        mean_gpus: dict[str, float] = {}
        # Those that are half of another's size come after it.
        for system in sorted(systems, key=lambda one: one.size == "half"):
            mean = None
            if system.size == "half":
                other = "blitz-colocated" if system.serving == "colocated" else "blitz"
                if other not in mean_gpus:
                    self.say(f"{other}, for its average number of instances")
                    mean_gpus[other] = self._run(SYSTEMS[other], requests, factor).mean_instances
                mean = mean_gpus[other] / self.setup.model.degree
            runs[system.name] = self._run(system, requests, factor, mean), self._split_of(system, factor, mean)
            outcome = runs[system.name][0]
            mean_gpus[system.name] = outcome.mean_instances
            self.say(f"{system.name}: {len(outcome.records)} of {len(requests)} requests, {outcome.num_events} events")
        of = FULL.name if FULL.name in runs else systems[0].name
        ttft_s, tbt_s = means(runs[of][0])
        relative = Slo(
            FACTOR * ttft_s if ttft_s is not None else None,
            FACTOR * tbt_s if tbt_s is not None else None,
        )
        setup = self.setup
        span_s = max(requests[-1].due_s - requests[0].due_s, 1e-9)
        outcomes = [runs[system.name][0] for system in systems]
        evaluation = Evaluation(
            trace=self.trace.name,
            cluster=setup.cluster.name,
            model=setup.model.name,
            degree=setup.model.degree,
            weights_bytes=setup.model.record.weights_bytes,
            num_gpus=setup.cluster.num_gpus,
            seed=setup.seed,
            scale_rate=factor,
            compute_scale=setup.compute_scale,
            requests=len(requests),
            shortened=sum(request.shortened for request in requests),
            requests_per_s=len(requests) / span_s,
            slo_ttft_s=relative.ttft_s,
            slo_tbt_s=relative.tbt_s,
            slo_of=of,
            systems={
                system.name: figures(runs[system.name][0], relative, self.absolute(), runs[system.name][1])
                for system in systems
            },
        )
        return evaluation, outcomes

    def _run(
        self,
        system: System,
        requests: tuple[PlannedRequest, ...],
        factor: float,
        mean: float | None = None,
        *,
        enough: float = 2.0,
    ) -> Outcome:
        """``enough``: a share of requests within the absolute objectives with which the first split will do."""
        if system.scales:
            return simulate(self.setup, system, requests)
        total = system.num_instances(self.setup.num_workers, mean if mean is not None else float("nan"))
        if system.serving == "colocated":
            return simulate(self.setup, system, requests, colocated=total)
        known: dict[Split, Outcome] = {}

        def score(split: Split) -> tuple[float, ...]:
            if any(outcome.judged_by(self.absolute()).share >= enough for outcome in known.values()):
                return (0.0,)
            known[split] = outcome = simulate(self.setup, system, requests, split=split)
            return outcome.judged_by(self.absolute()).share, -(means(outcome)[0] or float("inf"))

        best = best_split(self._likely(system.splits(total)), score)
        self._splits[total, factor] = best
        return known[best]

    def _likely(self, splits: Sequence[Split]) -> Sequence[Split]:
        """Those around the best one at another rate: first what was best, then the rest."""
        before = next((split for (total, _), split in reversed(self._splits.items()) if total == sum(splits[0])), None)
        if before is None:
            return splits
        reach = max(1, sum(before) // 8)
        return [split for split in splits if abs(split.prefill - before.prefill) <= reach]

    def _split_of(self, system: System, factor: float, mean: float | None) -> Split | None:
        if system.scales or system.serving == "colocated":
            return None
        total = system.num_instances(self.setup.num_workers, mean if mean is not None else float("nan"))
        return self._splits.get((total, factor))
