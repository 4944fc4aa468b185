"""The latest time at which each batch of a split is complete: constraints that replace the paper's C2 and C3.

With gates in force the target's work is known beforehand: T(i) layers of batch i, each available when it is loaded,
earliest batch first, one layer at a time. Let R(k) be when layer k (from 0) is loaded and c(i) the time of one layer.
Consider when the target ends its T(i) layers, f(i), and the last moment before it at which the target did not run
layers of batches up to i. Everything of those batches that it ran since was loaded at or after some R(k), and what it
ran just then was at most one layer of a later batch, begun before R(k). Hence for some k < T(i)

    f(i) <= R(k) + B(i) + c(i) (T(i) - k) + sum over j < i of c(j) * max(0, min(T(j), loaded before f(i)) - k)

with B(i) the longest layer of a later batch, and none for k = 0, when nothing had begun. The source runs its parts in
order: it starts batch i at max(f(i), when it is free), and never has to for T(i) = L. The target's schedule does not
depend on the source's, so the playback of a split meets these times. (C3 as printed takes work of later batches for
time that passes, which fails when they are few or have been pulled, and says nothing of k below T - 1.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Batches that wait now, in first-come order, and a target that loads. Times in any one unit."""

    costs: tuple[float, ...]
    """Time of one layer, per batch."""
    loaded_at: tuple[float, ...]
    """When each layer is loaded at the target, not falling."""
    source_free_at: float = 0.0
    pull_time: float = 0.0
    """What the source needs to fetch a batch that the target has begun."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.loaded_at)


def predict(problem: Problem, target_layers: Sequence[int]) -> tuple[float, ...]:
    """Latest completion of each batch under a split."""
    num_layers = problem.num_layers
    source = problem.source_free_at
    completions = []
    for i, (cost, at_target) in enumerate(zip(problem.costs, target_layers, strict=True)):
        handed_over = 0.0
        if at_target:
            blocking = max(
                [problem.costs[j] for j in range(i + 1, len(target_layers)) if target_layers[j]], default=0.0
            )
            earlier = [(problem.costs[j], target_layers[j]) for j in range(i) if target_layers[j]]
            handed_over = _target_end(problem.loaded_at, cost, at_target, earlier, blocking)
        if at_target == num_layers:
            completions.append(handed_over)
            continue
        source = max(source, handed_over) + (problem.pull_time if at_target else 0.0) + cost * (num_layers - at_target)
        completions.append(source)
    return tuple(completions)


def _target_end(
    loaded_at: Sequence[float], cost: float, layers: int, earlier: Sequence[tuple[float, int]], blocking: float
) -> float:
    # Cost of running layer k of all earlier batches.
    of_layer = [0.0] * len(loaded_at)
    for other_cost, other_layers in earlier:
        for k in range(other_layers):
            of_layer[k] += other_cost
    end = loaded_at[layers - 1] + cost
    while True:
        work = sum(of_layer[layers : bisect_left(loaded_at, end)])
        latest = end
        for k in range(layers - 1, -1, -1):
            work += of_layer[k] + cost
            latest = max(latest, loaded_at[k] + (blocking if k else 0.0) + work)
        if latest == end:
            return end
        end = latest
