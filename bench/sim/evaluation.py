"""Systems side by side on the same arrivals: who runs, with how many instances, and by which objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from bench.replay.objectives import FACTOR, Slo
from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.sim.compute import Compute
from bench.sim.run import simulate
from bench.sim.run_result import Figures, RunResult, figures, means
from bench.sim.search import ATTAINED, best_split, highest_factor
from bench.sim.setup import Setup
from bench.systems import SYSTEMS, Split, System
from bench.traces.request import Trace
from bench.traces.scaling import scale_rate
from services.worker.core.scheduling.prompt_cost import num_pairs
from shared.errors import BadRequest

FULL = SYSTEMS["static-full"]


def span_s(requests: Sequence[PlannedRequest]) -> float:
    """From the first arrival to the last."""
    return requests[-1].due_s - requests[0].due_s


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
    skipped_rows: int
    unsorted_rows: int
    """Of the trace: rows without tokens, which are left out, and rows out of order, which are put in order."""
    requests_per_s: float
    slo_ttft_s: float | None
    slo_tbt_s: float | None
    """The relative objectives."""
    slo_of: str
    """The system of whose means they are a multiple."""
    systems: dict[str, Figures]
    interrupted: bool = False
    """Systems that had not finished have no row."""


class Run(NamedTuple):
    """A system on requests. ``split``: of the instances of one that does not scale."""

    result: RunResult
    split: Split | None = None


@dataclass
class Evaluator:
    """One trace on one cluster."""

    setup: Setup
    trace: Trace
    shape: Shape
    say: Callable[[str], None]
    splits: dict[tuple[int, float], Split] = field(default_factory=dict)
    """The best ones found, by their instances and the factor of the rate: where another search begins."""
    _mean_gpus: dict[tuple[str, float], float] = field(default_factory=dict, init=False)
    """By system and factor."""

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

        Raises ``BadRequest`` where it does at none, or where there is no such request.
        """
        model = self.setup.model
        if not self.within_reach(self.requests(1.0)):
            raise BadRequest(
                f"{self.trace.name}: an idle instance computes no prompt in {model.slo_ttft_s * 1000:g} ms: there is "
                "no rate to take half of",
                param="scale-rate",
            )

        def attains(factor: float) -> bool:
            requests = self.requests(factor)
            within = self.within_reach(requests)
            goal = ATTAINED * within / len(requests)
            share = self.run(FULL, requests, factor, enough=goal).result.judged_by(self.absolute()).share
            self.say(
                f"{FULL.name}: {share:.2%} within the absolute objectives at {factor:.4g} times the rate; of "
                f"{within / len(requests):.2%} that are within reach"
            )
            return within > 0 and share >= goal

        try:
            return highest_factor(attains) / 2
        except ValueError as error:
            raise BadRequest(f"{self.trace.name}: {error}", param="scale-rate") from error

    def within_reach(self, requests: Sequence[PlannedRequest]) -> int:
        """Requests whose prompt an idle instance computes within the objective."""
        setup = self.setup
        compute, chunk = Compute(setup.model.profile, scale=setup.compute_scale), setup.worker.prefill_chunk_tokens

        def prompt_s(num_tokens: int) -> float:
            starts = range(0, num_tokens, chunk)
            sizes = [min(chunk, num_tokens - start) for start in starts]
            return sum(
                compute.step_s(size, num_pairs(start, size), 0, 0) for start, size in zip(starts, sizes, strict=True)
            )

        return sum(prompt_s(request.input_tokens) < setup.model.slo_ttft_s for request in requests)

    def evaluate(
        self,
        systems: Sequence[System],
        factor: float,
        finished: Callable[[RunResult, Slo], None] = lambda _result, _relative: None,
    ) -> Evaluation:
        """All of them, on the same requests. ``finished`` gets each result with the relative objectives; no result is
        kept. After Ctrl-C: those that have finished by then; raises ``KeyboardInterrupt`` if none has."""
        requests = self.requests(factor)
        by = next((system for system in systems if system.name == FULL.name), systems[0])
        rows: dict[str, Figures] = {}
        relative, interrupted = Slo(), False
        # First the one by which the others are judged; those that are half of another's size come after it.
        try:
            for system in sorted(systems, key=lambda one: (one is not by, one.size == "half")):
                result, split = self.run(system, requests, factor)
                if system is by:
                    ttft_s, tbt_s = means(result)
                    relative = Slo(
                        FACTOR * ttft_s if ttft_s is not None else None, FACTOR * tbt_s if tbt_s is not None else None
                    )
                rows[system.name] = figures(result, relative, self.absolute(), split)
                finished(result, relative)
                died = f", {result.num_died} workers died" if result.num_died else ""
                self.say(
                    f"{system.name}: {len(result.records)} of {len(requests)} requests, {result.num_events} events"
                    f"{died}"
                )
        except KeyboardInterrupt:
            if not rows:
                raise
            interrupted = True
        setup = self.setup
        return Evaluation(
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
            skipped_rows=self.trace.skipped_rows,
            unsorted_rows=self.trace.unsorted_rows,
            requests_per_s=len(requests) / max(span_s(requests), 1e-9),
            slo_ttft_s=relative.ttft_s,
            slo_tbt_s=relative.tbt_s,
            slo_of=by.name,
            systems={system.name: rows[system.name] for system in systems if system.name in rows},
            interrupted=interrupted,
        )

    def run(self, system: System, requests: tuple[PlannedRequest, ...], factor: float, *, enough: float = 2.0) -> Run:
        """One of them; if it does not scale, with the best split of its instances.

        ``enough``: a share of requests within the absolute objectives with which the first split will do.
        """
        if system.scales:
            result = simulate(self.setup, system, requests)
            self._mean_gpus[system.name, factor] = result.mean_instances
            return Run(result)
        total = system.num_instances(self.setup.num_workers, self._mean(system, requests, factor))
        if system.serving == "colocated":
            return Run(simulate(self.setup, system, requests, colocated=total))
        found: tuple[tuple[float, ...], Run] | None = None
        """The best so far, and how good."""

        def score(split: Split) -> tuple[float, ...]:
            nonlocal found
            if found is not None and found[0][0] >= enough:
                return (0.0,)
            result = simulate(self.setup, system, requests, split=split)
            reached = (result.judged_by(self.absolute()).share, -(means(result)[0] or float("inf")))
            # As the search has it: of equals, the one with the fewest prefill instances.
            if found is None or (*reached, -split.prefill) > found[0]:
                found = (*reached, -split.prefill), Run(result, split)
            return reached

        best_split(self._likely(system.splits(total)), score)
        assert found is not None
        best = found[1]
        assert best.split is not None
        self.splits[total, factor] = best.split
        return best

    def _mean(self, system: System, requests: tuple[PlannedRequest, ...], factor: float) -> float:
        """The average number of instances of the one that it is half as large as; no number if there is none."""
        if system.size != "half":
            return float("nan")
        other = "blitz-colocated" if system.serving == "colocated" else "blitz"
        if (other, factor) not in self._mean_gpus:
            self.say(f"{other}, for its average number of instances")
            self.run(SYSTEMS[other], requests, factor)
        return self._mean_gpus[other, factor] / self.setup.model.degree

    def _likely(self, splits: Sequence[Split]) -> Sequence[Split]:
        """Those around the best one at another rate: first what was best, then the rest."""
        before = next((split for (total, _), split in reversed(self.splits.items()) if total == sum(splits[0])), None)
        if before is None:
            return splits
        reach = max(1, sum(before) // 8)
        return [split for split in splits if abs(split.prefill - before.prefill) <= reach]
