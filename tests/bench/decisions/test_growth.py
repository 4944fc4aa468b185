"""How figures grow with the cluster."""

from __future__ import annotations

import pytest

from bench.decisions.growth import per_tenfold, rows, summaries
from bench.decisions.stopwatch import Decision


def test_growth_is_per_tenfold_whatever_the_sizes() -> None:
    assert per_tenfold(100, 5.0, 1000, 50.0) == pytest.approx(10.0)
    assert per_tenfold(100, 5.0, 10_000, 500.0) == pytest.approx(10.0)
    assert per_tenfold(100, 5.0, 200, 5.0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="nothing grows"):
        per_tenfold(100, 5.0, 100, 5.0)


def test_what_cannot_be_told_from_nothing_does_not_grow() -> None:
    assert per_tenfold(100, 0.0, 1000, 0.0) == 1.0
    assert per_tenfold(100, 0.0, 1000, 0.2) == pytest.approx(2.0)


def test_a_row_has_each_size_and_the_growth_to_each_but_the_first() -> None:
    decision = Decision("quiet", "pool", "heartbeat")
    figures = {size: summaries({decision: [us, us]}) for size, us in ((1000, 20.0), (100, 10.0), (10_000, 100.0))}
    (row,) = rows(figures)
    assert row["p50_us"] == {"100": 10.0, "1000": 20.0, "10000": 100.0}
    assert row["growth"] == {"1000": 2.0, "10000": 5.0}
    assert (row["state"], row["service"], row["what"]) == decision
