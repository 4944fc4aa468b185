"""Counts grow with the request and equal a count of everything."""

from collections import Counter
from collections.abc import Sequence

import pytest

from services.worker.engine.token_counts import TokenCounts


def counted(counts: TokenCounts) -> dict[int, float]:
    got = dict(zip(counts.ids, counts.times, strict=True))
    assert len(got) == len(counts.ids)
    return got


def expected(prompt: Sequence[int], output: Sequence[int]) -> dict[int, float]:
    return dict.fromkeys(prompt, 0.0) | Counter(output)


PROMPT, OUTPUT = (1, 2, 1), (5, 7, 5, 1, 9, 5)


def test_ids_are_distinct_and_times_count_the_output_alone() -> None:
    counts = TokenCounts(PROMPT, ())
    for position, token_id in enumerate(OUTPUT):
        counts.add(position, token_id)
        assert counted(counts) == expected(PROMPT, OUTPUT[: position + 1])


def test_output_of_an_earlier_attempt_is_counted_at_once() -> None:
    assert counted(TokenCounts((), (3, 3, 4))) == {3: 2.0, 4: 1.0}


@pytest.mark.parametrize("again", [5, 8, 1])
def test_a_position_that_is_sampled_again_has_the_counts_of_before(again: int) -> None:
    counts = TokenCounts(PROMPT, ())
    for position, token_id in enumerate(OUTPUT):
        counts.add(position, token_id)
        assert counted(counts.before(position)) == expected(PROMPT, OUTPUT[:position])
        counts.add(position, again)
        counts.add(position, token_id)
    assert counted(counts) == expected(PROMPT, OUTPUT)


@pytest.mark.parametrize("position", [0, 4])
def test_counts_of_other_tokens_than_those_before_are_refused(position: int) -> None:
    counts = TokenCounts((), (1, 2))
    counts.add(2, 3)
    with pytest.raises(ValueError, match="counts of 3 tokens"):
        counts.before(position)


def test_what_two_steps_drew_is_taken_out_when_the_first_is_run_again() -> None:
    counts = TokenCounts((9,), (1,))
    counts.add(1, 1)
    counts.add(2, 7)
    counts.add(1, 5)
    assert list(zip(counts.ids, counts.times, strict=True)) == [(9, 0.0), (1, 1.0), (5, 1.0)]
    with pytest.raises(ValueError, match="counts of 2 tokens"):
        counts.before(3)
