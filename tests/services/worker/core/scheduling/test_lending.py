"""The scheduler of a member of a pair: requests that are lent, reserved and adopted."""

from __future__ import annotations

import pytest

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.schedule import Sampled, ScheduledBatch
from services.worker.core.scheduling.scheduler import Scheduler
from shared.errors import Conflict
from tests.services.worker.core.scheduling.harness import (
    ERROR,
    config,
    in_batch,
    lending,
    names,
    request,
    sampled,
    step,
)


def test_what_has_not_begun_is_lent_in_order_and_nothing_of_it_is_admitted() -> None:
    scheduler = lending(*(request(name) for name in "abc"))
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    lent = scheduler.lend()
    assert names(lent) == ["a", "b", "c"]
    assert scheduler.lend() == []
    assert scheduler.num_requests == 3
    assert scheduler.schedule() is None


def test_what_runs_goes_on_while_the_queue_is_lent() -> None:
    scheduler = Scheduler(config(max_num_sequences=1, prefill_chunk_tokens=2))
    scheduler.add(request("runs"))
    step(scheduler)
    scheduler.add(request("waits"))
    scheduler.table.lending = True
    assert scheduler.has_prefill
    assert not scheduler.has_decodes
    assert names(scheduler.lend()) == ["waits"]
    assert in_batch(scheduler) == ["runs"]
    assert in_batch(scheduler) == ["runs"]
    assert not scheduler.has_prefill
    assert scheduler.has_decodes
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_requests == 1
    assert scheduler.pool.num_used == 0


def test_what_is_added_to_a_lent_queue_waits_for_the_next_lend() -> None:
    scheduler = lending(request("a"))
    scheduler.lend()
    scheduler.add(request("b"))
    assert not scheduler.has_work
    assert names(scheduler.lend()) == ["b"]


def test_an_attempt_that_is_lent_is_here_already() -> None:
    scheduler = lending(request("a"))
    scheduler.lend()
    with pytest.raises(Conflict):
        scheduler.add(request("a"))


def test_what_comes_back_waits_at_its_old_place() -> None:
    scheduler = lending(*(request(name) for name in "abc"))
    a, b, c = scheduler.lend()
    scheduler.add(request("d"))
    scheduler.take_back([c, a])
    scheduler.take_back([b])
    scheduler.table.lending = False
    scheduler.check()
    assert in_batch(scheduler) == ["a", "b", "c", "d"]


def test_what_was_cancelled_does_not_come_back() -> None:
    scheduler = lending(request("a"), request("b"))
    lent = scheduler.lend()
    cancelled = scheduler.cancel("a", 0)
    assert cancelled is lent[0]
    assert [(o.request_id, o.finish_reason) for o in scheduler.take_ended()] == [("a", "cancelled")]
    assert scheduler.cancel("a", 0) is None
    scheduler.take_back(lent)
    scheduler.table.lending = False
    scheduler.check()
    assert in_batch(scheduler) == ["b"]


def test_a_gateways_lent_requests_end_with_it() -> None:
    scheduler = lending(request("a", gateway="x"), request("b"), request("c", gateway="x"))
    held, *_ = scheduler.lend()
    scheduler.reservations.reserve([held])
    assert sorted(names(scheduler.cancel_gateway(Gone("x", "")))) == ["a", "c"]
    assert scheduler.num_requests == 1
    scheduler.reservations.release([held])
    assert scheduler.pool.num_used == 0


def test_a_preempted_request_is_not_lent_but_goes_on_here() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    early, late = request("a", 7, 8), request("b", 7, 8)
    scheduler.add(early)
    scheduler.add(late)
    while not late.num_emitted or late.block_table:
        step(scheduler)
    assert late.num_emitted, "it was preempted while it decoded"
    scheduler.add(request("c"))
    scheduler.table.lending = True
    assert names(scheduler.lend()) == ["c"]
    while scheduler.has_work:
        step(scheduler)
    assert late.finished
    assert len(late.output) == 8
    assert scheduler.num_requests == 1


def test_a_preempted_request_at_the_head_does_not_let_lent_ones_in() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    late = request("b", 7, 8)
    for sequence in (request("a", 7, 8), late, request("c")):
        scheduler.add(sequence)
    while not late.num_emitted or late.block_table:
        step(scheduler)
    scheduler.table.lending = True  # nobody has lent yet: ``c`` waits behind ``b``
    began: set[str] = set()
    while scheduler.has_work:
        began.update(in_batch(scheduler))
    assert began == {"a", "b"}


def test_reserving_is_all_or_nothing() -> None:
    scheduler = lending(request("a", 8), request("b", 8), num_blocks=3)
    lent = scheduler.lend()
    assert not scheduler.reservations.reserve(lent), "four blocks of three"
    assert scheduler.pool.num_used == 0
    assert [s.block_table for s in lent] == [[], []]
    assert scheduler.reservations.reserve(lent[:1])
    assert len(lent[0].block_table) == 2
    assert not scheduler.reservations.reserve(lent[1:])


def test_reserved_requests_have_seats() -> None:
    scheduler = Scheduler(config(max_num_sequences=2))
    scheduler.add(request("runs", max_tokens=9))
    step(scheduler)
    scheduler.table.lending = True
    for name in "ab":
        scheduler.add(request(name))
    a, b = scheduler.lend()
    assert not scheduler.reservations.reserve([a, b])
    assert scheduler.reservations.reserve([a])
    scheduler.take_back([b])
    scheduler.table.lending = False
    assert in_batch(scheduler) == ["runs"], "both seats are taken"
    scheduler.reservations.release([a])
    assert in_batch(scheduler) == ["runs", "b"]


def test_an_adopted_request_decodes_here_and_its_blocks_are_freed_once() -> None:
    scheduler = lending(request("a", max_tokens=3))
    (a,) = scheduler.lend()
    assert scheduler.reservations.reserve([a])
    output = scheduler.reservations.adopt(a, sampled(a), now_s=7.0)
    assert output is not None
    assert (output.offset, len(output.token_ids), output.queued_s) == (0, 1, 7.0)
    scheduler.reservations.release([a])  # it is not held any more: this changes nothing
    assert a.block_table
    outputs = [o for _ in range(2) for o in step(scheduler)]
    assert [(o.offset, o.finish_reason) for o in outputs] == [(1, None), (2, "length")]
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work


def test_a_request_whose_first_token_is_its_last_is_not_left_behind() -> None:
    scheduler = lending(request("a", max_tokens=1))
    (a,) = scheduler.lend()
    scheduler.reservations.reserve([a])
    output = scheduler.reservations.adopt(a, sampled(a))
    assert output is not None
    assert output.finish_reason == "length"
    assert scheduler.pool.num_used == scheduler.num_requests == 0
    assert not scheduler.has_work


def test_a_first_token_that_could_not_be_sampled_ends_the_request() -> None:
    scheduler = lending(request("a"))
    (a,) = scheduler.lend()
    scheduler.reservations.reserve([a])
    output = scheduler.reservations.adopt(a, Sampled(0, error=ERROR))
    assert output is not None
    assert (output.finish_reason, output.error) == ("error", ERROR)
    assert scheduler.pool.num_used == scheduler.num_requests == 0


def test_another_instances_request_takes_its_place_in_the_order_of_arrival() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("before"))
    guest = request("guest")
    assert scheduler.reservations.reserve([guest])
    assert scheduler.num_requests == 1, "it is the other instance's so far"
    scheduler.add(request("after"))
    step(scheduler)
    scheduler.reservations.adopt(guest, sampled(guest))
    assert scheduler.num_requests == 3
    assert in_batch(scheduler) == ["before", "guest", "after"]


def test_a_guest_that_is_here_already_cannot_be_adopted() -> None:
    scheduler = Scheduler(config())
    guest = request("a")
    scheduler.reservations.reserve([guest])
    scheduler.add(request("a"))
    with pytest.raises(Conflict):
        scheduler.reservations.adopt(guest, sampled(guest))
    scheduler.reservations.release([guest])
    scheduler.check()


@pytest.mark.parametrize("when", ["lent", "reserved", "adopted", "in flight"])
def test_a_cancel_at_every_stage_ends_it_once_and_frees_it(when: str) -> None:
    scheduler = lending(request("a"), request("other"))
    lent = a, other = scheduler.lend()
    batch: ScheduledBatch | None = None
    if when != "lent":
        assert scheduler.reservations.reserve(lent)
    if when in {"adopted", "in flight"}:
        scheduler.reservations.adopt(a, sampled(a))
    if when == "in flight":
        batch = scheduler.schedule()
    assert scheduler.cancel("a", 0) is a
    assert [(o.request_id, o.finish_reason) for o in scheduler.take_ended()] == [("a", "cancelled")]
    if when == "reserved":
        assert a.block_table, "the engine may be writing there"
        assert scheduler.reservations.adopt(a, sampled(a)) is None
    if batch is not None:
        assert scheduler.table.landing_blocks, "the batch in flight writes there"
        assert scheduler.complete(batch, [sampled(a)]) == []
    assert a.block_table == []
    scheduler.reservations.release(lent)
    assert scheduler.pool.num_used == 0
    scheduler.take_back([a, other])
    scheduler.table.lending = False
    scheduler.check()
    assert scheduler.num_requests == 1
    assert scheduler.take_ended() == []


def test_requests_that_are_the_targets_leave_without_a_word() -> None:
    scheduler = lending(request("a"), request("b"), request("c"))
    a, b, _ = lent = scheduler.lend()
    scheduler.cancel("b", 0)
    scheduler.take_ended()
    scheduler.release_to_target([a, b])
    assert scheduler.num_requests == 1
    assert scheduler.take_ended() == []
    scheduler.take_back(lent)
    scheduler.table.lending = False
    scheduler.check()
    scheduler.add(request("a"))  # it may come again


def test_aborted_requests_end_with_the_error_those_that_had_not_ended() -> None:
    scheduler = lending(request("a"), request("b"))
    _a, _b = lent = scheduler.lend()
    scheduler.cancel("b", 0)
    scheduler.abort(lent, ERROR)
    ended = {o.request_id: (o.finish_reason, o.error) for o in scheduler.take_ended()}
    assert ended == {"a": ("error", ERROR), "b": ("cancelled", None)}
    assert scheduler.num_requests == 0


def test_the_load_counts_what_is_lent_and_held_as_queued() -> None:
    scheduler = lending(request("a", 6), request("b", 7), request("c", 8), max_num_sequences=2)
    before = scheduler.load()
    assert (before.queued_requests, before.queued_tokens, before.oldest_arrived_s) == (3, 21, 0.0)
    a, b, _c = scheduler.lend()
    assert scheduler.load() == before
    scheduler.reservations.reserve([b])
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.kv_blocks_used) == (3, 21, 2)
    scheduler.reservations.adopt(b, sampled(b))
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.running_requests, load.running_tokens) == (2, 14, 1, 7)
    assert load.prefill_tokens_total == 7
    scheduler.release_to_target([a])
    assert scheduler.load().oldest_arrived_s == 2.0
    scheduler.cancel("c", 0)
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.oldest_arrived_s) == (0, 0, None)


def test_guests_count_as_used_blocks_and_not_as_requests() -> None:
    scheduler = Scheduler(config())
    scheduler.reservations.reserve([request("guest", 8)])
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.running_requests, load.kv_blocks_used) == (0, 0, 0, 2)


@pytest.mark.parametrize("what_runs", [False, True])
def test_nothing_is_scheduled_while_what_is_held_leaves_no_room(what_runs: bool) -> None:
    scheduler = Scheduler(config(num_blocks=4))
    if what_runs:
        scheduler.add(request("a", 4, 9))
        step(scheduler)  # its next token needs a second block
    guest = request("guest", 16 - 8 * what_runs)
    assert scheduler.reservations.reserve([guest])  # a running request keeps a block to grow into
    if not what_runs:
        scheduler.add(request("a", 4))
    batch = scheduler.schedule()
    assert batch is None or batch.slices


def test_a_request_that_comes_back_runs_before_later_ones_that_were_adopted() -> None:
    scheduler = lending(request("a", 7, 8), request("b", 7, 8), num_blocks=4)
    a, b = scheduler.lend()
    scheduler.reservations.reserve([b])
    scheduler.reservations.adopt(b, sampled(b))
    scheduler.take_back([a])
    scheduler.table.lending = False
    preempted: list[str] = []
    while (batch := scheduler.schedule()) is not None:
        preempted += names(batch.preempted)
        scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])
    assert preempted == ["b"], "the latest arrival yields"


def test_a_preempted_prefill_does_not_hold_up_what_has_begun() -> None:
    scheduler = Scheduler(config(num_blocks=11, max_batch_tokens=12, prefill_chunk_tokens=2))
    first, long, late = request("first", 4, 30), request("long", 30, 2), request("late", 4, 20)
    for sequence in (first, long, late):
        scheduler.add(sequence)
    step(scheduler)
    scheduler.table.lending = True
    while long.block_table:
        step(scheduler)
    if long.num_emitted or not late.num_emitted or late.block_table:
        pytest.fail("the case is not made: both are to be preempted, the prefill before its first token")
    while scheduler.has_work:
        step(scheduler)
    assert first.finished
    assert late.finished, "its tokens stop for as long as the pair lasts"
