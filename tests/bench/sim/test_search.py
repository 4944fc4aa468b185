"""Searches, on functions whose answer is known."""

from __future__ import annotations

import pytest

from bench.sim.search import best_split, highest_factor
from bench.systems import Split


@pytest.mark.parametrize("total", [2, 3, 8, 31, 64])
@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.9])
def test_the_best_split_is_found_where_scores_rise_and_fall(total: int, at: float) -> None:
    splits = [Split(n, total - n) for n in range(1, total)]
    best = min(splits, key=lambda split: abs(split.prefill - at * total))
    looked: list[Split] = []

    def score(split: Split) -> tuple[float, ...]:
        looked.append(split)
        return (-abs(split.prefill - at * total),)

    assert best_split(splits, score) == best
    assert len(looked) == len(set(looked)) <= 22


def test_of_equal_splits_the_one_with_the_fewest_prefill_instances() -> None:
    assert best_split([Split(1, 3), Split(2, 2), Split(3, 1)], lambda _: (1.0,)) == Split(1, 3)


def test_no_split_is_said() -> None:
    with pytest.raises(ValueError, match="no split"):
        best_split([], lambda _: (0.0,))


@pytest.mark.parametrize("limit", [0.003, 0.4, 0.999, 1.0, 1.7, 250.0])
def test_the_highest_factor_is_found_from_below(limit: float) -> None:
    found = highest_factor(lambda factor: factor <= limit)
    assert limit / 1.021 <= found <= limit


def test_a_trace_that_never_fills_the_cluster_has_the_largest_factor() -> None:
    assert highest_factor(lambda _: True) == 1000.0


def test_objectives_that_are_never_kept_are_said() -> None:
    with pytest.raises(ValueError, match="at any rate"):
        highest_factor(lambda _: False)
