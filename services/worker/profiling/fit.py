"""The sum of a few costs that comes nearest to what was measured, none of them negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

Row = tuple[tuple[float, ...], float]
"""How much of each thing, and the seconds that it took together."""


def fit(rows: Sequence[Row]) -> tuple[float, ...]:
    """Seconds of one of each thing, so that the relative errors of all rows are small together. At least one of the
    first two is positive.

    Every choice of things that cost something is tried: there are few. Raises ``ValueError`` for no rows.
    """
    if not rows:
        raise ValueError("nothing was measured")
    amounts = np.array([row for row, _ in rows], dtype=float)
    seconds = np.array([seconds for _, seconds in rows], dtype=float)
    weighted = amounts / seconds[:, None]
    num_costs = len(rows[0][0])
    best: tuple[float, ...] = (0.0,) * num_costs
    least = float("inf")
    for count in range(1, num_costs + 1):
        for chosen in combinations(range(num_costs), count):
            if chosen[0] > 1:
                continue
            found, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(rows)), rcond=None)
            squares = float(np.sum((weighted[:, chosen] @ found - 1) ** 2))
            # The tenth part of a millionth: a cost more has to explain something.
            if (found >= 0).all() and found.any() and squares < least * (1 - 1e-7):
                costs = dict(zip(chosen, found.tolist(), strict=True))
                best, least = tuple(costs.get(index, 0.0) for index in range(num_costs)), squares
    return best


def largest_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (expected, measured), as a share of what was measured."""
    return max(abs(expected - measured) / measured for expected, measured in pairs)
