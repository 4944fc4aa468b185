"""The best non-preemptive first-come split: each batch whole on one side, in order on each. A yardstick for schedules."""

from __future__ import annotations

from services.planner.core.zigzag_bound import Problem


def best_first_come_split(problem: Problem) -> tuple[float, tuple[bool, ...]]:
    """Least mean completion over all assignments, and which batches the target runs in it.

    Exact: of two partial assignments one is dropped only if the other is no worse in both clocks and in the sum.
    Their number stays small when costs have few distinct sums (whole numbers, say), and can double with each batch
    otherwise. A target that waits for a layer does nothing else meanwhile.
    """
    layers = problem.num_layers
    states: dict[tuple[float, float], tuple[float, tuple[bool, ...]]] = {(problem.source_free_at, 0.0): (0.0, ())}
    for cost in problem.costs:
        # Begun at once, every layer is run when it is loaded and the ones before it are done.
        alone = max([at + cost * (layers - k) for k, at in enumerate(problem.loaded_at)])
        more: dict[tuple[float, float], tuple[float, tuple[bool, ...]]] = {}
        for (source, target), (total, chosen) in states.items():
            at_source, at_target = source + cost * layers, max(target + cost * layers, alone)
            for clocks, end, here in (((at_source, target), at_source, False), ((source, at_target), at_target, True)):
                known = more.get(clocks)
                if known is None or total + end < known[0]:
                    more[clocks] = (total + end, (*chosen, here))
        states = _undominated(more)
    total, chosen = min(states.values())
    return total / max(1, len(problem.costs)), chosen


def _undominated(
    states: dict[tuple[float, float], tuple[float, tuple[bool, ...]]],
) -> dict[tuple[float, float], tuple[float, tuple[bool, ...]]]:
    kept: dict[tuple[float, float], tuple[float, tuple[bool, ...]]] = {}
    for clocks, value in sorted(states.items()):
        if not any([target <= clocks[1] and total <= value[0] for (_, target), (total, _) in kept.items()]):
            kept[clocks] = value
    return kept
