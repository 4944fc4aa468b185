from __future__ import annotations

import pytest

from bench.stats import Summary, percentile


def test_percentile_interpolates_between_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([10.0, 20.0], 99) == pytest.approx(19.9)
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0, 3.0], 100) == 3.0


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_percentile_refuses_what_has_none(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


def test_summary_of_unordered_values() -> None:
    summary = Summary.of(float(v) for v in (5, 1, 3, 2, 4))
    assert summary == Summary(count=5, mean=3.0, p50=3.0, p99=4.96, max=5.0)


def test_no_values_have_no_summary() -> None:
    assert Summary.of([]) is None
