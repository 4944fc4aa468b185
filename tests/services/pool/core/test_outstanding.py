from __future__ import annotations

from services.pool.core.outstanding import (
    AVOID_MAX_S,
    AVOID_S,
    DROP_TIMEOUT_S,
    GIVEN_UP_S,
    HOLD_TIMEOUT_S,
    LEAVING_S,
    LOAD_TIMEOUT_S,
    OutstandingSteps,
)
from tests.records import model
from tests.services.pool.host_copies import copy_of, holding

M = model("m")
KEY = ("w0", M.model_hash)


def sent() -> OutstandingSteps:
    steps = OutstandingSteps()
    steps.hold_sent(KEY, 100, 0.0)
    return steps


def test_a_hold_is_outstanding_until_the_copy_is_ready() -> None:
    steps = sent()
    assert steps.observe([holding("w0")], 1.0) == ()
    assert steps.now().holds == {KEY: 100}
    steps.observe([holding("w0", [copy_of(M, "loading")])], 100.0)
    assert steps.now().holds == {KEY: 100}
    steps.observe([holding("w0", [copy_of(M)])], 200.0)
    assert steps.now().holds == {}
    assert steps.now().avoided == frozenset()


def test_a_hold_that_is_never_reported_is_tried_elsewhere_for_a_while() -> None:
    steps = sent()
    [failure] = steps.observe([holding("w0")], HOLD_TIMEOUT_S)
    assert "worker w0" in failure
    assert (steps.now().holds, steps.now().avoided) == ({}, {KEY})
    steps.observe([holding("w0")], HOLD_TIMEOUT_S + AVOID_S)
    assert steps.now().avoided == frozenset()


def test_a_copy_that_vanishes_while_it_loads_is_tried_elsewhere_at_once() -> None:
    steps = sent()
    steps.observe([holding("w0", [copy_of(M, "loading")])], 0.5)
    [failure] = steps.observe([holding("w0")], 1.0)
    assert "lost it while loading" in failure
    assert steps.now().avoided == {KEY}


def test_a_cached_copy_does_not_fulfil_a_hold() -> None:
    steps = sent()
    steps.observe([holding("w0", [copy_of(M, cached=True)])], 1.0)
    assert steps.now().holds == {KEY: 100}


def test_a_hold_of_a_dead_worker_is_forgotten() -> None:
    steps = sent()
    steps.drop_sent(KEY, 0.0)
    assert steps.observe([], 1.0) == ()
    assert (steps.now().holds, steps.now().drops, steps.now().avoided) == ({}, frozenset(), frozenset())


def test_a_drop_is_outstanding_until_the_copy_is_gone_or_its_time_is_over() -> None:
    steps = OutstandingSteps()
    steps.drop_sent(KEY, 0.0)
    steps.observe([holding("w0", [copy_of(M)])], 1.0)
    assert steps.now().drops == {KEY}
    steps.observe([holding("w0", [copy_of(M)])], DROP_TIMEOUT_S)
    assert steps.now().drops == frozenset()
    steps.drop_sent(KEY, 20.0)
    steps.observe([holding("w0")], 20.5)
    assert not steps.drop_over(KEY)


def test_a_wish_to_be_rid_of_a_copy_lapses_unless_it_is_repeated() -> None:
    steps = OutstandingSteps()
    steps.give_up(KEY, 0.0)
    steps.observe([holding("w0", [copy_of(M)])], GIVEN_UP_S - 1)
    assert steps.now().given_up == {KEY}
    steps.observe([holding("w0", [copy_of(M)])], GIVEN_UP_S)
    assert steps.now().given_up == frozenset()


def avoided_s(steps: OutstandingSteps, since_s: float) -> float:
    """How long the worker is avoided from ``since_s`` on, in whole seconds."""
    now_s = since_s
    while KEY in steps.now().avoided:
        now_s += 1.0
        steps.observe([holding("w0")], now_s)
    return now_s - since_s


def test_a_worker_that_fails_again_and_again_is_asked_more_and_more_rarely() -> None:
    steps = OutstandingSteps()
    now_s, waits = 0.0, []
    for _ in range(7):
        steps.hold_failed(KEY, now_s)
        steps.observe([holding("w0")], now_s)
        waits.append(avoided_s(steps, now_s))
        now_s += waits[-1]
    assert waits == [AVOID_S, 20.0, 40.0, 80.0, 160.0, AVOID_MAX_S, AVOID_MAX_S]
    steps.hold_sent(KEY, 100, now_s)
    steps.observe([holding("w0", [copy_of(M)])], now_s)
    steps.hold_failed(KEY, now_s)
    assert avoided_s(steps, now_s) == AVOID_S, "a success ends the series"


def test_a_copy_that_loads_for_ever_does_not_count_and_its_worker_is_avoided() -> None:
    steps = sent()
    loading = [holding("w0", [copy_of(M, "loading")])]
    assert steps.observe(loading, 1.0) == ()
    assert steps.observe(loading, 1.0 + LOAD_TIMEOUT_S) == ()
    [failure] = steps.observe(loading, 1.1 + LOAD_TIMEOUT_S)
    assert "worker w0" in failure
    assert (steps.now().holds, steps.now().avoided, steps.now().overdue) == ({}, {KEY}, {KEY})
    assert steps.observe(loading, 500.0) == (), "said once"
    steps.observe([holding("w0", [copy_of(M)])], 501.0)
    assert steps.now().overdue == frozenset()


def test_a_large_copy_has_the_time_that_its_bytes_take_on_a_slow_link() -> None:
    steps = OutstandingSteps()
    large = model("m", weights_bytes=25_000_000_000)  # 2000 s at 0.1 Gbit/s
    loading = [holding("w0", [copy_of(large, "loading")])]
    steps.observe(loading, 0.0)
    assert steps.observe(loading, 2000.0) == ()
    assert len(steps.observe(loading, 2000.1)) == 1


def test_a_copy_that_is_loaded_anew_has_its_time_anew() -> None:
    steps = OutstandingSteps()
    steps.observe([holding("w0", [copy_of(M, "loading", serial=1)])], 0.0)
    steps.observe([holding("w0", [copy_of(M, "loading", serial=2)])], 100.0)
    assert steps.observe([holding("w0", [copy_of(M, "loading", serial=2)])], 200.0) == ()


def test_a_worker_leaves_until_it_is_silent_or_comes_back_as_another_process() -> None:
    steps = OutstandingSteps()
    report = holding("w0")
    steps.leaves("w0", report.worker.incarnation, 0.0)
    steps.observe([report], 1.0)
    assert steps.now().leaving == {"w0"}
    steps.observe([report], LEAVING_S)
    assert steps.now().leaving == frozenset()
    steps.leaves("w0", "an earlier process", 20.0)
    steps.observe([report], 20.5)
    assert steps.now().leaving == frozenset()
