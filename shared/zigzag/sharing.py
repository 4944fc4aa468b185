"""How batches that neither side has begun are shared between two instances that both have all layers."""

from __future__ import annotations

from collections.abc import Iterable

from shared.zigzag.batch import Side


def share_evenly(
    work: Iterable[tuple[str, float]], *, source_busy: float, target_busy: float
) -> list[tuple[str, Side]]:
    """Each of ``work`` (id, cost of the whole batch) in first-come order to the side that is free first.

    ``*_busy``: cost of what each side still has to do. Ties go to the target: it has nothing to fetch.
    """
    shares: list[tuple[str, Side]] = []
    for batch_id, cost in work:
        if target_busy <= source_busy:
            shares.append((batch_id, Side.TARGET))
            target_busy += cost
        else:
            shares.append((batch_id, Side.SOURCE))
            source_busy += cost
    return shares
