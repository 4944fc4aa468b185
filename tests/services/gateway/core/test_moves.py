"""Requests that move, as gateways tell each other, and as readers of the feed see them."""

from __future__ import annotations

from services.gateway.core.latencies import MAX_MODELS, LatencyReports
from services.gateway.core.moves import MAX_NAME, MAX_WAYS, SLOT_S, WINDOW_S, MoveCounts, RecentMoves
from shared.messages.load import LatencyReport, MovedRequests


def report(*ways: tuple[str, str, str, int]) -> LatencyReport:
    moves = tuple(MovedRequests(model=m, source=s, target=t, requests=number) for m, s, t, number in ways)
    return LatencyReport(gateway_id="gw", models=(), moves=moves)


def test_only_what_is_new_is_told() -> None:
    counts = MoveCounts()
    counts.moved("m", "a", "b")
    counts.moved("m", "a", "b")
    counts.moved("m", "b", "c")
    assert {(move.source, move.target, move.requests) for move in counts.take()} == {("a", "b", 2), ("b", "c", 1)}
    assert counts.take() == ()


def test_what_one_gateway_tells_is_bounded() -> None:
    counts = MoveCounts()
    for number in range(MAX_WAYS + 10):
        counts.moved("m", "a", f"w{number}")
    counts.moved("m", "a", "w0")
    told = counts.take()
    assert len(told) == MAX_WAYS
    assert told[0].requests == 2


def test_moves_go_with_one_report_of_a_second_and_alone_where_no_token_came() -> None:
    moves = report(("m", "a", "b", 1)).moves
    models = [(f"m{number}", 1, [1], [0]) for number in range(MAX_MODELS + 1)]
    assert [told.moves for told in LatencyReports("gw").reports(models, moves)] == [moves, ()]
    assert [(told.models, told.moves) for told in LatencyReports("gw").reports([], moves)] == [((), moves)]
    assert list(LatencyReports("gw").reports([], ())) == []


def test_what_all_gateways_say_adds_up_and_is_forgotten() -> None:
    recent = RecentMoves()
    recent.take(report(("m", "a", "b", 2), ("m", "a", "c", 1)), now_s=0.0)
    recent.take(report(("m", "a", "b", 3)), now_s=SLOT_S / 2)
    recent.take(report(("m", "a", "b", 7)), now_s=2 * SLOT_S)
    assert set(recent.ways(2 * SLOT_S)) == {("m", "a", "b", 12), ("m", "a", "c", 1)}
    assert list(recent.ways(WINDOW_S)) == [("m", "a", "b", 7)]
    assert list(recent.ways(2 * SLOT_S + WINDOW_S)) == []


def test_what_others_say_is_bounded() -> None:
    recent = RecentMoves()
    for number in range(3):
        ways = [("m" * 1000, "a", f"{number}-{each}", 1) for each in range(MAX_WAYS + 10)]
        recent.take(report(*ways), now_s=0.0)
    shown = list(recent.ways(0.0))
    assert len(shown) == MAX_WAYS
    assert {len(model) for model, *_ in shown} == {MAX_NAME}
    assert all(target.startswith("2-") for _, _, target, _ in shown), "those that were heard of last"
