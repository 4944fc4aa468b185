"""What a pair asks to be split, as the problem that ``zigzag.assign`` takes, and whether the answer is still useful."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.core.live.split import SplitResult
from shared.errors import BadRequest
from shared.messages.live import Gate, PlanSplit, ZigzagAssignment
from shared.zigzag.playback import Job

MAX_BATCHES = 64
"""The earliest so many batches are split; the others are left to the queue's rules. 64 take about 0.2 s."""


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """Batches that wait and layers that come, in seconds from when it was asked."""

    jobs: tuple[Job, ...]
    loaded_at: tuple[float, ...]
    source_free_at: float
    pull_time: float


def split_request(
    asked: PlanSplit, assignment: ZigzagAssignment, now_s: float, *, ready_s: Sequence[float] = ()
) -> SplitRequest | None:
    """The problem as of ``now_s``, in seconds since the target's plan; None if there is none: nothing waits, or it is
    unknown when layers come.

    ``ready_s``: when the target had the layers that it has. The others are expected as late, or early, as the last
    one was; or as late as the next one is by now. The last layer counts as there when everything is: the target
    finishes no batch without the head.
    Raises ``BadRequest`` for times that cannot be and for batches named twice.
    """
    ids = [batch.batch_id for batch in asked.batches]
    if len(set(ids)) != len(ids):
        raise BadRequest(f"pair {asked.pair_id} names a batch twice", param="batches")
    for batch in asked.batches:
        if not 0 < batch.layer_s < math.inf:
            raise BadRequest(f"a layer of batch {batch.batch_id!r} cannot take {batch.layer_s!r} s", param="batches")
    if not 0 <= asked.pull_s < math.inf:
        raise BadRequest(f"a pull cannot take {asked.pull_s!r} s", param="pull_s")
    if not math.isfinite(asked.source_free_s):
        raise BadRequest(f"the source cannot be free in {asked.source_free_s!r} s", param="source_free_s")
    times = list(assignment.layers_ready_s)
    num_ready = len(ready_s)
    if not times or not asked.batches or num_ready > len(times):
        return None
    late_s = ready_s[-1] - times[num_ready - 1] if num_ready else 0.0
    if num_ready < len(times):
        late_s = max(late_s, now_s - times[num_ready])
    times[-1] = max(times[-1], assignment.loaded_s)
    num_ready = min(num_ready, len(times) - 1)
    times[num_ready:] = [at_s + late_s for at_s in times[num_ready:]]
    times[:num_ready] = [now_s] * num_ready
    latest = 0.0
    loaded_at = []
    for at_s in times:
        latest = max(latest, at_s - now_s)
        loaded_at.append(latest)
    return SplitRequest(
        tuple([Job(batch.batch_id, batch.layer_s) for batch in asked.batches[:MAX_BATCHES]]),
        tuple(loaded_at),
        max(0.0, asked.source_free_s),
        asked.pull_s,
    )


def gates_in_time(found: SplitResult, elapsed_s: float) -> tuple[Gate, ...]:
    """The gates to publish ``elapsed_s`` after they were asked for; none unless they still gain something.

    The pair has worked without gates in the meantime. In the worst case that time is lost, and every batch is complete
    that much later than the split says. If that mean still beats the one without gates, the gates come in time.
    """
    if not found.gates or found.played.mean + elapsed_s >= found.free.mean:
        return ()
    return tuple([Gate(batch_id=batch_id, num_layers=num_layers) for batch_id, num_layers in found.gates.items()])
