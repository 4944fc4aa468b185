from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.objectives import Attainment, Slo
from shared.errors import BadRequest


@dataclass(frozen=True)
class Seen:
    ttft_s: float | None
    mean_gap_s: float | None


def of(**given: Any) -> Slo | None:
    nothing = {"ttft_ms": None, "tbt_ms": None, "mean_ttft_ms": None, "mean_tbt_ms": None, "factor": 5.0}
    return Slo.of(**(nothing | given))


def test_objectives_are_times_or_multiples_of_means() -> None:
    assert of() is None
    assert of(ttft_ms=400.0) == Slo(0.4, None)
    assert of(mean_ttft_ms=90.0, tbt_ms=30.0) == Slo(0.45, 0.03)
    assert of(mean_tbt_ms=10.0, factor=3.0) == Slo(None, 0.03)


@pytest.mark.parametrize(
    "wrong",
    [{"ttft_ms": 0.0}, {"tbt_ms": -1.0}, {"mean_tbt_ms": math.nan}, {"factor": 0.0}, {"ttft_ms": math.inf},
     {"ttft_ms": 1.0, "mean_ttft_ms": 1.0}],
)  # fmt: skip
def test_senseless_objectives_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadRequest):
        of(**wrong)


def test_a_request_attains_by_both_and_what_has_no_outcome_misses() -> None:
    seen = [Seen(0.1, 0.01), Seen(0.2, 0.02), Seen(0.3, 0.01), Seen(0.1, 0.03), Seen(0.1, None)]
    found = Attainment.of(Slo(0.2, 0.02), seen, planned=10, duration_s=2.0)
    assert (found.attained, found.share, found.ttft_share, found.tbt_share) == (3, 0.3, 0.4, 0.4)
    assert found.goodput_requests_per_s == 1.5


TIMES = st.one_of(st.none(), st.floats(0, 10))


@given(st.lists(st.builds(Seen, TIMES, TIMES)), TIMES, TIMES, st.integers(0, 5))
def test_both_are_met_by_no_more_than_either(
    seen: list[Seen], ttft_s: float | None, tbt_s: float | None, missing: int
) -> None:
    found = Attainment.of(Slo(ttft_s, tbt_s), seen, planned=len(seen) + missing, duration_s=1.0)
    assert 0 <= found.share <= min(found.ttft_share, found.tbt_share) <= 1
    if ttft_s is None and tbt_s is None:
        assert found.attained == len(seen)
