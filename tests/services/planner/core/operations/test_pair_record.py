"""What the planner knows of one pair."""

from __future__ import annotations

import pytest

from services.planner.core.operations.pair_record import LIVE_REPORT_WAIT_S, LivePair, timeline
from shared.messages.live import Gate, LayerRuns, LiveBatch
from shared.messages.operations import LiveBatchRecord
from tests.services.planner.core.live.some_pairs import assignment, report

TRIGGERED_S = 1000.0


def test_a_pair_runs_until_it_is_reported_on() -> None:
    pair = LivePair(assignment())
    record = pair.record(TRIGGERED_S)
    assert (record.outcome, record.started_ms, record.source, record.target) == ("running", None, "w0", "w1")
    assert (record.policy, record.why) == ("zigzag", "because")
    assert [pair.running] == [True]
    pair.apply(report(pair.assignment), 1000.9)
    record = pair.record(TRIGGERED_S)
    assert [pair.running] == [False]
    assert (record.outcome, record.reason, record.started_ms, record.ended_ms) == ("dissolved", "loaded", 100.0, 900.0)
    assert record.first_cooperative_token_ms is None


def test_a_report_in_between_says_when_it_began_and_ends_nothing() -> None:
    pair = LivePair(assignment())
    running = report(pair.assignment, outcome="running", first_cooperative_token_ago_s=0.4)
    pair.apply(running, 1000.9)
    record = pair.record(TRIGGERED_S)
    assert (record.outcome, record.started_ms, record.ended_ms) == ("running", 100.0, None)
    assert record.first_cooperative_token_ms == 500.0
    pair.apply(report(pair.assignment), 1001.0)
    pair.apply(running, 1001.1)  # it was overtaken
    assert pair.record(TRIGGERED_S).outcome == "dissolved"


def test_the_record_has_what_the_source_reports() -> None:
    pair = LivePair(assignment())
    batch = LiveBatch(
        batch_id="b0", num_requests=2, num_tokens=99, target_layers=3, source_layers=4, first_token_ago_s=0.4
    )
    pair.apply(
        report(
            pair.assignment,
            first_cooperative_token_ago_s=0.4,
            batches=(batch,),
            source_runs=LayerRuns(started_ago_s=0.8, bucket_s=0.1, counts=(1, 2)),
            target_runs=LayerRuns(started_ago_s=0.6, bucket_s=0.1, counts=(5,)),
            tokens=LayerRuns(started_ago_s=0.9, bucket_s=0.1, counts=(7, 1)),
        ),
        1000.9,
    )
    record = pair.record(TRIGGERED_S)
    assert record.first_cooperative_token_ms == 500.0
    assert record.batches == (
        LiveBatchRecord(
            batch_id="b0", num_requests=2, num_tokens=99, target_layers=3, source_layers=4, first_token_ms=500.0
        ),
    )
    assert record.bucket_ms == 100.0
    assert (record.source_layers, record.target_layers, record.tokens) == ((1, 2), (0, 0, 5), (8,))
    short = pair.record(TRIGGERED_S, details=False)
    assert (short.batches, short.source_layers, short.tokens) == ((), (), ())
    assert (short.outcome, short.ended_ms, short.first_cooperative_token_ms) == ("dissolved", 900.0, 500.0)


def test_a_report_is_waited_for_a_while_after_the_target_has_ended() -> None:
    pair = LivePair(assignment())
    pair.check(False, 5.0)
    pair.check(True, 100.0)
    pair.check(True, 99.9 + LIVE_REPORT_WAIT_S)
    assert pair.running
    pair.check(True, 100.0 + LIVE_REPORT_WAIT_S)
    assert pair.outcome == "unknown"
    assert "did not report" in pair.record(TRIGGERED_S).reason


@pytest.mark.parametrize("target_ended", [False, True])
def test_a_pair_without_its_source_is_over_at_once(target_ended: bool) -> None:
    pair = LivePair(assignment())
    pair.check(target_ended, 100.0)
    assert pair.running
    pair.check(target_ended, 100.5, source_gone="the source's worker died")
    assert (pair.outcome, pair.record(TRIGGERED_S).reason) == ("unknown", "the source's worker died")
    pair.check(True, 101.0 + LIVE_REPORT_WAIT_S)
    assert pair.record(TRIGGERED_S).reason == "the source's worker died"
    pair.apply(report(pair.assignment), 1000.9)
    pair.check(True, 102.0 + LIVE_REPORT_WAIT_S, source_gone="the source's worker died")
    assert pair.outcome == "dissolved"


def test_a_report_that_comes_late_after_all_counts() -> None:
    pair = LivePair(assignment())
    pair.check(True, 0.0)
    pair.check(True, LIVE_REPORT_WAIT_S)
    pair.apply(report(pair.assignment, outcome="failed", reason="the target died"), 1000.9)
    assert (pair.outcome, pair.record(TRIGGERED_S).reason) == ("failed", "the target died")
    pair.check(True, 9 * LIVE_REPORT_WAIT_S)
    assert pair.outcome == "failed"


def test_a_pair_that_was_never_told_has_failed() -> None:
    pair = LivePair(assignment())
    pair.fail("no bus")
    assert (pair.outcome, pair.record(TRIGGERED_S).reason) == ("failed", "no bus")
    reported = LivePair(assignment())
    reported.apply(report(reported.assignment), 1000.9)
    reported.fail("no bus")
    assert reported.outcome == "dissolved"


def test_every_revision_has_a_number_and_keeps_the_rest() -> None:
    pair = LivePair(assignment())
    gate = Gate(batch_id="b0", num_layers=2)
    first = pair.set_gates((gate,))
    assert (first.revision, first.gates, first.pair_id, first.target) == (
        1,
        (gate,),
        "plan-p-w1",
        assignment().target,
    )
    assert pair.set_gates(()).revision == 2
    assert pair.assignment.gates == ()


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (None, ()),
        (LayerRuns(started_ago_s=10.0, bucket_s=0.0, counts=(1,)), ()),
        (LayerRuns(started_ago_s=9.96, bucket_s=0.1, counts=(1, 2, 3)), (1, 2, 3)),
        (LayerRuns(started_ago_s=9.94, bucket_s=0.1, counts=(1, 2)), (0, 1, 2)),
        (LayerRuns(started_ago_s=10.2, bucket_s=0.1, counts=(1, 2, 3, 4)), (6, 4)),
        (LayerRuns(started_ago_s=10.0, bucket_s=0.2, counts=(1, 2)), (1, 0, 2)),
        (LayerRuns(started_ago_s=9.99, bucket_s=0.05, counts=(1, 1, 1, 1, 1)), (1, 2, 2)),
        (LayerRuns(started_ago_s=10.0, bucket_s=1e9, counts=(1, 2)), (1,)),
    ],
)
def test_timelines_begin_with_the_pair(runs: LayerRuns | None, expected: tuple[int, ...]) -> None:
    assert timeline(runs, 10.0, 0.1) == expected
