"""Good splits, found by looking at batches in first-come order and keeping a beam of partial splits.

What makes batches of unequal cost hard is the choice for each of three shapes: whole at the source, whole at the
target, or split so that the target is ready just as the source gets free. Two clocks say what a choice costs: when the
source is free, and how much the target has to do. A solver needs seconds for these choices, the beam a millisecond.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from services.planner.core.live.bound import Problem

WIDTH = 128
"""Partial splits kept per batch. 1000 instead gain 1 % more at 12 batches and 80 layers, for eight times the time."""

STEPS = 8
"""Costs are rounded to the mean over this for whole batches: equal sums keep the search small."""


@dataclass(frozen=True, slots=True)
class _Partial:
    source: float
    """When the source is free."""
    target: float
    """Work of the target so far."""
    total: float
    """Sum of completions."""
    target_layers: tuple[int, ...]


def good_splits(problem: Problem, *, width: int = WIDTH) -> list[tuple[int, ...]]:
    """The best split that the beam finds, and the best that gives every batch whole to one side. At least one."""
    step = sum(problem.costs) / max(1, len(problem.costs)) / STEPS
    rounded = tuple([max(1, round(cost / step)) * step for cost in problem.costs])
    _, at_target = best_first_come_split(replace(problem, costs=rounded), limit=4 * width)
    whole = tuple([problem.num_layers * here for here in at_target])
    return list(dict.fromkeys([_beam(problem, width).target_layers, whole]))


def _beam(problem: Problem, width: int) -> _Partial:
    kept = [_Partial(problem.source_free_at, 0.0, 0.0, ())]
    for i, cost in enumerate(problem.costs):
        left = len(problem.costs) - i - 1
        scored = [
            # What is left completes later the later both sides are free; their mean is good enough to rank by.
            (more.total + left * (more.source + problem.loaded_at[0] + more.target) / 2, more)
            for partial in kept
            for more in _choices(problem, partial, cost)
        ]
        scored.sort(key=lambda ranked: ranked[0])
        kept = [more for _, more in scored[:width]]
    return min(kept, key=lambda partial: partial.total)


def _choices(problem: Problem, at: _Partial, cost: float) -> list[_Partial]:
    num_layers = problem.num_layers
    first, last = problem.loaded_at[0], problem.loaded_at[-1]
    whole = cost * num_layers
    at_source = at.source + whole
    at_target = max(first + at.target + whole, last + cost)
    choices = [
        _Partial(at_source, at.target, at.total + at_source, (*at.target_layers, 0)),
        _Partial(at.source, at.target + whole, at.total + at_target, (*at.target_layers, num_layers)),
    ]
    # As many layers as are loaded, and as the target gets done, until the source is free.
    loaded = bisect_right(problem.loaded_at, at.source - cost)
    busy = sum([c * t if t < loaded else c * loaded for c, t in zip(problem.costs, at.target_layers, strict=False)])
    layers = min(loaded, int((at.source - first - busy) / cost + 1e-9))
    if 0 < layers < num_layers:
        done = at.source + problem.pull_time + cost * (num_layers - layers)
        choices.append(_Partial(done, at.target + cost * layers, at.total + done, (*at.target_layers, layers)))
    return choices


# --- whole batches -------------------------------------------------------------------------------

_States = dict[tuple[float, float], tuple[float, tuple[bool, ...]]]
"""By when source and target are free: sum of completions, and which batches the target runs."""


def best_first_come_split(problem: Problem, *, limit: int | None = None) -> tuple[float, tuple[bool, ...]]:
    """Least mean completion over all assignments, and which batches the target runs in it.

    Exact without ``limit``: one of two partial assignments is dropped only if the other is no worse in both clocks and
    in the sum. There are few of them when costs have few distinct sums (whole numbers, say); otherwise their number
    can double with each batch, and ``limit`` keeps the most promising. A target that waits for a layer does nothing
    else.
    """
    layers = problem.num_layers
    states: _States = {(problem.source_free_at, 0.0): (0.0, ())}
    for i, cost in enumerate(problem.costs):
        # Begun at once, every layer is run when it is loaded and the ones before it are done.
        alone = max([at + cost * (layers - k) for k, at in enumerate(problem.loaded_at)])
        more: _States = {}
        for (source, target), (total, chosen) in states.items():
            at_source, at_target = source + cost * layers, max(target + cost * layers, alone)
            for clocks, end, here in (((at_source, target), at_source, False), ((source, at_target), at_target, True)):
                known = more.get(clocks)
                if known is None or total + end < known[0]:
                    more[clocks] = (total + end, (*chosen, here))
        states = _undominated(more)
        if limit is not None and len(states) > limit:
            states = _promising(states, limit, len(problem.costs) - i - 1)
    total, chosen = min(states.values())
    return total / max(1, len(problem.costs)), chosen


def _promising(states: _States, limit: int, left: int) -> _States:
    # What is left completes later the later both sides are free.
    ranked = sorted(states.items(), key=lambda item: item[1][0] + left * sum(item[0]) / 2)
    return dict(ranked[:limit])


def _undominated(states: _States) -> _States:
    kept: _States = {}
    # Of those before, whose source is free no later: where the target is free, rising, and the sum, falling.
    targets: list[float] = []
    totals: list[float] = []
    for clocks, value in sorted(states.items()):
        at = bisect_right(targets, clocks[1])
        if at and totals[at - 1] <= value[0]:
            continue
        end = at
        while end < len(totals) and totals[end] >= value[0]:
            end += 1
        targets[at:end], totals[at:end] = [clocks[1]], [value[0]]
        kept[clocks] = value
    return kept
