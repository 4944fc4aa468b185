"""Searches whose every step is a run: the highest rate that holds, and the best split. They ask, and are told."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

S = TypeVar("S")
Score = tuple[float, float]
"""Of a split: the share of requests within the objectives; of equals, minus what they took of them."""
MAX_DOUBLINGS = 5
BISECTIONS = 3
"""Then the highest rate that holds and the lowest that does not are 9 % apart."""


async def highest(
    holds: Callable[[float], Awaitable[bool]], start: float, *, end: float = math.inf, bisections: int = BISECTIONS
) -> float | None:
    """The highest factor up to ``end`` that was seen to hold; None if none did, down to a 32nd of ``start``."""
    low, high = None, None
    factor = start
    for _ in range(MAX_DOUBLINGS + 1):
        if factor >= end:
            high = end
            break
        if await holds(factor):
            low = factor
            if high is not None:
                break
            factor *= 2
        else:
            high = factor
            if low is not None:
                break
            factor /= 2
    if low is None or high is None:
        return low
    for _ in range(bisections):
        middle = math.sqrt(low * high)
        if await holds(middle):
            low = middle
        else:
            high = middle
    return low


async def best(choices: Sequence[S], score: Callable[[S], Awaitable[Score]], start: int) -> S:
    """The choice with no better neighbour, climbing from ``choices[start]``. Each is scored once at most."""
    scores: dict[int, Score] = {}

    async def score_of(index: int) -> Score:
        if index not in scores:
            scores[index] = await score(choices[index])
        return scores[index]

    at = start
    while True:
        around = [index for index in (at, at - 1, at + 1) if 0 <= index < len(choices)]
        found = [(await score_of(index), index) for index in around]
        top = max(found, key=lambda one: one[0])[1]
        if top == at:
            return choices[at]
        at = top
