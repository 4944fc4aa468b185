"""Schedules of random cases, played back and compared. Times are in layer-times of a batch of mean cost."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.stats import Summary
from bench.zigzag.optimum import best_gates, can_enumerate, equal_optimum
from services.planner.core.live.bound import Problem
from services.planner.core.live.ilp import TIME_LIMIT_S, improve
from services.planner.core.live.search import best_first_come_split, good_splits
from services.planner.core.live.split import SplitResult, assign
from shared.zigzag.playback import Job, play
from shared.zigzag.queue import Policy

EXACT = 1e-9
"""Relative. Costs are multiples of a quarter, so sums are exact; means divide."""


@dataclass(frozen=True, slots=True)
class Case:
    """One random case."""

    costs: tuple[float, ...]
    loaded_at: tuple[float, ...]
    load: int

    @property
    def jobs(self) -> list[Job]:
        """Its batches, all waiting at time 0."""
        return [Job(f"b{i:02}", cost) for i, cost in enumerate(self.costs)]

    @property
    def problem(self) -> Problem:
        """The same for the planner."""
        return Problem(self.costs, self.loaded_at)


def make_case(rng: random.Random, *, num_layers: int, num_batches: int, load: int, equal: bool) -> Case:
    """Equal batches have one layer-time per layer, unequal ones a quarter to two."""
    costs = tuple([1.0 if equal else rng.randint(1, 8) / 4 for _ in range(num_batches)])
    return Case(costs, tuple([float(load * k) for k in range(num_layers)]), load)


def random_case(rng: random.Random, *, equal: bool) -> Case:
    """4 to 80 layers, 1 to 30 batches, 1 to 12 layer-times to load a layer."""
    sizes = {"num_layers": rng.randint(4, 80), "num_batches": rng.randint(1, 30), "load": rng.randint(1, 12)}
    return make_case(rng, **sizes, equal=equal)


def example() -> dict[str, list[float]]:
    """Completions of the worked example under each policy."""
    jobs = [Job(f"b{i}", 1) for i in range(7)]
    return {policy.value: list(play(jobs, [6 * k for k in range(7)], policy).completions) for policy in Policy}


@dataclass(slots=True)
class Ratios:
    """How means compare with another schedule's, over cases."""

    values: list[float] = field(default_factory=list)

    def add(self, mean: float, other: float) -> None:
        """One case; equal within rounding counts as equal."""
        ratio = mean / other
        self.values.append(1.0 if abs(ratio - 1) < EXACT else ratio)

    def summary(self) -> dict[str, float]:
        """How often worse, by how much when worse, at worst, and on the whole."""
        worse = [v - 1 for v in self.values if v > 1]
        return {
            "worse_cases": len(worse),
            "worse_share": round(len(worse) / max(1, len(self.values)), 4),
            "worse_by_mean": round(sum(worse) / max(1, len(worse)), 4),
            "worse_by_max": round(max(worse, default=0.0), 4),
            "ratio_mean": round(sum(self.values) / max(1, len(self.values)), 4),
        }


def equal_cases(rng: random.Random, count: int) -> dict[str, float]:
    """Without gates against best effort, and against the optimum of every case small enough."""
    over_best_effort, over_stop = Ratios(), Ratios()
    for _ in range(count):
        case = random_case(rng, equal=True)
        mean = play(case.jobs, case.loaded_at).mean
        over_best_effort.add(mean, play(case.jobs, case.loaded_at, Policy.BEST_EFFORT).mean)
        over_stop.add(mean, play(case.jobs, case.loaded_at, Policy.STOP_THE_WORLD).mean)
    sizes = [(n, b, load) for n in range(2, 13) for b in range(1, 7) for load in range(1, 13)]
    small = [size for size in sizes if can_enumerate(*size)]
    gaps = []
    for num_layers, num_batches, load in small:
        case = make_case(rng, num_layers=num_layers, num_batches=num_batches, load=load, equal=True)
        gaps.append(play(case.jobs, case.loaded_at).mean / equal_optimum(num_layers, num_batches, load) - 1)
    return {
        "worse_than_best_effort": over_best_effort.summary()["worse_cases"],
        "of_best_effort_mean": over_best_effort.summary()["ratio_mean"],
        "of_stop_the_world_mean": over_stop.summary()["ratio_mean"],
        "gap_to_optimum_max": max([0.0 if abs(gap) < EXACT else gap for gap in gaps], default=0.0),
        "enumerated": len(small),
    }


def unequal_cases(rng: random.Random, count: int, small: int) -> dict[str, object]:
    """With and without gates against best effort and the best first-come split; predictions against playback."""
    free_be, free_split, used_be, used_split, used_free, over_gates = (Ratios() for _ in range(6))
    used = by_ilp = missed = 0
    early: list[float] = []
    for _ in range(count):
        case = random_case(rng, equal=False)
        assigned = assign(case.jobs, case.loaded_at)
        best_effort = play(case.jobs, case.loaded_at, Policy.BEST_EFFORT).mean
        split, _ = best_first_come_split(case.problem)
        free_be.add(assigned.free.mean, best_effort)
        free_split.add(assigned.free.mean, split)
        used_be.add(assigned.played.mean, best_effort)
        used_split.add(assigned.played.mean, split)
        used_free.add(assigned.played.mean, assigned.free.mean)
        used += bool(assigned.gates)
        missed += _missed(assigned)
        if assigned.split is not None:
            early.append(assigned.split.predicted_mean / assigned.split.played.mean - 1)
            by_ilp += bool(assigned.gates) and assigned.split.by_ilp
    for _ in range(small):
        case = make_case(rng, num_layers=4, num_batches=3, load=rng.randint(1, 12), equal=False)
        over_gates.add(assign(case.jobs, case.loaded_at).played.mean, best_gates(case.jobs, case.loaded_at))
    return {
        "free": {"against_best_effort": free_be.summary(), "against_first_come_split": free_split.summary()},
        "assigned": {
            "against_best_effort": used_be.summary(),
            "against_first_come_split": used_split.summary(),
            "against_free": used_free.summary(),
            "against_best_gates": over_gates.summary(),
            "used": used,
            "by_ilp": by_ilp,
        },
        "predictions_missed": missed,
        "predicted_over_played_mean": round(sum(early) / max(1, len(early)), 4),
        "predicted_over_played_max": round(max(early, default=0.0), 4),
    }


def _missed(assigned: SplitResult) -> int:
    if assigned.split is None:
        return 0
    pairs = zip(assigned.split.played.completions, assigned.split.predicted, strict=True)
    return sum([played > predicted * (1 + EXACT) for played, predicted in pairs])


def solver_times(rng: random.Random, count: int, num_layers: int = 80, num_batches: int = 12) -> dict[str, float]:
    """Milliseconds of the integer program, and of the whole assignment with its playbacks."""
    cases: Sequence[Case] = [
        make_case(rng, num_layers=num_layers, num_batches=num_batches, load=rng.randint(1, 12), equal=False)
        for _ in range(count)
    ]
    assign(cases[0].jobs, cases[0].loaded_at)  # the first call loads the solver
    ilp_ms, cpu_ms, assign_ms = [], [], []
    for case in cases:
        start = good_splits(case.problem)[0]
        cpu_began_s = time.process_time()
        began_s = time.perf_counter()
        improve(case.problem, start, TIME_LIMIT_S)
        solved_s = time.perf_counter()
        cpu_ms.append((time.process_time() - cpu_began_s) * 1e3)
        assign(case.jobs, case.loaded_at)
        ilp_ms.append((solved_s - began_s) * 1e3)
        assign_ms.append((time.perf_counter() - solved_s) * 1e3)
    ilp, cpu, whole = Summary.of(ilp_ms), Summary.of(cpu_ms), Summary.of(assign_ms)
    if ilp is None or cpu is None or whole is None:
        raise ValueError("no cases, nothing measured")
    return {
        "ilp_ms_p50": round(ilp.p50, 2),
        "ilp_ms_p99": round(ilp.p99, 2),
        "ilp_cpu_ms_p99": round(cpu.p99, 2),
        "assign_ms_p50": round(whole.p50, 2),
        "assign_ms_p99": round(whole.p99, 2),
    }
