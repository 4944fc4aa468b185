"""What a reader makes of a gateway's feed, beside the gateway's own state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compose.feed import MAX_EVENT_BYTES, Event, EventSplitter, FeedBroken, ShownState
from services.gateway.core.feed import FeedEntities

KINDS = ("cluster", "model", "worker", "load")
MODEL = {"name": "demo", "layers": 8, "bytes": 100, "hash": "f103", "max": 1_000_000, "states": {"prefill live": 1}}


def event(data: Any, kind: str = "frame") -> Event:
    return Event(kind, "run-1", json.dumps(data).encode())


def test_a_reader_follows_the_gateway_from_whichever_piece_of_bytes() -> None:
    gateway, splitter, feed = FeedEntities("run"), EventSplitter(), ShownState()
    states: list[dict[str, Any]] = [
        {"model/demo": MODEL, "worker/w-0": {"id": "w-0", "state": "spare"}, "cluster/now": {"workers": 1}},
        {"model/demo": MODEL, "worker/w-0": {"id": "w-0", "state": "loading", "model": "demo", "later": [1]}},
        {"worker/w-1": {"id": "w-1"}, "load/p/w-1": {"plan": "p", "worker": "w-1", "bytes": 10**9, "after_s": 4.0}},
    ]
    seen: int | None = None
    for state in states:
        gateway.put(0.0, state, kinds=KINDS)
        seen, events = gateway.since(seen)
        for byte in b": alive\n\n" + b"".join(events):
            for each in splitter.feed(bytes([byte])):
                feed.take(each)
        assert json.loads(feed.as_json())["entities"] == state, "also what this reader knows nothing of"
        assert gateway.last_seen(feed.last_id) == seen
    assert [worker.id for worker in feed.workers] == ["w-1"]
    assert feed.loads("p")["w-1"].gbps == 2.0
    assert not feed.loads("other")


@pytest.mark.parametrize(
    "broken",
    [
        Event("frame", "run-2", b"{"),
        event([]),
        event({"changed": {"model/demo": {"name": 7}}}),
        event({"changed": {"model/demo": "demo"}}),
        event({"entities": {"operation/p": {"plan_id": "p"}}}, "snapshot"),
        event({"changed": {"other/x": "x" * (17 << 20)}}),
    ],
)
def test_what_is_no_feed_is_refused_and_changes_nothing(broken: Event) -> None:
    feed = ShownState()
    assert feed.take(event({"entities": {"model/demo": MODEL}}, "snapshot"))
    before = feed.as_json()
    with pytest.raises(FeedBroken):
        feed.take(broken)
    assert feed.as_json() == before


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    splitter = EventSplitter()
    for _ in range(MAX_EVENT_BYTES >> 20):
        assert not list(splitter.feed(b"x" * (1 << 20)))
    with pytest.raises(FeedBroken, match="more than 32 MiB"):
        list(splitter.feed(b"x"))


def test_an_id_that_cannot_stand_in_a_header_is_none() -> None:
    (found,) = EventSplitter().feed(b"event: frame\nid: a\rb\x00\ndata: {}\n\n")
    assert found == Event("frame", "", b"{}")
