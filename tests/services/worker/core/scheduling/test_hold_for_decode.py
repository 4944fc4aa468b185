"""The scheduler of a prefill instance: requests that are held with their first token, to be decoded elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import sequence_of, submit_of
from shared.messages.generation import StreamPart
from tests.services.worker.core.scheduling.harness import (
    ERROR,
    PLACE,
    config,
    departing,
    expected,
    fail,
    held,
    in_batch,
    names,
    request,
    sampled,
    step,
)


def test_with_its_first_token_it_is_held_with_its_slot_and_blocks() -> None:
    scheduler = Scheduler(config(max_num_sequences=1))
    leaves, waits = departing("leaves"), request("waits")
    scheduler.add(leaves)
    scheduler.add(waits)
    (output,) = step(scheduler)
    assert (output.request_id, output.offset, output.finish_reason) == ("leaves", 0, None)
    assert [(s.request_id, token.token_id) for s, token in scheduler.reservations.take_prefilled()] == [
        ("leaves", leaves.output[0])
    ]
    assert scheduler.reservations.take_prefilled() == [], "it is told once"
    assert scheduler.schedule() is None, "it is not decoded, and its slot is taken"
    assert len(leaves.block_table) == 2
    assert scheduler.num_requests == 2
    scheduler.check()


def test_chunks_before_the_last_hold_nothing() -> None:
    scheduler = Scheduler(config(prefill_chunk_tokens=2))
    scheduler.add(departing("a", 5))
    for _ in range(2):
        assert step(scheduler) == []
        assert scheduler.reservations.take_prefilled() == []
    step(scheduler)
    assert names(s for s, _ in scheduler.reservations.take_prefilled()) == ["a"]
    assert not scheduler.has_work


def test_what_is_held_counts_as_running() -> None:
    scheduler = held(departing("a", 6), departing("b", 7))
    scheduler.add(request("c", 8))
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.running_requests, load.running_tokens) == (1, 8, 2, 13)
    assert load.kv_blocks_used == 4
    step(scheduler)
    load = scheduler.load()
    assert (load.queued_requests, load.running_requests, load.running_tokens) == (0, 3, 21)


@pytest.mark.parametrize("token", ["last", "failed"])
def test_what_ends_with_its_first_token_is_told_and_not_held(token: str) -> None:
    scheduler = Scheduler(config())
    sequence = departing("a", max_tokens=1 if token == "last" else 4)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    assert batch is not None
    first = Sampled(0, error=ERROR) if token == "failed" else sampled(sequence)
    (output,) = scheduler.complete(batch, [first])
    assert output.finish_reason == ("error" if token == "failed" else "length")
    assert scheduler.reservations.take_prefilled() == [(sequence, first)]
    assert sequence.finished
    assert not sequence.reserved
    assert scheduler.num_requests == scheduler.pool.num_used == 0
    assert not scheduler.has_work
    scheduler.check()


def test_a_held_request_that_is_decoded_here_goes_on_at_its_place_with_the_tokens_of_an_undisturbed_run() -> None:
    before, leaves, after = request("before", max_tokens=9), departing("leaves"), request("after", max_tokens=9)
    scheduler = held(before, leaves, after)
    assert in_batch(scheduler) == ["before", "after"]
    scheduler.reservations.decode_here(leaves)
    assert leaves.decode_at is None
    scheduler.reservations.decode_here(leaves)  # once more changes nothing
    assert in_batch(scheduler) == ["before", "leaves", "after"]
    while scheduler.has_work:
        step(scheduler)
    assert leaves.output == expected(leaves, 4)
    assert scheduler.reservations.take_prefilled() == []
    assert scheduler.pool.num_used == scheduler.num_requests == 0


def test_a_request_that_is_decoded_here_and_preempted_does_not_leave_again() -> None:
    first, leaves = request("a", 7, 8), departing("b", 7, 8)
    scheduler = held(first, leaves, num_blocks=4)
    scheduler.reservations.decode_here(leaves)
    while leaves.block_table:
        step(scheduler)
    assert not leaves.finished, "it was preempted"
    while scheduler.has_work:
        step(scheduler)
    assert leaves.output == expected(leaves, 8)
    assert scheduler.reservations.take_prefilled() == []


def test_a_prompt_that_is_preempted_half_way_leaves_once_it_is_computed() -> None:
    early, leaves = request("early", 8, 12), departing("leaves", 8, 4)
    scheduler = Scheduler(config(num_blocks=5, max_batch_tokens=3, prefill_chunk_tokens=1))
    scheduler.add(early)
    while not early.num_emitted:
        step(scheduler)
    scheduler.add(leaves)
    preempted: list[str] = []
    told: list[str] = []
    for _ in range(60):
        batch = scheduler.schedule()
        if batch is None:
            break
        preempted += names(batch.preempted)
        scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])
        told += names(s for s, _ in scheduler.reservations.take_prefilled())
        scheduler.check()
    assert preempted == ["leaves"]
    assert told == ["leaves"]
    assert leaves.output == expected(leaves, 1)


def test_a_request_that_its_decoder_has_leaves_without_a_word() -> None:
    a = departing("a")
    scheduler = held(a)
    scheduler.reservations.release_to_decoder(a)
    assert scheduler.num_requests == scheduler.pool.num_used == scheduler.load().running_requests == 0
    assert scheduler.take_ended() == []
    assert scheduler.cancel("a", 0) is None
    for late in (scheduler.reservations.release_to_decoder, scheduler.reservations.decode_here):
        late(a)
        scheduler.check()
    assert not scheduler.has_work
    scheduler.add(request("a"))  # it may come again


@pytest.mark.parametrize("end", ["decode_here", "release_to_decoder", "release"])
@pytest.mark.parametrize("by", ["cancel", "gateway", "abort"])
def test_a_held_request_ends_once_and_keeps_its_blocks_until_nobody_reads_them(by: str, end: str) -> None:
    a, other = departing("a", gateway="gone"), departing("other")
    scheduler = held(a, other)
    if by == "cancel":
        assert scheduler.cancel("a", 0) is a
        assert scheduler.cancel("a", 0) is None
    elif by == "gateway":
        assert scheduler.cancel_gateway(Gone("gone", "")) == [a]
    else:
        scheduler.abort([a], ERROR)
    assert names_of(scheduler.take_ended()) == ["a"]
    assert a.block_table, "its KV may be on its way out"
    scheduler.check()
    assert scheduler.num_requests == 1
    if end == "release":
        scheduler.reservations.release([a])
    else:
        getattr(scheduler.reservations, end)(a)
    assert a.block_table == []
    scheduler.check()
    assert scheduler.take_ended() == []
    assert not scheduler.has_work, "the other one stays held"
    assert scheduler.load().running_requests == 1
    scheduler.reservations.release([a])
    scheduler.reservations.release_to_decoder(other)
    assert scheduler.pool.num_used == 0


def names_of(outputs: Iterable[StreamPart]) -> list[str]:
    return [o.request_id for o in outputs]


def test_all_held_requests_end_when_everything_is_aborted() -> None:
    a, b = departing("a"), departing("b")
    scheduler = held(a, b)
    scheduler.add(request("c"))
    assert names(scheduler.abort_all(ERROR)) == ["a", "b", "c"]
    assert names_of(scheduler.take_ended()) == ["a", "b", "c"]
    assert scheduler.num_requests == 0
    scheduler.reservations.release([a, b])
    assert scheduler.pool.num_used == 0
    scheduler.check()


def test_a_step_that_fails_leaves_held_requests_alone() -> None:
    a = departing("a")
    scheduler = held(a)
    scheduler.add(request("b"))
    batch = scheduler.schedule()
    assert batch is not None
    assert names_of(fail(scheduler, batch, ERROR)) == ["b"]
    assert scheduler.num_requests == 1
    scheduler.reservations.decode_here(a)
    assert in_batch(scheduler) == ["a"]


def test_a_cancel_while_the_last_chunk_is_computed_holds_nothing() -> None:
    a = departing("a")
    scheduler = Scheduler(config())
    scheduler.add(a)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.cancel("a", 0)
    assert scheduler.complete(batch, [sampled(a)]) == []
    assert scheduler.reservations.take_prefilled() == []
    assert scheduler.pool.num_used == scheduler.num_requests == 0
    assert not a.reserved


def test_blocks_of_held_requests_are_nobodys_to_take() -> None:
    runs, leaves = request("runs", 4, 20), departing("leaves", 11)
    scheduler = held(runs, leaves, num_blocks=4)  # one and three blocks
    assert scheduler.has_work
    assert scheduler.schedule() is None, "its second block is not free"
    assert leaves.block_table
    assert not scheduler.reservations.reserve([request("guest", 1)])
    scheduler.reservations.release_to_decoder(leaves)
    assert in_batch(scheduler) == ["runs"]


@pytest.mark.parametrize(("computed_here", "work"), [(True, 5), (False, 0)])
def test_a_prefix_that_another_instance_computed_is_not_this_ones_work(computed_here: bool, work: int) -> None:
    guest = request("guest", 5)
    scheduler = Scheduler(config())
    scheduler.reservations.reserve([guest])
    scheduler.reservations.adopt(guest, sampled(guest), computed_here=computed_here)
    while scheduler.has_work:
        step(scheduler)
    assert guest.output == expected(guest, 4)
    load = scheduler.load()
    assert (load.prefill_tokens_total, load.decode_tokens_total) == (work, 3), "the first token comes of the prompt"


def test_an_adopted_request_that_is_to_be_decoded_elsewhere_is_held() -> None:
    guest = departing("guest")
    scheduler = Scheduler(config())
    scheduler.reservations.reserve([guest])
    output = scheduler.reservations.adopt(guest, sampled(guest))
    assert output is not None
    assert names(s for s, _ in scheduler.reservations.take_prefilled()) == ["guest"]
    assert scheduler.schedule() is None
    assert scheduler.num_requests == 1
    scheduler.check()
    scheduler.reservations.decode_here(guest)
    while scheduler.has_work:
        step(scheduler)
    assert guest.output == expected(guest, 4)
    assert scheduler.pool.num_used == 0


def test_lent_requests_count_as_queued_beside_one_that_ended_while_it_was_held() -> None:
    a = departing("a")
    scheduler = held(a)
    scheduler.add(request("lent", 6))
    scheduler.table.lending = True
    scheduler.lend()
    scheduler.cancel("a", 0)  # not released yet
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens) == (1, 6)


def test_a_request_as_another_instance_has_to_know_it() -> None:
    sequence = departing("a")
    held(sequence)
    message = submit_of(sequence, "i9", "m", "h")
    assert (message.request_id, message.attempt, message.gateway_id) == (*sequence.key, sequence.gateway_id)
    assert (message.instance_id, message.model, message.model_hash, message.decode_at) == ("i9", "m", "h", PLACE)
    there = sequence_of(message, (7,), arrived_s=3.0)
    assert (there.prompt, there.output, there.tokens) == (sequence.prompt, sequence.output, sequence.tokens)
    assert (there.params, there.decode_at, there.arrived_s) == (sequence.params, PLACE, 3.0)
    assert there.stop_ids == {7}
    assert there.num_emitted == there.num_computed == 0
    sequence.append(1)
    assert len(message.output_token_ids) == 1, "a message does not change"


def test_what_comes_to_be_decoded_leaves_room_for_the_prompt_that_waits_here() -> None:
    scheduler = Scheduler(config(num_blocks=8))
    scheduler.add(request("runs", 8))
    step(scheduler)
    scheduler.add(request("waits", 20))
    guest = request("guest", 4)
    assert scheduler.reservations.fits([4]), "there is room, but not for both"
    assert not scheduler.reservations.reserve([guest], behind_waiting=True)
    assert not guest.block_table
    assert scheduler.reservations.reserve([guest]), "a pair's own batch has its place before what waits"
    scheduler.check()


def test_what_comes_leaves_all_that_admitting_the_prompt_takes_in_a_large_pool() -> None:
    scheduler = Scheduler(config(num_blocks=1000, max_num_sequences=400))
    scheduler.add(request("runs", 8, 400))
    step(scheduler)
    reservations = scheduler.reservations
    guests = [request(f"guest{i}", 16) for i in range(300)]
    here = [guest for guest in guests if reservations.reserve([guest], behind_waiting=True)]
    scheduler.add(request("waits", 400, 1))
    for ends in here:
        reservations.release([ends])
        while guests and reservations.reserve([guests[-1]], behind_waiting=True):
            guests.pop()
        if "waits" in in_batch(scheduler):
            return
        scheduler.check()
    raise AssertionError("others took the room that it waited for")


def test_without_a_prompt_that_waits_what_comes_to_be_decoded_has_all_the_room() -> None:
    scheduler = Scheduler(config(num_blocks=8))
    scheduler.add(request("runs", 8))
    step(scheduler)
    assert scheduler.reservations.reserve([request("guest", 20)], behind_waiting=True)
    scheduler.check()
