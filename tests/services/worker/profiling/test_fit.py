"""Costs from measured times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.profiling.fit import fit, largest_error

AMOUNTS = [(1.0, float(n), float(n * c)) for n in (1, 4, 16) for c in (32, 128, 512, 2048)]


def seconds_of(amounts: tuple[float, ...], costs: tuple[float, ...]) -> float:
    return sum(a * c for a, c in zip(amounts, costs, strict=True))


@pytest.mark.parametrize("costs", [(0.01, 0.001, 1e-6), (0.0, 0.001, 1e-6), (0.01, 0.0, 0.0), (0.01, 0.0, 1e-5)])
def test_costs_are_found_again(costs: tuple[float, ...]) -> None:
    assert fit([(a, seconds_of(a, costs)) for a in AMOUNTS]) == pytest.approx(costs, rel=1e-6, abs=1e-12)


def test_noise_moves_them_little() -> None:
    draw, costs = random.Random(1), (0.01, 0.001, 1e-6)
    rows = [(a, seconds_of(a, costs) * draw.uniform(0.95, 1.05)) for a in AMOUNTS]
    found = fit(rows)
    assert found == pytest.approx(costs, rel=0.15)
    assert largest_error([(seconds_of(a, found), s) for a, s in rows]) < 0.1


def test_what_would_be_negative_is_nothing() -> None:
    # Steps that become shorter with more requests: none of them costs anything.
    base_s, request_s, context_s = fit([((1.0, float(n), float(n)), 0.02 - 0.001 * n) for n in range(1, 9)])
    assert (request_s, context_s) == (0.0, 0.0)
    assert 0.012 < base_s < 0.02


def test_nothing_measured_is_no_fit() -> None:
    with pytest.raises(ValueError, match="nothing"):
        fit([])


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 10**5), st.floats(1e-6, 1e3)), min_size=1, max_size=20))
def test_whatever_was_measured_steps_take_time(points: list[tuple[int, int, float]]) -> None:
    found = fit([((1.0, float(n), float(n * c)), s) for n, c, s in points])
    assert all(cost >= 0 for cost in found)
    assert found[0] + found[1] > 0
