from __future__ import annotations

import math
from itertools import pairwise

import pytest

from bench.evaluate.windows import BURST_S, LEAD_S, WINDOW_S, Window, beside, choose, count
from bench.traces.request import Trace, TraceRequest
from bench.traces.synthetic import synthesise
from shared.errors import BadRequest


def _trace(*arrivals: float) -> Trace:
    return Trace("t", tuple(TraceRequest(at_s, 10, 10) for at_s in sorted(arrivals)))


def _steady(seconds: int, *bursts_s: float) -> Trace:
    """A request a second, and at each of these times fifty more within five seconds."""
    return _trace(*map(float, range(seconds + 1)), *(at_s + n / 10 for at_s in bursts_s for n in range(50)))


def test_each_part_gives_the_window_that_begins_before_its_burst() -> None:
    chosen = choose(_steady(900, 60.0, 400.0, 750.0), 2)
    assert chosen.tuning.start_s + LEAD_S <= 60 < chosen.tuning.start_s + LEAD_S + BURST_S
    assert [window.seconds for window in chosen.measured] == [WINDOW_S, WINDOW_S]
    for window, burst_s in zip(chosen.measured, (400.0, 750.0), strict=True):
        # The whole burst is in the ten seconds that are looked at.
        assert window.start_s + LEAD_S <= burst_s
        assert burst_s + 5 <= window.start_s + LEAD_S + BURST_S


def test_windows_lie_in_their_parts_one_after_the_other() -> None:
    trace = synthesise("azure-code", seed=3, duration_s=1800)
    chosen = choose(trace, 5)
    windows = (chosen.tuning, *chosen.measured)
    assert all(a.end_s <= b.start_s for a, b in pairwise(windows))
    assert windows[-1].end_s <= trace.span_s
    assert choose(trace, 5) == chosen


def test_a_lone_request_is_no_burst() -> None:
    """Its window would be the burstiest of all."""
    trace = _trace(*(float(n) for n in range(100)), 250.0, *(300.0 + n for n in range(100)), 599.0)
    (window,) = choose(trace, 1).measured
    assert count(trace, window.start_s, window.end_s) > 20


def test_a_silent_part_gives_its_fullest_window() -> None:
    trace = _trace(*(n / 10 for n in range(1000)), 350.0, 351.0, 390.0, 400.0)
    (window,) = choose(trace, 1).measured
    assert count(trace, window.start_s, window.end_s) == 3


def test_a_given_window_is_tuned_on_the_longer_rest() -> None:
    trace = _steady(900, 60.0, 400.0, 750.0)
    chosen = beside(trace, Window(700.0, 100.0))
    assert chosen.measured == (Window(700.0, 100.0),)
    assert chosen.tuning.end_s <= 700
    assert beside(trace, Window(0.0, 850.0)).tuning == Window(0.0, 850.0)


def test_no_other_window_of_a_part_is_better() -> None:
    """Counted one by one."""
    trace = synthesise("burstgpt", seed=4, duration_s=600)
    usual = WINDOW_S * len(trace.requests) / trace.span_s

    def burst(start_s: int) -> float:
        requests = count(trace, start_s, start_s + WINDOW_S)
        return count(trace, start_s + LEAD_S, start_s + LEAD_S + BURST_S) / requests if requests >= usual else -1.0

    middle_s = trace.span_s / 2
    first, last = range(int(middle_s - WINDOW_S) + 1), range(math.ceil(middle_s), int(trace.span_s - WINDOW_S) + 1)
    chosen = choose(trace, 1)
    assert (chosen.tuning, *chosen.measured) == tuple(Window(max(starts, key=burst)) for starts in (first, last))


@pytest.mark.parametrize("text", ["", "10", "a:b", "-1:90", "10:0", "10:inf", "nan:10"])
def test_what_is_no_window_is_named(text: str) -> None:
    with pytest.raises(BadRequest, match="window"):
        Window.parse(text)


def test_windows_that_cannot_be_are_refused() -> None:
    assert Window.parse("1960:90") == Window(1960.0, 90.0)
    with pytest.raises(BadRequest, match=r"no request from 5000 to 5090 s"):
        beside(_steady(900), Window(5000.0))
    with pytest.raises(BadRequest, match="not enough"):
        choose(_steady(200), 3)
    with pytest.raises(BadRequest, match="windows"):
        choose(_steady(200), 0)
