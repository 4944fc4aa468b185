from __future__ import annotations

import pytest

from bench.evaluate.search import BISECTIONS, MAX_DOUBLINGS, best, highest


class Asked:
    """Holds up to a limit; remembers what was asked."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.asked: list[float] = []

    async def __call__(self, factor: float) -> bool:
        self.asked.append(factor)
        return factor <= self.limit


@pytest.mark.parametrize("limit", [0.05, 0.7, 1.0, 1.9, 13.0])
async def test_finds_the_highest_factor_within_a_tenth(limit: float) -> None:
    holds = Asked(limit)
    found = await highest(holds, 1.0)
    assert found is not None
    assert limit / 1.1 < found <= limit
    assert len(holds.asked) <= MAX_DOUBLINGS + 1 + BISECTIONS
    assert len(set(holds.asked)) == len(holds.asked)


async def test_nothing_holds() -> None:
    assert await highest(Asked(0.0), 1.0) is None


async def test_ends_where_it_is_told_to() -> None:
    holds = Asked(100.0)
    found = await highest(holds, 1.0, end=3.0)
    assert found is not None
    assert 2.5 < found <= 3.0
    assert max(holds.asked) < 3.0


@pytest.mark.parametrize("top", range(7))
async def test_climbs_to_the_best_and_asks_each_once(top: int) -> None:
    asked: list[int] = []

    async def score(choice: int) -> tuple[float, float]:
        asked.append(choice)
        # Beyond the middle all reach everything, and differ in what it costs.
        return min(1.0, 1.1 - abs(choice - top) / 10), -abs(choice - top)

    assert await best(range(7), score, 3) == top
    assert len(set(asked)) == len(asked)
