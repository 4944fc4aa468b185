"""Searches by simulation: the best split of instances into prefill and decode, and half of what a cluster can serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bench.systems import Split

ATTAINED = 0.99
"""Of the requests, within the absolute objectives: what a cluster can serve is where it keeps this."""
PRECISION = 0.02
MAX_FACTOR = 1000.0
MIN_FACTOR = 1e-4

Score = tuple[float, ...]
"""Higher is better."""


def best_split(splits: Sequence[Split], score: Callable[[Split], Score]) -> Split:
    """The split with the best score, if that rises and then falls with the number of prefill instances.

    Every so-manieth is looked at first, then what lies between the best one's neighbours. Ties: the fewest prefill
    instances. Raises ``ValueError`` without any.
    """
    if not splits:
        raise ValueError("there is no split to choose from")
    known: dict[Split, Score] = {}

    def look(places: Sequence[int]) -> int:
        for place in places:
            if splits[place] not in known:
                known[splits[place]] = score(splits[place])
        return max(places, key=lambda place: (known[splits[place]], -place))

    step = max(1, len(splits) // 6)
    places = [*range(0, len(splits), step)]
    best = look(places)
    while step > 1:
        step = max(1, step // 3)
        places = [p for p in range(best - 2 * step, best + 2 * step + 1, step) if 0 <= p < len(splits)]
        best = look(places)
    return splits[best]


def highest_factor(attains: Callable[[float], bool]) -> float:
    """The highest factor of a trace's rate at which the objectives are kept, to ``PRECISION``; at most 1,000.

    Raises ``ValueError`` if they are not kept even at next to no load.
    """
    low, high = 0.0, 1.0
    if attains(high):
        while attains(min(2 * high, MAX_FACTOR)):
            high = min(2 * high, MAX_FACTOR)
            if high == MAX_FACTOR:
                return high
        low, high = high, min(2 * high, MAX_FACTOR)
    else:
        while not attains(high / 2):
            high /= 2
            if high < MIN_FACTOR:
                raise ValueError("the objectives are not kept at any rate: a request alone takes longer")
        low = high / 2
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        if attains(middle):
            low = middle
        else:
            high = middle
    return low
