from __future__ import annotations

from collections import Counter

import pytest

from bench.traces.synthetic import FIGURES, synthesise
from shared.errors import BadRequest

LONG_S = 40_000


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_long_sample_has_the_traces_statistics(name: str) -> None:
    figures = FIGURES[name]
    requests = synthesise(name, seed=3, duration_s=LONG_S).requests
    counts = Counter(int(request.arrival_s) for request in requests)
    per_second = [counts[second] for second in range(LONG_S)]
    mean = sum(per_second) / LONG_S
    variance = sum((count - mean) ** 2 for count in per_second) / LONG_S
    assert mean == pytest.approx(figures.rate_per_s, rel=0.1)
    assert variance / mean == pytest.approx(figures.dispersion, rel=0.12)
    assert per_second.count(0) / LONG_S == pytest.approx(figures.idle_share, abs=0.03)
    assert figures.peak_per_s * 0.7 <= max(per_second) <= figures.peak_per_s
    for wanted, lengths in (
        (figures.input, sorted(request.input_tokens for request in requests)),
        (figures.output, sorted(request.output_tokens for request in requests)),
    ):
        assert sum(lengths) / len(lengths) == pytest.approx(wanted.mean, rel=0.05)
        assert lengths[len(lengths) // 2] == pytest.approx(wanted.p50, rel=0.1)
        assert lengths[int(len(lengths) * 0.99)] == pytest.approx(wanted.p99, rel=0.1)
        assert lengths[0] >= 1


def test_the_seed_decides_everything() -> None:
    assert synthesise("azure-code", seed=1, duration_s=60) == synthesise("azure-code", seed=1, duration_s=60)
    assert synthesise("azure-code", seed=1, duration_s=60) != synthesise("azure-code", seed=2, duration_s=60)


def test_a_short_sample_has_requests_inside_its_duration() -> None:
    for name in FIGURES:
        trace = synthesise(name, seed=0, duration_s=1)
        assert trace.requests
        assert trace.span_s < 1


def test_arrivals_are_in_order() -> None:
    arrivals = [request.arrival_s for request in synthesise("azure-conv", seed=0, duration_s=50).requests]
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize(("name", "duration_s"), [("azure", 10.0), ("burstgpt", 0.0), ("burstgpt", float("nan"))])
def test_unknown_names_and_durations_are_refused(name: str, duration_s: float) -> None:
    with pytest.raises(BadRequest):
        synthesise(name, seed=0, duration_s=duration_s)
