from __future__ import annotations

import gc

from services.gateway.core.fair_queue import FairQueue, QueuedRequest
from tests.services.gateway.core.routing import stream


def waiting(*rows: tuple[str, str]) -> FairQueue:
    """A queue of (name, key), in order of arrival."""
    queue = FairQueue()
    for sequence, (name, key) in enumerate(rows):
        queue.push(QueuedRequest(sequence, stream(name, key=key), deadline_s=10.0 + sequence))
    return queue


def taken(queue: FairQueue) -> str:
    order = ""
    while (item := queue.head()) is not None:
        queue.take(item)
        order += item.stream.request_id
    return order


def test_without_keys_it_is_first_come_first_served() -> None:
    assert taken(waiting(*((name, "") for name in "abcd"))) == "abcd"


def test_keys_take_turns_and_each_is_first_come_first_served() -> None:
    queue = waiting(("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"), ("e", "y"), ("f", ""))
    assert taken(queue) == "adfbec"
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_a_key_that_comes_later_waits_one_turn_at_most() -> None:
    queue = waiting(*((name, "x") for name in "abc"))
    first = queue.head()
    assert first is not None
    queue.take(first)
    queue.push(QueuedRequest(9, stream("d", key="y"), 10.0))
    assert taken(queue) == "bdc"


def test_a_request_that_comes_back_has_the_next_turn_and_its_place() -> None:
    queue = waiting(("a", "x"), ("b", "x"), ("c", "y"))
    first = queue.head()
    assert first is not None
    queue.take(first)
    queue.push(QueuedRequest(first.sequence, first.stream, 10.0), back=True)
    assert taken(queue) == "acb"


def by_priority(*rows: tuple[str, str, int]) -> FairQueue:
    """A queue of (name, key, priority), in order of arrival."""
    queue = FairQueue()
    for sequence, (name, key, priority) in enumerate(rows):
        queue.push(QueuedRequest(sequence, stream(name, key=key, priority=priority), deadline_s=10.0))
    return queue


def test_of_one_key_the_lowest_priority_goes_first_and_of_one_priority_the_first_that_came() -> None:
    rows = (("a", "x", 0), ("b", "x", -1), ("c", "x", 5), ("d", "x", -1), ("e", "x", 0), ("f", "x", -(2**63)))
    assert taken(by_priority(*rows)) == "fbdaec"


def test_a_priority_gains_no_turn_over_another_key() -> None:
    rows = (("a", "x", 9), ("b", "y", 0), ("c", "z", -9), ("d", "y", -9), ("e", "x", 0))
    assert taken(by_priority(*rows)) == "edcab"


def test_a_request_that_comes_back_has_the_place_of_its_priority() -> None:
    queue = by_priority(("a", "x", 1), ("b", "x", 1), ("c", "y", 0))
    first = queue.head()
    assert first is not None
    queue.take(first)
    queue.push(QueuedRequest(7, stream("d", key="x", priority=0), 10.0))
    queue.push(QueuedRequest(8, stream("e", key="x", priority=1), 10.0))
    queue.push(QueuedRequest(first.sequence, first.stream, 10.0), back=True)
    assert taken(queue) == "dcabe"


def test_what_was_set_aside_has_the_place_of_its_priority() -> None:
    queue = by_priority(("a", "", 1), ("b", "", 1), ("c", "", 0), ("d", "", 2))
    for _ in range(2):
        item = queue.head()
        assert item is not None
        queue.set_aside(item)
    queue.bring_back()
    assert taken(queue) == "cabd"


def test_what_is_set_aside_lets_the_others_pass_and_keeps_its_place() -> None:
    queue = waiting(("a", ""), ("b", ""), ("c", ""))
    first = queue.head()
    assert first is not None
    queue.set_aside(first)
    second = queue.head()
    assert second is not None
    assert second.stream.request_id == "b"
    assert len(queue) == 3
    queue.bring_back()
    assert taken(queue) == "abc"


def test_what_is_set_aside_can_end() -> None:
    queue = waiting(("a", ""), ("b", ""))
    for _ in range(2):
        item = queue.head()
        assert item is not None
        queue.set_aside(item)
    assert queue.head() is None
    assert queue.remove("b")
    assert [item.stream.request_id for item in queue.expired(10.0)] == ["a"]
    assert (len(queue), queue.num_tokens) == (0, 0)
    queue.bring_back()
    assert queue.head() is None


def test_whoever_is_past_its_deadline_leaves_and_nobody_else() -> None:
    queue = waiting(("a", "x"), ("b", "y"), ("c", "x"))
    assert queue.remove("a")
    assert not queue.remove("a")
    assert [item.stream.request_id for item in queue.expired(11.0)] == ["b"]
    assert queue.num_waiting("x") == 1
    assert queue.num_waiting("y") == 0
    assert [item.stream.request_id for item in queue.clear()] == ["c"]


def test_what_left_from_the_middle_is_not_kept() -> None:
    queue = FairQueue()
    for index in range(1000):
        queue.push(QueuedRequest(index, stream(str(index)), 10.0))
    for index in range(1, 1000):
        assert queue.remove(str(index))
    gc.collect()
    assert sum(type(held) is QueuedRequest for held in gc.get_objects()) < 100
    assert taken(queue) == "0"
