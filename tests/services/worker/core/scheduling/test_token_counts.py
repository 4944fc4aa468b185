"""Counts grow with the request and equal a count of everything."""

from collections import Counter

from services.worker.core.scheduling.sequence import TokenCounts


def test_ids_are_distinct_and_times_count_the_output_alone() -> None:
    counts, output = TokenCounts(), list[int]()
    for token_id in (5, 7, 5, 1, 9, 5):
        output.append(token_id)
        counts.catch_up([1, 2, 1], output)
        got = dict(zip(counts.ids, counts.times, strict=True))
        assert len(got) == len(counts.ids)
        assert got == {1: 0, 2: 0} | Counter(output)


def test_output_of_an_earlier_attempt_is_counted_at_once() -> None:
    counts = TokenCounts()
    counts.catch_up([], [3, 3, 4])
    assert dict(zip(counts.ids, counts.times, strict=True)) == {3: 2.0, 4: 1.0}
