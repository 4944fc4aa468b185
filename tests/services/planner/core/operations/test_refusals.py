from __future__ import annotations

from services.planner.core.operations.refusals import AVOID_MAX_S, AVOID_S, FORGET_S, MAX_REFUSALS, WorkerRefusals


def test_a_worker_that_failed_is_avoided_for_longer_each_time() -> None:
    refusals = WorkerRefusals()
    now_s, pauses = 0.0, []
    for _ in range(10):
        refusals.failed("w0", "m", "no room", now_s)
        (refusal,) = refusals.newest(now_s, 10)
        pauses.append(refusal.for_s)
        now_s += refusal.for_s
    assert pauses[:4] == [AVOID_S, 2 * AVOID_S, 4 * AVOID_S, 8 * AVOID_S]
    assert pauses[-1] == AVOID_MAX_S


def test_one_that_never_stops_failing_is_avoided_for_the_longest_time_and_no_figure_overflows() -> None:
    refusals = WorkerRefusals()
    for _ in range(1100):
        refusals.failed("w0", "m", "no room", 0.0)
    (refusal,) = refusals.newest(0.0, 1)
    assert (refusal.failures, refusal.for_s) == (1100, AVOID_MAX_S)


def test_it_is_avoided_for_that_model_alone_and_says_why() -> None:
    refusals = WorkerRefusals()
    refusals.failed("w0", "m", "no room", 0.0)
    assert refusals.avoided("m", 0.5) == {"w0": "no room"}
    assert refusals.avoided("n", 0.5) == {}
    assert refusals.avoided("m", AVOID_S) == {}


def test_those_of_some_models_are_found_among_many() -> None:
    refusals = WorkerRefusals()
    for index in range(5):
        refusals.failed("w0", f"m{index}", "no room", 0.0)
    assert [r.model for r in refusals.newest(0.0, 2, ("m1", "m0", "x"))] == ["m1", "m0"]


def test_who_served_starts_afresh_and_what_is_long_over_is_forgotten() -> None:
    refusals = WorkerRefusals()
    for _ in range(3):
        refusals.failed("w0", "m", "no room", 0.0)
    refusals.served("w0", "m")
    refusals.failed("w0", "m", "no room", 0.0)
    assert refusals.newest(0.0, 10)[0].failures == 1
    refusals.forget(AVOID_S + FORGET_S)
    refusals.failed("w0", "m", "no room", 0.0)
    assert refusals.newest(0.0, 10)[0].failures == 1


def test_what_is_excused_once_is_a_failure_when_it_comes_again_unless_it_served_or_that_is_long_after() -> None:
    refusals = WorkerRefusals()
    refusals.excused("w0", "m", "started anew", 0.0)
    refusals.served("w0", "m")
    refusals.excused("w0", "m", "started anew", 0.0)
    refusals.forget(FORGET_S)
    refusals.excused("w0", "m", "started anew", 0.0)
    assert (refusals.avoided("m", 0.0), refusals.newest(0.0, 1)) == ({}, ())
    refusals.excused("w0", "m", "started anew", 0.0)
    (refusal,) = refusals.newest(0.0, 1)
    assert (refusal.failures, refusal.for_s) == (1, AVOID_S)


def test_refusals_are_bounded() -> None:
    refusals = WorkerRefusals()
    for index in range(MAX_REFUSALS + 5):
        refusals.failed(f"w{index}", "m", "no room", 0.0)
    assert len(refusals.avoided("m", 0.0)) == MAX_REFUSALS
    assert [r.worker_id for r in refusals.newest(0.0, 2)] == [f"w{MAX_REFUSALS + 4}", f"w{MAX_REFUSALS + 3}"]


def test_a_model_whose_refusals_made_room_for_others_has_none() -> None:
    refusals = WorkerRefusals()
    refusals.failed("w0", "old", "no room", 0.0)
    for index in range(MAX_REFUSALS):
        refusals.failed(f"w{index}", "m", "no room", 0.0)
    assert refusals.avoided("old", 0.0) == {}
    refusals.failed("w0", "old", "no room", 0.0)
    assert refusals.avoided("old", 0.0) == {"w0": "no room"}
    assert "w0" not in refusals.avoided("m", 0.0), "the oldest"
