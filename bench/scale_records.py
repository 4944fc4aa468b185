"""What the records of scale operations say of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from shared.messages.scaling import ScaleRecord


def taken_twice(records: Iterable[ScaleRecord], within_s: float = 1.0) -> list[tuple[str, float]]:
    """(worker id, when) of each worker that was taken and given back, and taken or given back again within ``within_s``
    of the first time."""
    times: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.direction in ("in", "out"):
            for target in record.targets:
                times.setdefault((target.worker_id, record.direction), []).append(record.triggered_at_s)
    return sorted(
        (worker_id, early)
        for (worker_id, _), at_s in times.items()
        for early, late in pairwise(sorted(at_s))
        if late - early < within_s
    )
