"""An instance's own speed, from the times of its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.scheduling.speed import Speed, SpeedEstimator

BASE_S, TOKEN_S, REQUEST_S = 0.004, 0.0001, 0.0005


def step(estimator: SpeedEstimator, prefill: int = 0, decode: int = 0, *, slowed: float = 1.0) -> None:
    """A step of an engine that reads its weights once, and adds something per prompt token and per decode."""
    estimator.stepped(prefill, decode, slowed * (BASE_S + prefill * TOKEN_S + decode * REQUEST_S))


def test_nothing_is_known_at_first() -> None:
    assert SpeedEstimator().speed == Speed(0.0, 0.0, 0.0, 0.0)


def test_prefill_is_as_fast_as_at_the_largest_size_measured() -> None:
    estimator = SpeedEstimator()
    step(estimator, prefill=512)
    full = 512 / (BASE_S + 512 * TOKEN_S)
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(full)
    for _ in range(20):
        step(estimator, prefill=16)
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(full), "few tokens mostly read weights"


def test_decodes_in_the_same_step_do_not_make_prefill_slower() -> None:
    estimator = SpeedEstimator()
    for requests in (1, 8, 64):
        step(estimator, decode=requests)
    for _ in range(9):
        step(estimator, prefill=512, decode=64)
    # The weights are read once, and that is the decodes'.
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(1 / TOKEN_S)


def test_without_a_decode_measured_its_tokens_count_like_the_prompts() -> None:
    estimator = SpeedEstimator()
    estimator.stepped(30, 10, 0.4)
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(100.0)


def test_a_step_with_more_decodes_than_prompt_tokens_says_nothing_about_prefill() -> None:
    estimator = SpeedEstimator()
    step(estimator, prefill=16, decode=64)
    assert estimator.speed == Speed()


def test_a_decode_step_is_a_base_and_something_per_request() -> None:
    estimator = SpeedEstimator()
    for requests in (1, 2, 7, 30, 30, 30):
        step(estimator, decode=requests)
    assert estimator.speed.decode_base_s == pytest.approx(BASE_S)
    assert estimator.speed.decode_request_s == pytest.approx(REQUEST_S)
    assert estimator.speed.decode_tokens_per_s == pytest.approx(30 / (BASE_S + 30 * REQUEST_S))


def test_a_constant_batch_does_not_make_the_others_forgotten() -> None:
    estimator = SpeedEstimator()
    step(estimator, decode=1)
    for _ in range(1000):
        step(estimator, decode=40)
    assert estimator.speed.decode_request_s == pytest.approx(REQUEST_S)


def test_one_size_alone_is_all_base_or_all_slope() -> None:
    lone, batch = SpeedEstimator(), SpeedEstimator()
    step(lone, decode=1)
    assert (lone.speed.decode_base_s, lone.speed.decode_request_s) == (BASE_S + REQUEST_S, 0.0)
    step(batch, decode=8)
    assert batch.speed.decode_base_s == 0.0
    assert batch.speed.decode_request_s == pytest.approx((BASE_S + 8 * REQUEST_S) / 8)


def test_a_stall_is_not_the_engines_speed() -> None:
    estimator = SpeedEstimator()
    step(estimator, prefill=512, slowed=3.0)  # as a first one is
    step(estimator, prefill=512)
    usual = estimator.speed.prefill_tokens_per_s
    assert usual == pytest.approx(512 / (BASE_S + 512 * TOKEN_S))
    step(estimator, prefill=512)
    step(estimator, prefill=512, slowed=50.0)
    assert estimator.speed.prefill_tokens_per_s == usual


def test_an_engine_that_became_slower_is_seen_after_a_few_steps() -> None:
    estimator = SpeedEstimator()
    for _ in range(100):
        step(estimator, prefill=512, slowed=1.0)
    before = estimator.speed.prefill_tokens_per_s
    for _ in range(3):
        step(estimator, prefill=512, slowed=2.0)
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(before / 2)


def test_one_stalled_step_of_the_largest_size_does_not_count_against_its_neighbours() -> None:
    estimator = SpeedEstimator()
    for _ in range(3):
        estimator.stepped(512, 0, 512 / 10_000)
    estimator.stepped(1024, 0, 4.0)
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(10_000)


def test_neighbours_that_are_measured_later_bound_a_lone_step_too() -> None:
    estimator = SpeedEstimator()
    estimator.stepped(1024, 0, 4.0)
    assert estimator.speed.prefill_tokens_per_s == 256, "nothing else is known"
    for _ in range(2):
        estimator.stepped(512, 0, 512 / 10_000)
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(10_000)


def test_a_lone_step_that_neighbours_make_likely_counts_as_it_is() -> None:
    estimator = SpeedEstimator()
    for _ in range(3):
        step(estimator, prefill=64)
    step(estimator, prefill=2048)
    assert estimator.speed.prefill_tokens_per_s == pytest.approx(2048 / (BASE_S + 2048 * TOKEN_S))


def test_sizes_that_did_not_occur_for_long_are_forgotten() -> None:
    estimator = SpeedEstimator()
    for _ in range(5):
        step(estimator, decode=64, slowed=40.0)  # the machine was busy, and not once only
    for number in range(2000):
        step(estimator, decode=(1, 4, 8)[number % 3])
    assert estimator.decode_s(8) == pytest.approx(BASE_S + 8 * REQUEST_S)
    assert estimator.decode_s(64) == pytest.approx(BASE_S + 64 * REQUEST_S)


def test_decodes_alone_take_no_longer_than_with_prompts_beside_them() -> None:
    estimator = SpeedEstimator()
    estimator.stepped(0, 64, 3.0)
    estimator.stepped(16, 64, 0.1)
    assert estimator.decode_s(64) <= 0.1


def test_a_clock_that_stands_still_measures_nothing() -> None:
    estimator = SpeedEstimator()
    estimator.stepped(10, 0, 0.0)
    estimator.stepped(0, 10, 0.0)
    estimator.prefilled(10, 0.0)
    assert estimator.speed == Speed()


@given(
    st.lists(
        st.tuples(st.integers(0, 4096), st.integers(0, 512), st.floats(1e-6, 10.0)).filter(lambda s: s[0] + s[1] > 0),
        max_size=60,
    )
)
def test_whatever_is_measured_no_figure_is_negative_or_endless(steps: list[tuple[int, int, float]]) -> None:
    estimator = SpeedEstimator()
    for prefill, decode, seconds in steps:
        estimator.stepped(prefill, decode, seconds)
    speed = estimator.speed
    for figure in (
        speed.prefill_tokens_per_s,
        speed.decode_tokens_per_s,
        speed.decode_base_s,
        speed.decode_request_s,
    ):
        assert 0.0 <= figure < 1e12
    assert (speed.prefill_tokens_per_s > 0) == any(p > d for p, d, _ in steps)
