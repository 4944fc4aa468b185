"""The least possible mean completion, by exhaustive search. For small cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

from shared.zigzag.playback import Job, play


def can_enumerate(num_layers: int, num_batches: int, load: int) -> bool:
    """The search of ``equal_optimum`` takes well under a second."""
    return math.comb(num_layers + num_batches, num_batches) * num_layers * (num_layers * load) <= 100_000


def equal_optimum(num_layers: int, num_batches: int, load: int) -> float:
    """Least mean completion of batches with one unit per layer, where a layer is loaded every ``load`` units.

    Over every schedule: at each unit of time the source, if free, may take any batch or wait, and the target may run
    the next layer, if loaded, of any batch or wait. With whole times nothing is gained by starting between units.
    """
    loaded = (num_layers - 1) * load

    @cache
    def still(now: int, source_left: int, waiting: tuple[int, ...]) -> float:
        """Sum of what is incomplete over all time from ``now`` on. ``waiting``: layers done per batch, sorted."""
        if not waiting and not source_left:
            return 0
        ready = min(num_layers, now // load + 1)
        best = math.inf
        for pulled in {-1} if source_left else {-1, *waiting}:
            rest = list(waiting)
            left = source_left
            if pulled >= 0:
                rest.remove(pulled)
                left = num_layers - pulled
            for run in {-1, *[done for done in rest if done < ready]}:
                if run < 0 and not left and now >= loaded:
                    continue
                after = list(rest)
                if run >= 0:
                    after.remove(run)
                    if run + 1 < num_layers:
                        after.append(run + 1)
                # A batch that the target finishes is incomplete until the end of this unit.
                incomplete = len(rest) + (left > 0)
                best = min(best, incomplete + still(min(now + 1, loaded), max(0, left - 1), tuple(sorted(after))))
        return best

    return still(0, 0, (0,) * num_batches) / num_batches


def best_gates(jobs: Sequence[Job], loaded_at: Sequence[float]) -> float:
    """Least mean completion of all splits: every combination of gates, played back."""
    every = itertools.product(range(len(loaded_at) + 1), repeat=len(jobs))
    ids = [job.batch_id for job in jobs]
    return min([play(jobs, loaded_at, gates=dict(zip(ids, gates, strict=True))).mean for gates in every])
