"""The split of waiting batches between a loading and an overloaded instance, computed beforehand (paper, section 5.2).

A split says for each batch how many of its layers the target runs (T), the source running the other S = L - T. It is
carried out as gates on the pair's queue. There are three steps; only the last has to be exact:

1. ``zigzag_shapes`` looks for good splits in a few milliseconds;
2. ``zigzag_ilp`` improves the best one with an integer program, within what is left of the time limit;
3. both are played back against the queue's own rules. A split is used only if its playback beats the one without gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.planner.core.live.bound import Problem, predict
from services.planner.core.live.ilp import TIME_LIMIT_S, improve
from services.planner.core.live.search import good_splits
from shared.zigzag.playback import Job, Played, play


@dataclass(frozen=True, slots=True)
class Split:
    """A split with its predicted completions, which its playback meets, and that playback."""

    target_layers: tuple[int, ...]
    predicted: tuple[float, ...]
    played: Played
    by_ilp: bool
    """The integer program found it; otherwise the search before it did."""

    @property
    def predicted_mean(self) -> float:
        """Mean of the predicted completions."""
        return sum(self.predicted) / len(self.predicted) if self.predicted else 0.0


@dataclass(frozen=True, slots=True)
class SplitResult:
    """What the pair shall do. Without gates the queue's rules decide alone."""

    free: Played
    """The playback without gates."""
    split: Split | None
    """The best split found; None: none was looked for or found."""
    gates: Mapping[str, int] = field(default_factory=dict)
    """By batch; empty unless the split beats ``free``."""

    @property
    def played(self) -> Played:
        """The playback of what shall be done."""
        return self.split.played if self.split is not None and self.gates else self.free


def assign(
    jobs: Sequence[Job],
    loaded_at: Sequence[float],
    *,
    source_free_at: float = 0.0,
    pull_time: float = 0.0,
    time_limit_s: float = TIME_LIMIT_S,
    open_shapes: bool = False,
    max_nodes: int | None = None,
) -> SplitResult:
    """Split ``jobs``, which all wait now (their arrivals are ignored), so that their mean completion is low.

    ``time_limit_s`` bounds the solver alone; 0 leaves it out. ``open_shapes``: the solver also chooses what is whole at
    one side, which is worth it from a second on. ``max_nodes`` bounds the solver by the nodes that it visits instead:
    the same is found each time, however fast the machine is. Raises ``BadRequest`` for times that cannot be.
    """
    waiting = [Job(job.batch_id, job.cost) for job in jobs]
    free = play(waiting, loaded_at, source_free_at=source_free_at, pull_time=pull_time)
    # Equal batches: without gates it is optimal already (exhaustive search agrees wherever it is possible).
    if len({job.cost for job in waiting}) < 2:
        return SplitResult(free, None)
    problem = Problem(tuple([job.cost for job in waiting]), tuple(loaded_at), source_free_at, pull_time)
    candidates = [(split, False) for split in good_splits(problem)]
    if time_limit_s > 0:
        found = improve(problem, candidates[0][0], time_limit_s, keep_shapes=not open_shapes, max_nodes=max_nodes)
        if found is not None and found != candidates[0][0]:
            candidates.append((found, True))
    best: Split | None = None
    for target_layers, by_ilp in candidates:
        gates = {job.batch_id: t for job, t in zip(waiting, target_layers, strict=True)}
        played = play(waiting, loaded_at, gates=gates, source_free_at=source_free_at, pull_time=pull_time)
        if best is None or played.mean < best.played.mean:
            best = Split(target_layers, predict(problem, target_layers), played, by_ilp)
    if best is None or best.played.mean >= free.mean:
        return SplitResult(free, best)
    return SplitResult(free, best, {j.batch_id: t for j, t in zip(waiting, best.target_layers, strict=True)})
