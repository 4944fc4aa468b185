"""What prompt tokens add to a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.scheduling.prompt_cost import PromptCost, num_pairs

TOKEN_S, PAIR_S = 1e-4, 1e-7


def seconds(start: int, count: int, *, slowed: float = 1.0) -> float:
    return slowed * (count * TOKEN_S + num_pairs(start, count) * PAIR_S)


def measured(*chunks: tuple[int, int]) -> PromptCost:
    """By chunks: start and number of tokens."""
    cost = PromptCost()
    for start, count in chunks:
        cost.measured(count, num_pairs(start, count), seconds(start, count))
    return cost


def test_pairs_of_a_chunk_are_what_its_tokens_see() -> None:
    assert num_pairs(0, 3) == 1 + 2 + 3
    assert num_pairs(10, 2) == 11 + 12


def test_nothing_is_known_at_first() -> None:
    cost = PromptCost()
    assert not cost.is_known
    assert (cost.seconds(100, 5000), cost.tokens_within(1.0, 0)) == (0.0, 0)


def test_what_a_context_costs_shows_along_a_long_prompt() -> None:
    cost = measured(*[(start, 512) for start in range(0, 8192, 512)])
    assert cost.seconds(512, num_pairs(8192, 512)) == pytest.approx(seconds(8192, 512), rel=0.02)
    assert cost.tokens_within(0.05, 8192) < cost.tokens_within(0.05, 1024)


def test_as_many_tokens_as_fit_and_no_more() -> None:
    cost = measured(*[(start, 512) for start in range(0, 8192, 512)])
    for start in (0, 1000, 50_000):
        count = cost.tokens_within(0.1, start)
        assert cost.seconds(count, num_pairs(start, count)) <= 0.1
        assert cost.seconds(count + 2, num_pairs(start, count + 2)) > 0.1


def test_chunks_of_one_kind_say_what_that_kind_costs() -> None:
    cost = measured(*[(0, 256)] * 9)
    assert cost.seconds(256, num_pairs(0, 256)) == pytest.approx(seconds(0, 256))


def test_a_stall_counts_for_little_and_a_slower_engine_soon() -> None:
    cost = measured(*[(0, 256)] * 9)
    usual = cost.seconds(256, num_pairs(0, 256))
    cost.measured(256, num_pairs(0, 256), seconds(0, 256, slowed=50.0))
    assert cost.seconds(256, num_pairs(0, 256)) < 1.5 * usual
    for _ in range(8):
        cost.measured(256, num_pairs(0, 256), seconds(0, 256, slowed=50.0))
    assert cost.seconds(256, num_pairs(0, 256)) > 40 * usual


def test_what_was_profiled_counts_until_steps_say_otherwise() -> None:
    cost = PromptCost()
    cost.expect(TOKEN_S, PAIR_S)
    assert cost.seconds(512, num_pairs(4096, 512)) == pytest.approx(seconds(4096, 512))
    for _ in range(12):
        cost.measured(512, num_pairs(4096, 512), seconds(4096, 512, slowed=1.5))
    assert cost.seconds(512, num_pairs(4096, 512)) == pytest.approx(seconds(4096, 512, slowed=1.5), rel=0.02)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4096), st.floats(0, 1e6)), max_size=40),
    st.floats(0, 1e6),
    st.integers(0, 10**6),
)
def test_whatever_is_measured_the_answer_is_a_number_that_fits(
    steps: list[tuple[int, int, float]], budget_s: float, start: int
) -> None:
    cost = PromptCost()
    for at, count, took_s in steps:
        cost.measured(count, num_pairs(at, count), took_s)
    assert 0 <= cost.token_s < 1e7
    assert 0 <= cost.pair_s < 1e7
    count = cost.tokens_within(budget_s, start)
    assert count >= 0
    assert cost.seconds(count, num_pairs(start, count)) <= budget_s * 1.000001


@pytest.mark.parametrize("token_s", [0.0, 5e-324, 1e-300])
def test_a_profile_by_which_tokens_take_no_time_says_nothing(token_s: float) -> None:
    cost = PromptCost()
    cost.expect(token_s, token_s)
    assert cost.tokens_within(1.0, 0) == 0
