"""What the records of scale operations say of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages.operations import ScaleRecord


def taken_twice(records: Iterable[ScaleRecord], within_s: float = 1.0) -> list[tuple[str, float]]:
    """(worker id, when it began) of each worker that was taken and given back twice within ``within_s``."""
    changes: dict[str, list[float]] = {}
    for record in records:
        if record.direction in ("in", "out"):
            for target in record.targets:
                changes.setdefault(target.worker_id, []).append(record.triggered_at_s)
    # Takes and returns of one worker alternate: twice both are four in a row.
    return sorted(
        (worker_id, first)
        for worker_id, at_s in changes.items()
        for first, last in zip(sorted(at_s), sorted(at_s)[3:], strict=False)
        if last - first < within_s
    )
