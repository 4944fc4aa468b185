"""The best non-preemptive first-come split: each batch whole on one side, in order on each."""

from __future__ import annotations

from services.planner.core.zigzag_bound import Problem

_States = dict[tuple[float, float], tuple[float, tuple[bool, ...]]]
"""By when source and target are free: sum of completions, and which batches the target runs."""


def best_first_come_split(problem: Problem, *, limit: int | None = None) -> tuple[float, tuple[bool, ...]]:
    """Least mean completion over all assignments, and which batches the target runs in it.

    Exact without ``limit``: of two partial assignments one is dropped only if the other is no worse in both clocks and in
    the sum. Their number stays small when costs have few distinct sums (whole numbers, say), and can double with each batch
    otherwise; ``limit`` keeps the most promising ones only. A target that waits for a layer does nothing else.
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
    for clocks, value in sorted(states.items()):
        if not any(target <= clocks[1] and total <= value[0] for (_, target), (total, _) in kept.items()):
            kept[clocks] = value
    return kept
