from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.record import Failure, RequestRecord
from bench.replay.series import Series, quantiles


@st.composite
def records(draw: st.DrawFn) -> list[RequestRecord]:
    made = []
    for index in range(draw(st.integers(0, 8))):
        gaps_s = tuple(draw(st.lists(st.floats(0, 2), max_size=6)))
        ttft_s = draw(st.floats(0, 5))
        made.append(
            RequestRecord(
                index=index,
                due_s=draw(st.floats(0, 20)),
                lag_s=0.0,
                input_tokens=1,
                output_tokens=len(gaps_s) + 1,
                ttft_s=ttft_s,
                gaps_s=gaps_s,
                e2e_s=ttft_s + sum(gaps_s),
                failure=draw(st.sampled_from([None, Failure("timeout", "")])),
            )
        )
    return made


@given(records(), st.lists(st.floats(0, 30), max_size=3))
def test_everything_is_in_one_window(made: list[RequestRecord], without_outcome_s: list[float]) -> None:
    series = Series.of([*(record.due_s for record in made), *without_outcome_s], made)
    assert sum(series.arrivals) == len(made) + len(without_outcome_s)
    assert sum(series.completed) + sum(series.failed) == len(made)
    assert sum(series.output_tokens) == sum(record.output_tokens for record in made)
    assert len({len(column) for column in (series.arrivals, series.completed, series.ttft_mean_s)}) == 1


def test_means_are_of_their_window() -> None:
    def completed(due_s: float, ttft_s: float, *gaps_s: float) -> RequestRecord:
        return RequestRecord(0, due_s, 0.0, 1, len(gaps_s) + 1, ttft_s, gaps_s, ttft_s + sum(gaps_s))

    series = Series.of([0.1, 0.2, 2.5], [completed(0.1, 0.2, 0.1), completed(0.2, 0.9, 1.0), completed(2.5, 0.1)])
    assert series.arrivals == (2, 0, 1)
    assert series.ttft_mean_s == (pytest.approx(0.55), None, pytest.approx(0.1))
    assert series.tbt_mean_s == (pytest.approx(0.1), None, pytest.approx(1.0))


@given(st.lists(st.floats(0, 100)))
def test_quantiles_rise_from_the_least_to_the_most(values: list[float]) -> None:
    found = quantiles(values)
    assert list(found) == sorted(found)
    assert len(found) == (1001 if values else 0)
    if values:
        assert (found[0], found[-1]) == (min(values), max(values))
