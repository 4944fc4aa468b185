"""The state that readers of the feed see, and how they come to it."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.core.feed import FeedEntities


def events(found: list[bytes]) -> list[tuple[str, str, Any]]:
    """Kind, id and data of each."""
    rows = []
    for event in found:
        assert event.endswith(b"\n\n")
        kind, number, data = event.decode().strip().split("\n")
        rows.append(
            (kind.removeprefix("event: "), number.removeprefix("id: "), json.loads(data.removeprefix("data: ")))
        )
    return rows


def put(state: FeedEntities, **found: Any) -> bool:
    return state.put(0.0, {f"a/{name}": value for name, value in found.items()}, kinds=["a"])


def test_a_new_reader_gets_everything_and_then_what_changes() -> None:
    state = FeedEntities("run")
    assert put(state, x=1, y={"b": 2})
    sequence, (snapshot,) = state.since(None)
    assert events([snapshot]) == [("snapshot", "run-1", {"entities": {"a/x": 1, "a/y": {"b": 2}}, "is_cut": False})]
    assert not put(state, x=1, y={"b": 2})
    assert state.since(sequence) == (1, [])
    assert put(state, x=3)
    assert put(state, x=3, z=4)
    sequence, found = state.since(sequence)
    assert sequence == 3
    assert events(found) == [
        ("frame", "run-2", {"at_s": 0.0, "changed": {"a/x": 3}, "gone": ["a/y"], "is_cut": False}),
        ("frame", "run-3", {"at_s": 0.0, "changed": {"a/z": 4}, "gone": [], "is_cut": False}),
    ]


def test_only_the_kinds_that_were_looked_at_lose_entities() -> None:
    state = FeedEntities("run")
    state.put(0.0, {"a/x": 1, "b/y": 2}, kinds=["a", "b"])
    state.put(0.0, {}, kinds=["a"])
    assert events(state.since(None)[1])[0][2]["entities"] == {"b/y": 2}


def test_a_reader_that_comes_back_goes_on_if_what_it_missed_is_kept() -> None:
    state = FeedEntities("run", ring_bytes=400)
    for number in range(20):
        put(state, x=number)
    seen = state.last_seen("run-18")
    assert seen == 18
    assert [row[0] for row in events(state.since(seen)[1])] == ["frame", "frame"]
    # What it saw is too old, of another process, or of the future: it gets everything.
    for event_id in ("run-2", "other-19", "run-99", "", "run-", "run-x", f"run-{'9' * 30}"):
        rows = events(state.since(state.last_seen(event_id))[1])
        assert [(kind, number) for kind, number, _ in rows] == [("snapshot", "run-20")], event_id


def test_frames_are_kept_within_their_bytes() -> None:
    state = FeedEntities("run", ring_bytes=10_000)
    for number in range(10_000):
        put(state, x="x" * 50 + str(number))
    _, found = state.since(9_990)
    assert len(found) == 10
    assert len(state.since(9_000)[1]) == 1, "a snapshot: so much is not kept"


def test_that_something_does_not_fit_is_said_where_nothing_else_changes() -> None:
    state = FeedEntities("run", state_bytes=100)
    put(state, small=1)
    sequence, _ = state.since(None)
    assert put(state, small=1, large="x" * 200)
    assert not put(state, small=1, large="x" * 200)
    sequence, (frame,) = state.since(sequence)
    assert events([frame])[0][2] == {"at_s": 0.0, "changed": {}, "gone": [], "is_cut": True}
    assert events(state.since(None)[1])[0][2]["is_cut"]
    assert put(state, small=1)
    assert not events(state.since(sequence)[1])[0][2]["is_cut"]


def test_what_does_not_fit_is_left_out_and_that_is_said() -> None:
    state = FeedEntities("run", state_bytes=100)
    put(state, small=1, large="x" * 200)
    (_, _, data) = events(state.since(None)[1])[0]
    assert data == {"entities": {"a/small": 1}, "is_cut": True}
    put(state, small=2, large=3)
    assert events(state.since(None)[1])[0][2] == {"entities": {"a/small": 2, "a/large": 3}, "is_cut": False}
    put(state, small=2, large="x" * 200)
    (_, _, data) = events(state.since(2)[1])[0]
    assert (data["gone"], data["is_cut"]) == (["a/large"], True), "rather nothing than what was"


def test_names_and_texts_cannot_end_an_event() -> None:
    state = FeedEntities("run")
    put(state, x="a\n\nevent: fake\ndata: {}\n\n\u2028\r")
    (_, _, data) = events(state.since(None)[1])[0]
    assert data["entities"]["a/x"] == "a\n\nevent: fake\ndata: {}\n\n\u2028\r"


def test_after_everything_was_forgotten_nobody_keeps_what_is_gone() -> None:
    state = FeedEntities("run")
    put(state, x=1, y=2)
    sequence, _ = state.since(None)
    state.clear()
    assert state.is_empty
    put(state, x=1)
    _, (event,) = state.since(sequence)
    assert events([event]) == [("snapshot", "run-3", {"entities": {"a/x": 1}, "is_cut": False})]
