"""The best non-preemptive first-come split: each batch whole on one side, in order on each."""

from __future__ import annotations

from bisect import bisect_right

from services.planner.core.live.bound import Problem

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
