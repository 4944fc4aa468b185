"""Which requests leave an instance, and how."""

from __future__ import annotations

from collections.abc import Iterable

from services.worker.core.scheduling import leaving
from services.worker.core.scheduling.leaving import (
    REFUSED_S,
    KvPath,
    Moving,
    Takers,
    see_off,
    to_hand_back,
    to_make_room,
    to_move,
    to_send_back,
)
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.speed import Speed
from shared.errors import SentBack
from shared.messages.common import ErrorInfo
from shared.messages.destinations import Destination, SendBack
from tests.processes import INCARNATION
from tests.services.worker.core.scheduling.harness import config, held, names, request, step

QUICK = KvPath(bytes_per_token=1000, bytes_per_s=1e9)
SPEED = Speed(prefill_tokens_per_s=1000.0, decode_base_s=0.01, decode_request_s=0.001)


def running(*sequences: ActiveSequence, **changes: int) -> Scheduler:
    """Their prompts are computed."""
    return _added(sequences, **changes)


def _added(sequences: Iterable[ActiveSequence], **changes: int) -> Scheduler:
    scheduler = Scheduler(config(**changes))
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler)
    return scheduler


def test_what_has_much_to_say_moves_and_what_has_little_stays() -> None:
    scheduler = running(request("much", max_tokens=100), request("little", max_tokens=2))
    assert names(to_move(scheduler, SPEED, QUICK)) == ["much"]
    assert names(to_move(scheduler, Speed(), QUICK)) == ["much", "little"], "nothing is known of the steps"


def test_a_long_context_moves_only_if_that_is_quicker_than_to_end() -> None:
    scheduler = running(request("long", 40, max_tokens=100), request("short", 4, max_tokens=100))
    slow = KvPath(bytes_per_token=1000, bytes_per_s=1000 * 40 / 3)
    assert names(to_move(scheduler, SPEED, slow)) == ["short"]


def test_an_unbounded_answer_counts_up_to_what_is_expected() -> None:
    scheduler = running(request("a", 40, max_tokens=3000), num_blocks=1000)
    step_s = SPEED.decode_base_s + SPEED.decode_request_s
    just_too_long_s = leaving.EXPECTED_TOKENS * step_s
    slow = KvPath(bytes_per_token=1, bytes_per_s=40 / just_too_long_s)
    assert to_move(scheduler, SPEED, slow) == []


def test_prompts_and_requests_computed_alone_do_not_move() -> None:
    suspect = request("alone", max_tokens=50)
    suspect.alone_tokens = 17
    scheduler = Scheduler(config(prefill_chunk_tokens=4))
    for sequence in (request("decodes", 4, 50), request("prompt", 20, 50), suspect):
        scheduler.add(sequence)
    for _ in range(6):
        step(scheduler)
        moved = names(to_move(scheduler, SPEED, QUICK))
        assert set(moved) <= {"decodes", "prompt"}
        assert "prompt" not in moved or scheduler.table.running[1].decodes


def test_what_waits_goes_back_and_a_prompt_that_is_nearly_computed_stays() -> None:
    scheduler = Scheduler(config(prefill_chunk_tokens=4, max_num_sequences=2, max_batch_tokens=8))
    for sequence in (request("short", 12, 50), request("long", 100, 50), request("waits", 5, 50)):
        scheduler.add(sequence)
    step(scheduler)
    slow = Speed(prefill_tokens_per_s=50.0)
    assert names(to_send_back(scheduler, slow)) == ["long", "waits"]
    assert names(to_send_back(scheduler, SPEED)) == ["waits"]
    assert names(to_send_back(scheduler, Speed())) == ["short", "long", "waits"]
    assert names(to_hand_back(scheduler)) == ["short", "long", "waits"]


def test_what_a_pair_shares_is_left_to_it() -> None:
    scheduler = Scheduler(config(max_num_sequences=1))
    for name in ("runs", "waits"):
        scheduler.add(request(name, max_tokens=50))
    step(scheduler)
    scheduler.table.lending = True
    assert to_send_back(scheduler, SPEED) == []
    assert names(to_hand_back(scheduler)) == ["runs"]


def test_what_has_a_slot_outside_of_steps_stays_where_it_is() -> None:
    leaves = request("leaves", max_tokens=50)
    scheduler = held(leaves)
    assert scheduler.reservations.hold_to_move(leaves)
    assert to_move(scheduler, SPEED, QUICK) == to_send_back(scheduler, SPEED) == to_hand_back(scheduler) == []
    scheduler.reservations.decode_here(leaves)
    assert names(to_move(scheduler, SPEED, QUICK)) == ["leaves"]


def destination(name: str, kv_tokens: int) -> Destination:
    return Destination(worker_id=f"w-{name}", incarnation=INCARNATION, instance_id=name, kv_tokens=kv_tokens)


def test_requests_spread_by_what_each_taker_can_still_be_given() -> None:
    takers = Takers([destination("a", 100), destination("b", 70)])
    taken = [takers.take(30, 0.0) for _ in range(6)]
    assert [t.instance_id for t in taken if t] == ["a", "b", "a", "b", "a", "b"]


def test_a_taker_that_refused_gets_nothing_for_a_while_and_what_it_did_not_take_is_left_to_give() -> None:
    takers = Takers([destination("a", 100), destination("b", 10)])
    first = takers.take(50, 0.0)
    assert first is not None
    takers.refused(first, 0.0)
    takers.kept(first, 50)
    second = takers.take(50, 0.0)
    assert second is not None
    assert second.instance_id == "b"
    takers.refused(second, 0.0)
    assert takers.take(50, REFUSED_S - 0.1) is None
    assert takers.take(100, REFUSED_S) is first


def test_an_order_to_move_some_is_not_exceeded() -> None:
    takers = Takers([destination("a", 100)])
    assert takers.take(60, 0.0, at_most=True) is not None
    assert takers.take(60, 0.0, at_most=True) is None
    assert takers.take(40, 0.0, at_most=True) is not None
    assert not Takers([])


def making_room(blocks: Iterable[int], lacking: int, *takers: Destination) -> list[int]:
    """The blocks of those that move, of requests that hold so many; a block has four tokens."""
    movable = [Moving(request(f"r{i}"), 4 * held, range(held), held) for i, held in enumerate(blocks)]
    return [len(moving.block_table) for moving in to_make_room(movable, lacking, Takers(takers))]


def test_room_is_made_by_the_smallest_request_that_suffices() -> None:
    big = destination("a", 1000)
    assert making_room([9, 3, 5, 4], 4, big) == [4]
    assert making_room([9, 3, 5, 4], 9, big) == [9]
    assert making_room([9, 3, 5, 4], 12, big) == [9, 3]
    assert making_room([9, 3, 5, 4], 20, big) == [9, 5, 4, 3]
    assert making_room([9, 3, 5, 4], 0, big) == []


def test_room_is_made_as_a_whole_or_not_at_all() -> None:
    assert making_room([9, 3], 13, destination("a", 1000)) == []
    assert making_room([9, 3], 5, destination("a", 35)) == [], "the large one does not fit there"
    assert making_room([9, 3, 3], 5, destination("a", 24)) == [3, 3]
    assert making_room([5, 5], 8, destination("a", 20), destination("b", 20)) == [5, 5]
    assert making_room([5, 5], 8, destination("a", 39)) == []


def test_what_others_share_is_not_freed() -> None:
    movable = [Moving(request(f"r{i}"), 40, range(10), frees) for i, frees in enumerate((1, 2, 8))]
    found = to_make_room(movable, 3, Takers([destination("a", 1000)]))
    assert [moving.frees for moving in found] == [8]


def test_what_is_seen_off_goes_back_with_a_reason_and_the_rest_may_move() -> None:
    goes = ErrorInfo.of(SentBack("it goes", retry_after_s=0.0))
    cases: list[tuple[SendBack, list[str], list[str]]] = [
        ("none", [], ["a"]),
        ("waiting", ["b"], ["a"]),
        ("all", ["a", "b"], []),
    ]
    for send_back, back, stays in cases:
        scheduler = running(request("a", max_tokens=100), request("b", max_tokens=100), max_num_sequences=1)
        found = see_off(scheduler, QUICK, send_back, goes)
        assert sorted(part.request_id for part in scheduler.take_ended() if part.error == goes) == back
        assert [moving.sequence.request_id for moving in found] == stays
        assert all(moving.num_tokens == moving.sequence.num_computed for moving in found)
