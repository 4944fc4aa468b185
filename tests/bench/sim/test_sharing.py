"""Rates against closed forms, and against what fairness means."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.sharing import Demand, Resource, fair_rates
from tests.bench.sim.fairness import check_fair

WIDE = Resource("wide", 100.0)
NARROW = Resource("narrow", 40.0)
OTHER = Resource("other", 100.0)


def test_equal_shares_and_what_one_cannot_use_goes_to_the_others() -> None:
    assert fair_rates([Demand((WIDE,)), Demand((WIDE,))]) == [50, 50]
    assert fair_rates([Demand((WIDE,), cap_gbps=10), Demand((WIDE,)), Demand((WIDE,))]) == [10, 45, 45]
    # Two on the narrow one get 20 each there, and the third has the rest of the wide one.
    shares = fair_rates([Demand((WIDE, NARROW)), Demand((NARROW,)), Demand((WIDE,))])
    assert shares == pytest.approx([20, 20, 80])


def test_weights() -> None:
    assert fair_rates([Demand((WIDE,), weight=3), Demand((WIDE,))]) == [75, 25]
    assert fair_rates([Demand((WIDE,), weight=3, cap_gbps=30), Demand((WIDE,))]) == [30, 70]


def test_a_cap_of_nothing_gets_nothing() -> None:
    assert fair_rates([Demand((WIDE,), cap_gbps=0), Demand((WIDE,))]) == [0, 100]


def test_no_faster_than_what_is_forwarded() -> None:
    assert fair_rates([Demand((NARROW,)), Demand((WIDE,), behind=[(0, 1.0)])]) == [40, 40]
    assert fair_rates([Demand((NARROW,)), Demand((WIDE,), behind=[(0, 2.0)])]) == [40, 80]
    assert fair_rates([Demand((WIDE,)), Demand((NARROW,), behind=[(0, 1.0)])]) == [100, 40]
    # What it leaves is another's.
    assert fair_rates([Demand((NARROW,)), Demand((WIDE,), behind=[(0, 1.0)]), Demand((WIDE,))]) == [40, 40, 60]


def test_half_the_bytes_at_half_the_rate_still_gets_its_fair_share() -> None:
    rates = fair_rates([Demand((WIDE,)), Demand((OTHER,), behind=[(0, 0.5)]), Demand((OTHER,))])
    assert rates == pytest.approx([100, 50, 50])
    rates = fair_rates([Demand((NARROW,)), Demand((OTHER,), behind=[(0, 0.5)]), Demand((OTHER,))])
    assert rates == pytest.approx([40, 20, 80])


def test_a_flow_and_what_forwards_half_of_it_on_one_resource() -> None:
    rates = fair_rates([Demand((WIDE,)), Demand((WIDE,), behind=[(0, 0.5)]), Demand((WIDE,))])
    assert rates == pytest.approx([40, 20, 40])


@st.composite
def loads(draw: st.DrawFn, *, weights: tuple[float, ...] = (1.0,), ratios: tuple[float, ...] = (1.0,)) -> list[Demand]:
    """Flows over a few resources; some have caught up with one before them."""
    ins = [Resource(f"in {i}", draw(st.sampled_from([1.0, 2.5, 10.0, 40.0]))) for i in range(4)]
    outs = [Resource(f"out {i}", draw(st.sampled_from([1.0, 2.5, 10.0, 40.0]))) for i in range(4)]
    demands: list[Demand] = []
    for place in range(draw(st.integers(1, 12))):
        path = (draw(st.sampled_from(outs)), draw(st.sampled_from(ins)))
        cap = draw(st.sampled_from([float("inf"), float("inf"), 0.0, 0.7, 3.0]))
        demand = Demand(path, cap, draw(st.sampled_from(weights)))
        if place and draw(st.booleans()):
            demand.behind.append((draw(st.integers(0, place - 1)), draw(st.sampled_from(ratios))))
        demands.append(demand)
    return demands


@settings(max_examples=100, deadline=None)
@given(loads(ratios=(0.25, 0.5, 1.0, 2.0)))
def test_rates_are_fair(demands: list[Demand]) -> None:
    check_fair(demands, fair_rates(demands))


@settings(max_examples=100, deadline=None)
@given(loads(weights=(0.5, 1.0, 3.0)))
def test_weighted_rates_are_fair(demands: list[Demand]) -> None:
    for demand in demands:
        demand.behind.clear()
    check_fair(demands, fair_rates(demands))


@settings(max_examples=100, deadline=None)
@given(loads(weights=(0.5, 1.0, 3.0), ratios=(0.25, 1.0, 2.0)))
def test_nobody_is_faster_than_what_it_forwards_or_than_its_links(demands: list[Demand]) -> None:
    rates = fair_rates(demands)
    for demand, rate in zip(demands, rates, strict=True):
        assert 0 <= rate <= demand.cap_gbps * (1 + 1e-9)
        assert all(rate <= ratio * rates[upstream] * (1 + 1e-9) for upstream, ratio in demand.behind)
    for resource in {resource for demand in demands for resource in demand.path}:
        used = sum(rate for demand, rate in zip(demands, rates, strict=True) if resource in demand.path)
        assert used <= resource.gbps * (1 + 1e-9)
