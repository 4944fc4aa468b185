"""TTFT and TBT as gateways tell each other, and as readers of the feed see them."""

from __future__ import annotations

import pickle

import pytest

from services.gateway.core.latencies import (
    MAX_KNOWN,
    MAX_MODELS,
    SLOT_S,
    WINDOW_S,
    LatencyReports,
    RecentLatencies,
    quantile,
)
from shared.messages.load import LatencyReport, ModelLatencies


def told(reports: LatencyReports, *models: tuple[str, int, list[int], list[int]]) -> dict[str, tuple[object, object]]:
    return {m.model: (m.ttft, m.tbt) for report in reports.reports(models) for m in report.models}


def test_only_what_is_new_is_told() -> None:
    reports = LatencyReports("gw")
    assert told(reports, ("a", 3, [1, 0, 0], [0, 2, 0]), ("b", 0, [0], [0])) == {"a": ((1,), (0, 2))}
    assert told(reports, ("a", 3, [1, 0, 0], [0, 2, 0])) == {}
    assert told(reports, ("a", 5, [1, 0, 1], [1, 2, 0])) == {"a": ((0, 0, 1), (1,))}


def test_a_model_that_was_away_begins_anew() -> None:
    reports = LatencyReports("gw")
    told(reports, ("a", 9, [9], [0]))
    assert told(reports) == {}
    assert told(reports, ("a", 1, [1], [0])) == {"a": ((1,), ())}


def test_a_model_that_was_away_between_two_reports_begins_anew() -> None:
    reports = LatencyReports("gw")
    told(reports, ("a", 100, [10, 0], [90]))
    assert told(reports, ("a", 60, [20, 0], [40])) == {"a": ((20,), (40,))}


def test_many_models_take_several_reports() -> None:
    models = [(f"m{number}", 1, [1], [0]) for number in range(MAX_MODELS + 1)]
    assert [len(report.models) for report in LatencyReports("gw").reports(models)] == [MAX_MODELS, 1]


def report(model: str, ttft: tuple[int, ...], tbt: tuple[int, ...] = ()) -> LatencyReport:
    latencies = ModelLatencies(model=model, tokens=sum(ttft) + sum(tbt), ttft=ttft, tbt=tbt)
    return LatencyReport(gateway_id="gw", models=(latencies,))


def test_what_all_gateways_say_adds_up_and_is_forgotten() -> None:
    recent = RecentLatencies()
    recent.take(report("a", (1,)), 0.0)
    recent.take(report("a", (0, 0, 3), (16,)), 5.0)
    ((name, found),) = recent.summaries(6.0)
    assert (name, found["tokens_per_s"]) == ("a", 2.0)
    assert 2.5 < found["ttft_p50_ms"] < found["ttft_p99_ms"] <= 5.0
    assert 0.0 < found["tbt_p50_ms"] <= 1.0
    ((_, later),) = recent.summaries(WINDOW_S + 1.0)
    assert later["tokens_per_s"] == 1.9
    assert list(recent.summaries(5.0 + WINDOW_S)) == []


def test_what_others_say_is_bounded() -> None:
    recent = RecentLatencies()
    for number in range(MAX_KNOWN + 5):
        recent.take(report(f"m{number}", (1,) * 500), 0.0)
    found = dict(recent.summaries(1.0))
    assert len(found) == MAX_KNOWN
    assert "m0" not in found


def test_tokens_that_come_together_are_counted_one_by_one() -> None:
    (said,) = LatencyReports("gw").reports([("a", 40, [2], [3])])
    recent = RecentLatencies()
    recent.take(said, 0.0)
    ((_, found),) = recent.summaries(1.0)
    assert found["tokens_per_s"] == 4.0


def test_what_is_kept_does_not_grow_with_gateways_and_goes_without_a_look() -> None:
    """A look comes only once the registry has answered."""
    sizes = []
    for num_gateways in (10, 100):
        recent = RecentLatencies()
        for number in range(30 * num_gateways):
            recent.take(report("a", (1,), (0, 1)), number / num_gateways)
        sizes.append(len(pickle.dumps(recent)))
        ((_, found),) = recent.summaries(30.0)
        assert found["tokens_per_s"] == pytest.approx(2.0 * num_gateways, rel=SLOT_S / WINDOW_S)
    assert sizes[1] < 1.5 * sizes[0]


def test_a_look_at_what_is_as_before_computes_nothing() -> None:
    recent = RecentLatencies()
    recent.take(report("a", (1,)), 0.0)
    ((_, first),) = recent.summaries(1.0)
    ((_, second),) = recent.summaries(2.0)
    assert first is second
    recent.take(report("a", (0, 1)), 3.0)
    ((_, third),) = recent.summaries(3.0)
    assert third["tokens_per_s"] == 0.2
    ((_, fourth),) = recent.summaries(WINDOW_S)
    assert fourth["tokens_per_s"] == 0.1


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [([4], 0.5, 0.5), ([0, 4], 0.5, 1.5), ([2, 2], 0.5, 1.0), ([1, 1, 2], 1.0, 2.0), ([0, 0, 9], 0.5, 2.0)],
)
def test_quantiles_are_those_of_prometheus(counts: list[int], share: float, expected: float) -> None:
    """The last bucket has no end: its values are at least the last bound."""
    assert quantile(counts, (1.0, 2.0), share) == pytest.approx(expected)
