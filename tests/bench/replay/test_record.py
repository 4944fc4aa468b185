from __future__ import annotations

import pytest

from bench.replay.record import Collector, Failure, RequestRecord, Result, void_reasons


def record(index: int = 0, **fields: object) -> RequestRecord:
    whole = {"due_s": 0.0, "lag_s": 0.001, "input_tokens": 5, "output_tokens": 4, "ttft_s": 0.1,
             "gaps_s": (0.1, 0.1, 0.4), "e2e_s": 0.7}  # fmt: skip
    return RequestRecord(index=index, **(whole | fields))  # type: ignore[arg-type]


def reasons(collector: Collector, concurrency_limit: int | None = None) -> tuple[str, ...]:
    return void_reasons(Result.of(collector), concurrency_limit=concurrency_limit)


def test_a_requests_mean_gap_counts_tokens_that_came_together() -> None:
    assert record().mean_gap_s == pytest.approx(0.2)
    assert record(output_tokens=7).mean_gap_s == pytest.approx(0.1)
    assert record(gaps_s=(), output_tokens=1).mean_gap_s is None
    assert Result.of(Collector(2, records=[record(), record(output_tokens=7)])).bundled_tokens == 3


def test_a_punctual_and_whole_run_is_not_void() -> None:
    assert reasons(Collector(2, records=[record(0), record(1, failure=Failure("http_429", "full"))])) == ()


def test_what_makes_a_run_void_is_said() -> None:
    late = [record(index, lag_s=0.0051) for index in range(10)]
    assert "p99 5.1 ms" in reasons(Collector(10, records=late))[0]
    assert "3 of 10" in reasons(Collector(10, shortened=3, records=[record(index) for index in range(10)]))[0]
    assert "8 requests at a time" in reasons(Collector(1, records=[record()]), 8)[0]
    unseen = void_reasons(Result.of(Collector(1, records=[record()])), concurrency_limit=None, not_observed_s=3.0)
    assert "did not answer for 3.0 s" in unseen[0]
    assert "1 of 2 requests have no outcome" in reasons(Collector(2, records=[record()]))[0]
