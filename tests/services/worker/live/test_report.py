"""What a pair tells about itself at its end."""

from __future__ import annotations

import time

import pytest

from services.worker.core.live.life import PairState
from services.worker.live.report import BUCKET_S, MAX_BATCHES, MAX_BUCKETS, PairRecord, Timeline
from shared.messages.codec import decode, encode
from shared.messages.live import LayerRuns, LiveReport
from tests.services.worker.live.members import NUM_LAYERS, assignment, batch_of, request

START_S = 1_000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the monotonic clock shows."""
    now_s = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def timelines() -> tuple[Timeline, Timeline]:
    """Of layers and of tokens."""
    return Timeline(10.0), Timeline(10.0)


def done(record: PairRecord, batch_id: str, first_layer: int, at_s: float) -> None:
    batch = batch_of(batch_id, request(f"{batch_id}1", 4), request(f"{batch_id}2", 5))
    record.done(batch, first_layer=first_layer, num_layers=NUM_LAYERS, at_s=at_s)


def test_each_batch_says_who_ran_how_much_of_it(clock: list[float]) -> None:
    record = PairRecord(assignment())
    clock[0] = 30.0
    for number, (batch_id, first_layer) in enumerate([("a", 0), ("b", 3), ("c", 4), ("d", 1)]):
        done(record, batch_id, first_layer, 20.0 + number)
    report = record.report(PairState.DISSOLVED, "", *timelines())
    assert [(b.batch_id, b.target_layers, b.source_layers) for b in report.batches] == [
        ("a", 0, 4),
        ("b", 3, 1),
        ("c", 4, 0),
        ("d", 1, 3),
    ]
    assert {(b.num_requests, b.num_tokens) for b in report.batches} == {(2, 9)}
    assert [b.first_token_ago_s for b in report.batches] == [10.0, 9.0, 8.0, 7.0]
    assert report.first_cooperative_token_ago_s == 9.0, "the first of which both ran layers"
    assert report.started_ago_s == 20.0


def test_without_a_split_batch_there_is_no_cooperative_token() -> None:
    record = PairRecord(assignment())
    done(record, "a", 0, 20.0)
    done(record, "c", 4, 21.0)
    assert record.report(PairState.DISSOLVED, "", *timelines()).first_cooperative_token_ago_s is None


def test_a_full_report_is_smaller_than_a_message_may_be() -> None:
    record = PairRecord(assignment())
    layers, tokens = timelines()
    for timeline in (layers, tokens):
        timeline.add(1e9, 1 << 20)
    record.target_ran(layers.runs())
    for _ in range(MAX_BATCHES):
        done(record, "a-plan-of-some-length/instance/123456", 3, START_S)
    assert len(encode(record.report(PairState.DISSOLVED, "why", layers, tokens))) < 1 << 19


@pytest.mark.parametrize(("state", "outcome"), [(PairState.DISSOLVED, "dissolved"), (PairState.FAILED, "failed")])
def test_the_end_is_told(state: PairState, outcome: str) -> None:
    record = PairRecord(assignment(policy="best_effort"))
    report = record.report(state, "why", *timelines())
    assert (report.outcome, report.reason, report.policy) == (outcome, "why", "best_effort")
    assert (report.pair_id, report.plan_id, report.source, report.target) == ("pair", "plan", "w0", "w1")


@pytest.mark.parametrize("wall_s", [-30.0, 0.0, 30.0])
def test_the_timelines_of_both_members_travel_with_it_whatever_their_wall_clocks_say(
    clock: list[float], wall_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, (layers, tokens) = PairRecord(assignment()), timelines()
    layers.add(10.0, 3)
    tokens.add(10.0, 2)
    clock[0] = 14.0
    record.target_ran(LayerRuns(started_ago_s=3.0, bucket_s=0.05, counts=(1, 2)))
    monkeypatch.setattr(time, "time", lambda: 1e9 + wall_s)
    clock[0] = 15.0
    report = record.report(PairState.DISSOLVED, "", layers, tokens)
    assert report.source_runs is not None
    assert report.tokens is not None
    assert (report.source_runs.counts, report.tokens.counts) == ((3,), (2,))
    assert report.target_runs == LayerRuns(started_ago_s=4.0, bucket_s=0.05, counts=(1, 2))
    assert (report.source_runs.started_ago_s, report.started_ago_s) == (5.0, 5.0)
    assert decode(encode(report), LiveReport) == report


# --- counts over time ----------------------------------------------------------------------------


def test_counts_fall_into_their_stretch_of_time(clock: list[float]) -> None:
    timeline = Timeline(START_S)
    timeline.add(START_S)
    timeline.add(START_S + 0.9 * BUCKET_S, 3)
    timeline.add(START_S + 3.5 * BUCKET_S)
    clock[0] = START_S + 2.0
    runs = timeline.runs()
    assert (runs.started_ago_s, runs.bucket_s, runs.counts) == (2.0, BUCKET_S, (4, 0, 0, 1))
    assert timeline.total == 5


def test_nothing_is_an_empty_record() -> None:
    assert Timeline(START_S).runs().counts == ()
    assert Timeline(START_S).total == 0


def test_what_was_before_the_beginning_counts_into_the_first() -> None:
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


def test_while_the_pair_runs_only_what_is_new_is_told() -> None:
    record = PairRecord(assignment())
    assert record.news() is None
    done(record, "a", 0, 9.0)
    done(record, "b", 3, 9.5)
    news = record.news()
    assert news is not None
    assert (news.outcome, [b.batch_id for b in news.batches]) == ("running", ["a", "b"])
    assert news.first_cooperative_token_ago_s == 0.5
    assert record.news() is None
    done(record, "c", 1, 10.0)
    news = record.news()
    assert news is not None
    assert [b.batch_id for b in news.batches] == ["c"]
    assert len(record.report(PairState.DISSOLVED, "", *timelines()).batches) == 3
