"""Counts over time."""

from __future__ import annotations

import pytest

from services.worker.live.report import BUCKET_S, MAX_BUCKETS, Timeline

START_S = 1_700_000_000.0


def test_counts_fall_into_their_stretch_of_time() -> None:
    timeline = Timeline(START_S)
    timeline.add(START_S)
    timeline.add(START_S + 0.9 * BUCKET_S, 3)
    timeline.add(START_S + 3.5 * BUCKET_S)
    runs = timeline.runs()
    assert (runs.start_at_s, runs.bucket_s, runs.counts) == (START_S, BUCKET_S, (4, 0, 0, 1))
    assert timeline.total == 5


def test_nothing_is_an_empty_record() -> None:
    assert Timeline(START_S).runs().counts == ()
    assert Timeline(START_S).total == 0


def test_a_clock_that_was_set_back_counts_into_the_first() -> None:
    timeline = Timeline(START_S)
    timeline.add(START_S - 100.0)
    assert timeline.runs().counts == (1,)


@pytest.mark.parametrize("late_s", [MAX_BUCKETS * BUCKET_S, 1e9])
def test_a_record_does_not_grow_without_end(late_s: float) -> None:
    timeline = Timeline(START_S)
    timeline.add(START_S + late_s, 2)
    timeline.add(START_S + 2 * late_s)
    counts = timeline.runs().counts
    assert len(counts) == MAX_BUCKETS
    assert counts[-1] == timeline.total == 3


def test_a_record_is_not_changed_by_what_comes_later() -> None:
    timeline = Timeline(START_S)
    timeline.add(START_S)
    runs = timeline.runs()
    timeline.add(START_S)
    assert runs.counts == (1,)
