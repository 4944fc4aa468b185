from __future__ import annotations

from services.pool.core.outstanding import AVOID_S, DROP_TIMEOUT_S, GIVEN_UP_S, HOLD_TIMEOUT_S, OutstandingSteps
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
