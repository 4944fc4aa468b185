"""Requests that another worker took over."""

from __future__ import annotations

from services.worker.requests.streams import MOVED_KEEP_S, NewOwners
from tests.processes import process


def test_an_owner_is_known_by_request_and_attempt() -> None:
    moved = NewOwners()
    moved.add([("r", 1), ("s", 1)], process("w1"), 0.0)
    assert moved.owner_of(("r", 1)) == process("w1")
    assert moved.owner_of(("r", 2)) is None
    assert moved.owner_of(("t", 1)) is None
    assert len(moved) == 2


def test_the_latest_owner_counts() -> None:
    moved = NewOwners()
    moved.add([("r", 1)], process("w1"), 0.0)
    moved.add([("r", 1)], process("w2"), 1.0)
    assert moved.owner_of(("r", 1)) == process("w2")
    moved.expire(MOVED_KEEP_S + 1.0)
    assert moved.owner_of(("r", 1)) == process("w2"), "its time runs from the latest move"


def test_owners_of_long_ago_are_forgotten_and_no_others() -> None:
    moved = NewOwners()
    moved.add([("old", 1)], process("w1"), 0.0)
    moved.add([("new", 1)], process("w1"), 10.0)
    moved.expire(MOVED_KEEP_S)
    assert len(moved) == 2
    moved.expire(MOVED_KEEP_S + 0.1)
    assert moved.owner_of(("old", 1)) is None
    assert moved.owner_of(("new", 1)) == process("w1")
    moved.expire(1e9)
    assert len(moved) == 0


def test_nothing_moved_is_nothing_known() -> None:
    moved = NewOwners()
    moved.add([], process("w1"), 0.0)
    moved.expire(0.0)
    assert len(moved) == 0
