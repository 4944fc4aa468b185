"""Scaled traces keep their pattern: properties over random traces, bursts, ties and silences among them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.traces.request import Trace, TraceRequest
from bench.traces.scaling import scale_rate, spread_seconds
from shared.errors import BadRequest

GAPS = st.one_of(st.just(0.0), st.floats(0, 0.01), st.floats(0, 2), st.floats(0, 100))
FACTORS = st.one_of(st.floats(0.05, 1), st.floats(1, 12), st.sampled_from([0.5, 2.0, 3.0]))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    at_s, requests = 0.0, []
    for index, gap_s in enumerate(draw(st.lists(GAPS, min_size=1, max_size=60))):
        at_s += gap_s
        requests.append(TraceRequest(at_s, index + 1, 1))
    return Trace("t", tuple(requests))


def times(trace: Trace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


def scaled_or_none(trace: Trace, factor: float, seed: int) -> Trace | None:
    try:
        return scale_rate(trace, factor, seed=seed)
    except BadRequest:
        assert factor * len(trace.requests) < 1
        return None


@settings(max_examples=200, deadline=None)
@given(traces(), FACTORS, st.integers(0, 5), st.data())
def test_every_span_of_whole_seconds_has_its_share_within_one_request(
    trace: Trace, factor: float, seed: int, data: st.DataObject
) -> None:
    scaled = scaled_or_none(trace, factor, seed)
    if scaled is None:
        return
    assert times(scaled) == sorted(times(scaled))
    end_s = math.ceil(trace.span_s) + 1
    begin_s = data.draw(st.integers(0, end_s - 1))
    until_s = data.draw(st.integers(begin_s, end_s))
    before, after = (bisect_left(times(t), until_s) - bisect_left(times(t), begin_s) for t in (trace, scaled))
    assert abs(after - factor * before) < 1 + 1e-6


@settings(max_examples=100, deadline=None)
@given(traces(), FACTORS, st.integers(0, 5))
def test_each_request_is_repeated_evenly_and_near_itself(trace: Trace, factor: float, seed: int) -> None:
    scaled = scaled_or_none(trace, factor, seed)
    if scaled is None:
        return
    copies = Counter(request.input_tokens for request in scaled.requests)
    assert all(math.floor(factor) <= copies[r.input_tokens] <= math.ceil(factor) for r in trace.requests)
    source = {request.input_tokens: index for index, request in enumerate(trace.requests)}
    at_s = times(trace)
    for request in scaled.requests:
        index = source[request.input_tokens]
        gaps_s = [abs(at_s[other] - at_s[index]) for other in (index - 1, index + 1) if 0 <= other < len(at_s)]
        assert abs(request.arrival_s - at_s[index]) <= min(gaps_s, default=0.0) / 2 + 1e-9


def test_a_smaller_trace_is_part_of_the_larger_and_twice_as_many_are_twice_each() -> None:
    trace = Trace("t", tuple(TraceRequest(index * 0.3, index, 1) for index in range(1, 101)))
    half = scale_rate(trace, 0.5, seed=1)
    assert len(half.requests) == 50
    assert set(half.requests) <= set(trace.requests)
    double = scale_rate(trace, 2, seed=1)
    assert set(trace.requests) <= set(double.requests)
    assert len(set(times(double))) == 200, "copies do not come at the same time as what they are copies of"


def test_copies_of_a_lonely_request_come_anywhere_in_its_second() -> None:
    trace = Trace("t", (TraceRequest(0.0, 1, 1), TraceRequest(50.9, 2, 1), TraceRequest(100.0, 3, 1)))
    offsets_s = [request.arrival_s - 50 for request in scale_rate(trace, 1000, seed=1).requests[1000:2000]]
    tenths = Counter(math.floor(offset_s * 10) for offset_s in offsets_s)
    assert sorted(tenths) == list(range(10))
    assert max(tenths.values()) < 150


def test_the_seed_decides() -> None:
    trace = Trace("t", tuple(TraceRequest(index * 0.3, index, 1) for index in range(1, 101)))
    assert scale_rate(trace, 2.5, seed=1) == scale_rate(trace, 2.5, seed=1)
    assert scale_rate(trace, 2.5, seed=1) != scale_rate(trace, 2.5, seed=2)
    assert scale_rate(trace, 1, seed=1) is trace


@pytest.mark.parametrize("factor", [0, -1, math.nan, math.inf, 1001])
def test_a_senseless_factor_is_refused(factor: float) -> None:
    with pytest.raises(BadRequest, match="positive number"):
        scale_rate(Trace("t", (TraceRequest(0, 1, 1),)), factor, seed=0)


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(0, 5))
def test_whole_seconds_are_spread_within_their_second(seconds: list[int], seed: int) -> None:
    trace = Trace("t", tuple(TraceRequest(float(at_s), 1, 1) for at_s in sorted(seconds)), whole_seconds=True)
    spread = spread_seconds(trace, seed=seed)
    assert Counter(math.floor(at_s) for at_s in times(spread)) == Counter(seconds)
    assert times(spread) == sorted(times(spread))
    assert spread == spread_seconds(trace, seed=seed)
    assert not spread.whole_seconds


def test_exact_times_are_not_spread() -> None:
    trace = Trace("t", (TraceRequest(1.0, 1, 1), TraceRequest(1.0, 1, 1)))
    assert spread_seconds(trace, seed=0) is trace
