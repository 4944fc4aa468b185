"""Virtual time: order, cancelling, and that nothing happens early, late or twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sim.clock import Clock, Event

times = st.integers(0, 5).map(float)


@given(st.lists(st.tuples(times, st.booleans())))
def test_events_happen_by_time_then_as_scheduled_and_cancelled_ones_never(plan: list[tuple[float, bool]]) -> None:
    clock, seen = Clock(), []
    events = [clock.at(t, lambda i, t: seen.append((i, t, clock.now_s)), i, t) for i, (t, _) in enumerate(plan)]
    for event, (_, cancelled) in zip(events, plan, strict=True):
        if cancelled:
            clock.cancel(event)
            clock.cancel(event)
    kept = [(i, t) for i, (t, cancelled) in enumerate(plan) if not cancelled]
    assert len(clock) == len(kept)
    clock.run()
    assert seen == [(i, t, t) for i, t in sorted(kept, key=lambda one: (one[1], one[0]))]
    assert len(clock) == 0
    assert clock.num_happened == len(kept)
    assert not any(event.pending for event in events)


@given(st.lists(times), st.lists(times.map(lambda t: t + 0.5), max_size=4).map(sorted))
def test_running_in_steps_is_running_at_once(plan: list[float], stops: list[float]) -> None:
    def happened(stops: list[float]) -> list[tuple[int, float]]:
        clock, seen = Clock(), []
        for i, time_s in enumerate(plan):
            clock.at(time_s, lambda i: seen.append((i, clock.now_s)), i)
        for stop in stops:
            clock.run(stop)
            assert clock.now_s == stop
            assert len(seen) == sum(time_s <= stop for time_s in plan)
        clock.run()
        return seen

    assert happened(stops) == happened([])


def test_an_event_schedules_and_cancels_others() -> None:
    clock, seen = Clock(), []

    def first(second: Event) -> None:
        clock.cancel(second)
        clock.after(0.0, seen.append, "at once, but last")
        clock.after(1.0, seen.append, "later")

    doomed = clock.at(2.0, seen.append, "never")
    clock.at(1.0, first, doomed)
    clock.at(1.0, seen.append, "same time")
    clock.run()
    assert seen == ["same time", "at once, but last", "later"]
    assert clock.now_s == 2.0


def test_the_end_of_a_run_belongs_to_it() -> None:
    clock, seen = Clock(), []
    clock.at(1.0, seen.append, 1)
    clock.at(1.0 + 1e-9, seen.append, 2)
    clock.run(1.0)
    assert seen == [1]


@pytest.mark.parametrize("time_s", [0.5, math.nan, math.inf, -math.inf])
def test_what_is_past_or_never_is_refused(time_s: float) -> None:
    clock = Clock()
    clock.run(1.0)
    with pytest.raises(ValueError, match="nothing can be scheduled"):
        clock.at(time_s, print)
    if time_s != math.inf:
        with pytest.raises(ValueError, match="time cannot run"):
            clock.run(time_s)
    assert len(clock) == 0
    assert clock.now_s == 1.0


def test_cancelled_events_do_not_fill_the_heap_and_the_rest_keeps_its_order() -> None:
    clock, seen = Clock(), []

    def cancel_all() -> None:
        for event in doomed:
            clock.cancel(event)

    clock.at(0.0, cancel_all)
    doomed = []
    for i in range(5_000):
        doomed.append(clock.at(3.0, seen.append, -1))
        if i % 100 == 0:
            clock.at(2.0 - i * 1e-5, seen.append, i)
    clock.run()
    assert seen == list(range(4_900, -1, -100))


def test_what_an_event_raises_comes_out_and_the_others_stay() -> None:
    clock, seen = Clock(), []
    clock.at(1.0, lambda: 1 / 0)
    clock.at(1.0, seen.append, "after")
    with pytest.raises(ZeroDivisionError):
        clock.run()
    clock.run()
    assert seen == ["after"]
