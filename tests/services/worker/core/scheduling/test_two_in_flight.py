"""Two batches in flight: a rule at a time."""

from __future__ import annotations

import pytest

from services.worker.core.scheduling.schedule import Sampled, ScheduledBatch
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.generation import StreamPart
from tests.services.worker.core.scheduling.harness import ERROR, PLACE, config, names
from tests.services.worker.core.scheduling.pipeline import Pipeline, placed_request, token_at, wanted


def pipeline_of(*sequences: ActiveSequence, **changes: int) -> Pipeline:
    pipeline = Pipeline(Scheduler(config(**changes)))
    for sequence in sequences:
        pipeline.scheduler.add(sequence)
    return pipeline


def scheduled(pipeline: Pipeline) -> ScheduledBatch:
    batch = pipeline.schedule()
    assert batch is not None
    check(pipeline)
    return batch


def landed(pipeline: Pipeline) -> list[StreamPart]:
    parts = pipeline.land()
    check(pipeline)
    return parts


def check(pipeline: Pipeline) -> None:
    pipeline.scheduler.check()
    pipeline.check()


def pieces(batch: ScheduledBatch) -> list[tuple[str, int, int, bool]]:
    return [(p.sequence.request_id, p.start, p.num_tokens, p.sample) for p in batch.slices]


def who(batch: ScheduledBatch | None) -> list[str]:
    return [] if batch is None else names(p.sequence for p in batch.slices)


def texts(parts: list[StreamPart]) -> list[tuple[str, int, tuple[int, ...], str | None]]:
    return [(p.request_id, p.offset, p.token_ids, p.finish_reason) for p in parts]


def drain(pipeline: Pipeline) -> list[StreamPart]:
    """Two at a time, until nothing is left."""
    parts: list[StreamPart] = []
    pipeline.scheduler.take_ended()
    for _ in range(1000):
        while len(pipeline.batches) < 2 and pipeline.schedule() is not None:
            check(pipeline)
        if not pipeline.batches:
            break
        parts += landed(pipeline)
    assert not pipeline.scheduler.has_work
    assert pipeline.scheduler.pool.num_used == pipeline.scheduler.num_requests == 0
    return parts


def all_of(sequence: ActiveSequence) -> list[int]:
    return wanted(sequence, 1000)[0]


def test_the_second_batch_goes_on_behind_a_token_that_is_not_known_yet() -> None:
    pipeline = pipeline_of(a := placed_request("a", 5, 3))
    assert pieces(scheduled(pipeline)) == [("a", 0, 5, True)]
    assert pieces(scheduled(pipeline)) == [("a", 5, 1, True)]
    assert a.num_tokens == 5
    assert texts(landed(pipeline)) == [("a", 0, (token_at("a", 5),), None)]
    assert pieces(scheduled(pipeline)) == [("a", 6, 1, True)]
    assert texts(landed(pipeline)) == [("a", 1, (token_at("a", 6),), None)]
    assert texts(landed(pipeline)) == [("a", 2, (token_at("a", 7),), "length")]
    assert pipeline.scheduler.pool.num_used == 0


def test_a_prompt_goes_on_behind_its_part_that_is_in_flight() -> None:
    pipeline = pipeline_of(placed_request("a", 10, 2), max_batch_tokens=4)
    assert pieces(scheduled(pipeline)) == [("a", 0, 4, False)]
    assert pieces(scheduled(pipeline)) == [("a", 4, 4, False)]
    assert landed(pipeline) == []
    assert pieces(scheduled(pipeline)) == [("a", 8, 2, True)]
    assert landed(pipeline) == []
    assert pieces(scheduled(pipeline)) == [("a", 10, 1, True)]
    assert len(drain(pipeline)) == 2


def test_the_token_behind_one_that_ends_it_is_surplus_and_dropped() -> None:
    stop = token_at("a", 5)
    pipeline = pipeline_of(placed_request("a", 5, 9, stops=[stop]), b := placed_request("b", 5, 9))
    scheduled(pipeline)
    assert who(scheduled(pipeline)) == ["a", "b"]
    first, second = landed(pipeline), landed(pipeline)
    assert texts(first) == [("a", 0, (stop,), "stop"), ("b", 0, (token_at("b", 5),), None)]
    assert texts(second) == [("b", 1, (token_at("b", 6),), None)]
    drain(pipeline)
    assert b.output == all_of(b)


def test_blocks_of_one_that_has_ended_are_free_when_the_batch_behind_lands() -> None:
    pipeline = pipeline_of(placed_request("a", 5, 9, stops=[token_at("a", 5)]))
    table = pipeline.scheduler.table
    scheduled(pipeline)
    scheduled(pipeline)
    landed(pipeline)
    assert (table.landing_blocks, table.pool.num_used) == (2, 2)
    assert [len(blocks) for blocks in table.landing] == [2]
    landed(pipeline)
    assert (table.landing_blocks, table.pool.num_used) == (0, 0)


def test_an_error_of_its_row_ends_it_once_and_what_is_behind_is_dropped() -> None:
    pipeline = pipeline_of(placed_request("a", 5, 9), b := placed_request("b", 5, 9))
    scheduled(pipeline)
    scheduled(pipeline)
    parts = pipeline.land(row_errors={0: ERROR})
    assert [(p.request_id, p.error) for p in parts] == [("a", ERROR), ("b", None)]
    assert [p.request_id for p in landed(pipeline)] == ["b"]
    drain(pipeline)
    assert b.output == all_of(b)


@pytest.mark.parametrize("limits", [{}, {"context_tokens": 7}])
def test_an_end_by_length_is_known_ahead(limits: dict[str, int]) -> None:
    pipeline = pipeline_of(placed_request("a", 5, 9 if limits else 2), **limits)
    scheduled(pipeline)
    scheduled(pipeline)
    landed(pipeline)
    assert pipeline.schedule() is None, "the token in flight is its last one"
    assert [p.finish_reason for p in landed(pipeline)] == ["length"]
    assert not pipeline.scheduler.has_work


def test_one_that_is_to_be_decoded_elsewhere_is_not_decoded_ahead() -> None:
    pipeline = pipeline_of(a := placed_request("a", 6, 9, decode_at=PLACE), max_batch_tokens=4)
    scheduled(pipeline)
    assert pieces(scheduled(pipeline)) == [("a", 4, 2, True)], "its prompt is computed ahead"
    landed(pipeline)
    assert pipeline.schedule() is None
    landed(pipeline)
    assert a.reserved
    assert [s for s, _ in pipeline.scheduler.reservations.take_prefilled()] == [a]


def torn(**changes: int) -> tuple[Pipeline, ActiveSequence, ActiveSequence]:
    """``b`` is preempted while its second token is sampled: ``a`` lacks a block for what comes behind its own."""
    a, b = placed_request("a", 3, 8), placed_request("b", 3, 8)
    pipeline = pipeline_of(a, b, num_blocks=2, block_size=4, **changes)
    for _ in range(2):
        scheduled(pipeline)
    landed(pipeline)
    assert pipeline.schedule() is None, "no block is free before the landing"
    assert pipeline.scheduler.table.preemptions_total == 1
    return pipeline, a, b


def test_one_that_is_preempted_in_flight_keeps_the_token_that_lands() -> None:
    pipeline, a, b = torn()
    table = pipeline.scheduler.table
    assert list(table.waiting) == [b]
    assert table.landing_blocks == 1
    assert table.waiting_tokens == 4
    assert texts(landed(pipeline))[1] == ("b", 1, (token_at("b", 4),), None)
    assert (table.waiting_tokens, b.num_computed) == (5, 0)
    assert pieces(scheduled(pipeline)) == [("a", 4, 1, True)]
    drain(pipeline)
    # Neither has more than the pool holds.
    assert (a.output, b.output) == (wanted(a, 8)[0], wanted(b, 8)[0])


def test_one_that_is_preempted_in_flight_may_end_with_the_token_that_lands() -> None:
    a, b = placed_request("a", 3, 5), placed_request("b", 3, 2)
    pipeline = pipeline_of(a, b, num_blocks=2, block_size=4)
    for _ in range(2):
        scheduled(pipeline)
    landed(pipeline)
    assert pipeline.schedule() is None
    table = pipeline.scheduler.table
    assert list(table.waiting) == [b]
    assert texts(landed(pipeline))[1] == ("b", 1, (token_at("b", 4),), "length")
    assert (list(table.waiting), table.waiting_tokens) == ([], 0)
    assert [p.request_id for p in drain(pipeline)] == ["a"] * 3


@pytest.mark.parametrize("how", ["row", "slice"])
def test_one_that_is_preempted_in_flight_may_fail_there(how: str) -> None:
    pipeline, _, b = torn()
    errors = {1: ERROR}
    parts = pipeline.land(row_errors=errors) if how == "row" else pipeline.land(errors)
    check(pipeline)
    assert [(p.request_id, p.error) for p in parts] == [("a", None), ("b", ERROR)]
    assert b.finished
    assert not pipeline.scheduler.table.waiting
    assert {p.request_id for p in drain(pipeline)} == {"a"}


def test_one_that_is_preempted_in_flight_and_leaves_is_computed_again_without_its_token() -> None:
    a, b = placed_request("a", 3, 8), placed_request("b", 4, 8, decode_at=PLACE)
    pipeline = pipeline_of(a, num_blocks=2, block_size=4)
    scheduled(pipeline)
    pipeline.scheduler.add(b)
    scheduled(pipeline)
    landed(pipeline)
    assert pipeline.schedule() is None
    assert list(pipeline.scheduler.table.waiting) == [b]
    assert [p.request_id for p in landed(pipeline)] == ["a"]
    assert not pipeline.scheduler.reservations.has_prefilled
    assert b.output == []
    while not b.num_emitted:
        scheduled(pipeline)
        landed(pipeline)
    assert b.output == all_of(b)[:1]


def test_one_that_is_preempted_in_flight_is_not_begun_again_before_its_token_is_known() -> None:
    guest, a, b = placed_request("g", 8), placed_request("a", 3, 8), placed_request("b", 3, 8)
    pipeline = pipeline_of(num_blocks=4, block_size=4)
    scheduler = pipeline.scheduler
    assert scheduler.reservations.reserve([guest])
    scheduler.add(a)
    scheduler.add(b)
    for _ in range(2):
        scheduled(pipeline)
    landed(pipeline)
    assert pipeline.schedule() is None
    assert list(scheduler.table.waiting) == [b]
    scheduler.reservations.release([guest])
    assert scheduler.load().head_blocks == 0, "it does not wait for blocks"
    assert who(scheduled(pipeline)) == ["a"], "the blocks would be there"
    landed(pipeline)
    assert who(scheduled(pipeline)) == ["a", "b"]
    drain(pipeline)
    assert (a.output, b.output) == (all_of(a), all_of(b))


def test_one_that_only_layers_touch_is_not_preempted_in_a_step() -> None:
    guest, a, b = placed_request("g", 4), placed_request("a", 3, 9), placed_request("b", 4, 9)
    pipeline = pipeline_of(a, num_blocks=4, block_size=4)
    scheduler = pipeline.scheduler
    reservations = scheduler.reservations
    scheduled(pipeline)
    landed(pipeline)
    assert reservations.reserve([b])
    assert reservations.reserve([guest])
    layers = pipeline.fly_partial([b])
    pipeline.received(b, 4)
    reservations.adopt(b, Sampled(token_at("b", 4)))
    scheduled(pipeline)
    landed(pipeline)
    assert pipeline.schedule() is None
    assert list(scheduler.table.waiting) == [b]
    assert scheduler.table.landing_blocks == 2
    pipeline.land_partial(layers)
    reservations.release([guest])
    assert pieces(scheduled(pipeline)) == [("a", 4, 1, True), ("b", 0, 6, True)]
    landed(pipeline)
    assert pieces(scheduled(pipeline)) == [("a", 5, 1, True), ("b", 6, 1, True)]
    drain(pipeline)
    assert (a.output, b.output) == (all_of(a), all_of(b))


def test_one_that_is_cancelled_in_flight_says_nothing_more() -> None:
    pipeline = pipeline_of(placed_request("a", 5, 9), b := placed_request("b", 5, 9))
    scheduler = pipeline.scheduler
    scheduled(pipeline)
    scheduled(pipeline)
    assert scheduler.cancel("a", 0) is not None
    assert [p.finish_reason for p in scheduler.take_ended()] == ["cancelled"]
    check(pipeline)
    assert scheduler.table.landing_blocks == 2
    assert [p.request_id for p in landed(pipeline)] == ["b"]
    assert scheduler.table.landing_blocks == 2, "the second one touches them too"
    assert who(scheduled(pipeline)) == ["b"]
    assert [p.request_id for p in landed(pipeline)] == ["b"]
    assert scheduler.table.landing_blocks == 0
    drain(pipeline)
    assert b.output == all_of(b)


def test_a_request_of_the_same_name_is_another_one() -> None:
    pipeline = pipeline_of(placed_request("a", 5, 9), num_blocks=6)
    scheduled(pipeline)
    pipeline.scheduler.cancel("a", 0)
    pipeline.scheduler.add(again := placed_request("a", 5, 3))
    assert pieces(scheduled(pipeline)) == [("a", 0, 5, True)]
    assert landed(pipeline) == []
    drain(pipeline)
    assert again.output == all_of(again)


def test_who_needs_blocks_that_are_touched_waits_for_the_landing() -> None:
    a, b, c = placed_request("a", 3, 9), placed_request("b", 3, 9), placed_request("c", 3, 9)
    pipeline = pipeline_of(a, b, num_blocks=3, block_size=4)
    scheduler = pipeline.scheduler
    scheduler.add(c)
    scheduled(pipeline)
    landed(pipeline)
    assert who(scheduled(pipeline)) == ["a", "b", "c"]
    scheduler.cancel("b", 0)
    assert pipeline.schedule() is None, "a lacks a block, and one is about to be free"
    assert scheduler.table.preemptions_total == 0
    landed(pipeline)
    assert pieces(scheduled(pipeline)) == [("a", 4, 1, True)]
    assert scheduler.table.preemptions_total == 0, "c just waits"
    scheduler.cancel("c", 0)
    drain(pipeline)
    assert a.output == all_of(a)


def test_a_new_request_waits_for_blocks_that_are_touched() -> None:
    pipeline = pipeline_of(placed_request("a", 7, 9), num_blocks=2, block_size=4)
    scheduled(pipeline)
    pipeline.scheduler.cancel("a", 0)
    pipeline.scheduler.add(placed_request("b", 3, 2))
    assert pipeline.schedule() is None
    assert not pipeline.scheduler.reservations.reserve([placed_request("g", 3)])
    landed(pipeline)
    assert who(scheduled(pipeline)) == ["b"]


def test_blocks_that_layers_touch_are_free_when_they_land() -> None:
    pipeline = pipeline_of(num_blocks=4)
    table, reservations = pipeline.scheduler.table, pipeline.scheduler.reservations
    guest, other = placed_request("g", 5, 2), placed_request("o", 5)
    assert reservations.reserve([guest])
    assert reservations.reserve([other])
    first, second = pipeline.fly_partial([guest, other]), pipeline.fly_partial([guest])
    assert table.flies(other)
    reservations.compute_here([guest])
    check(pipeline)
    assert (table.landing_blocks, table.pool.num_used) == (2, 4)
    assert pipeline.schedule() is None, "no block is free"
    pipeline.land_partial(first)
    check(pipeline)
    assert table.landing_blocks == 2, "the second touches them too"
    assert not table.flies(other)
    reservations.release([other])
    assert who(scheduled(pipeline)) == ["g"], "in blocks that nothing touches"
    pipeline.land_partial(second)
    check(pipeline)
    assert table.landing_blocks == 0
    drain(pipeline)
    assert guest.output == all_of(guest)


def test_what_was_made_behind_a_batch_that_failed_is_dropped_and_then_it_completes() -> None:
    a, b, c = placed_request("a", 5, 4), placed_request("b", 5, 4), placed_request("c", 5, 4)
    pipeline = pipeline_of(a, b)
    scheduler = pipeline.scheduler
    first = scheduled(pipeline)
    scheduler.add(c)
    second = scheduled(pipeline)
    assert pieces(second) == [("a", 5, 1, True), ("b", 5, 1, True), ("c", 0, 5, True)]
    with pytest.raises(RuntimeError, match="newest"):
        scheduler.drop(first)
    with pytest.raises(RuntimeError, match="oldest"):
        scheduler.complete(second, ())
    parts = pipeline.land({0: ERROR})
    check(pipeline)
    assert [(p.request_id, p.error) for p in parts] == [("a", ERROR), ("b", None)]
    assert scheduler.table.landing_blocks == 0
    assert scheduler.pool.num_used == 4
    assert pieces(scheduled(pipeline)) == [("b", 5, 1, True), ("c", 0, 5, True)], "as if it had not been made"
    drain(pipeline)
    assert (b.output, c.output) == (all_of(b), all_of(c))


def test_blocks_that_wait_for_a_batch_that_is_dropped_are_freed() -> None:
    pipeline = pipeline_of(placed_request("a", 5, 4), b := placed_request("b", 5, 4))
    scheduled(pipeline)
    scheduled(pipeline)
    pipeline.scheduler.cancel("a", 0)
    pipeline.land({1: ERROR})
    check(pipeline)
    assert b.finished
    assert pipeline.scheduler.pool.num_used == 0


def test_one_that_is_preempted_for_a_batch_that_is_dropped_still_keeps_its_token() -> None:
    a, b, c = placed_request("a", 7, 9), placed_request("b", 3, 3), placed_request("c", 3, 9)
    pipeline = pipeline_of(a, num_blocks=5, block_size=4)
    scheduler = pipeline.scheduler
    scheduler.add(b)
    scheduler.add(c)
    scheduled(pipeline)
    landed(pipeline)
    scheduled(pipeline)
    second = scheduled(pipeline)
    assert pieces(second) == [("a", 8, 1, True)], "it has the last block, and b waits for one of c's"
    assert second.preempted == (c,)
    parts = pipeline.land({1: ERROR})
    check(pipeline)
    assert texts(parts)[2] == ("c", 1, (token_at("c", 4),), None)
    drain(pipeline)
    assert (a.output, c.output) == (all_of(a), all_of(c))


def test_what_is_dropped_with_nothing_before_it_is_made_again() -> None:
    pipeline, a, _ = torn()
    pipeline.drop()
    check(pipeline)
    assert not pipeline.scheduler.table.torn
    assert pieces(scheduled(pipeline)) == [("a", 3, 1, True), ("b", 0, 4, True)]
    pipeline.scheduler.cancel("b", 0)
    drain(pipeline)
    assert a.output == wanted(a, 8)[0]


def test_two_are_in_flight_at_most() -> None:
    pipeline = pipeline_of(placed_request("a", 5, 9))
    scheduled(pipeline)
    scheduled(pipeline)
    with pytest.raises(RuntimeError, match="2 batches"):
        pipeline.scheduler.schedule()


def test_one_that_is_computed_alone_is_never_beside_another_batch() -> None:
    pipeline = pipeline_of(a := placed_request("a", 5, 9))
    scheduler = pipeline.scheduler
    scheduled(pipeline)
    scheduler.add(x := placed_request("x", 5, 4, alone=2))
    assert pipeline.schedule() is None, "nothing is made while there is one"
    landed(pipeline)
    turns = []
    while x.alone:
        turns.append(who(scheduled(pipeline)))
        assert pipeline.schedule() is None
        landed(pipeline)
    assert turns == [["a"], ["x"], ["a"], ["x"]]
    assert who(scheduled(pipeline)) == ["a", "x"]
    assert who(scheduled(pipeline)) == ["a", "x"], "it is like the others now"
    drain(pipeline)
    assert (a.output, x.output) == (all_of(a), all_of(x))


def test_one_that_is_computed_alone_is_not_beside_layers_either() -> None:
    pipeline = pipeline_of(placed_request("x", 5, 2, alone=9))
    guest = placed_request("g")
    assert pipeline.scheduler.reservations.reserve([guest])
    layers = pipeline.fly_partial([guest])
    assert pipeline.schedule() is None
    pipeline.land_partial(layers)
    assert who(scheduled(pipeline)) == ["x"]


def test_one_that_is_held_back_is_in_no_further_step_and_held_when_it_has_landed() -> None:
    pipeline = pipeline_of(a := placed_request("a", 5, 9), b := placed_request("b", 5, 9))
    table, reservations = pipeline.scheduler.table, pipeline.scheduler.reservations
    scheduled(pipeline)
    scheduled(pipeline)
    table.held_back.add(id(a))
    landed(pipeline)
    assert table.flies(a)
    assert who(scheduled(pipeline)) == ["b"]
    landed(pipeline)
    assert not table.flies(a)
    assert reservations.hold_to_move(a)
    table.held_back.discard(id(a))
    check(pipeline)
    assert a.output == all_of(a)[:2]
    reservations.decode_here(a)
    assert who(scheduled(pipeline)) == ["a", "b"]
    drain(pipeline)
    assert (a.output, b.output) == (all_of(a), all_of(b))


def test_one_that_is_held_back_is_in_no_step_of_its_own_either() -> None:
    pipeline = pipeline_of(x := placed_request("x", 5, 9, alone=9), placed_request("a", 5, 2))
    scheduler = pipeline.scheduler
    while not x.num_emitted:
        scheduled(pipeline)
        landed(pipeline)
    scheduler.table.held_back.add(id(x))
    assert [who(scheduled(pipeline)), len(landed(pipeline))] == [["a"], 1]
    assert pipeline.schedule() is None
    assert scheduler.reservations.hold_to_move(x)
    scheduler.table.held_back.clear()
    scheduler.reservations.decode_here(x)
    drain(pipeline)
    assert x.output == all_of(x)


def test_steps_are_not_taken_together_while_one_is_held_back_or_in_flight() -> None:
    pipeline = pipeline_of(a := placed_request("a", 5, 9), placed_request("b", 5, 9))
    scheduler = pipeline.scheduler
    scheduled(pipeline)
    assert scheduler.decode_steps() == 0
    landed(pipeline)
    assert scheduler.decode_steps() == 8
    scheduled(pipeline)
    assert scheduler.decode_steps() == 0
    landed(pipeline)
    assert scheduler.decode_steps() == 7
    scheduler.table.held_back.add(id(a))
    assert scheduler.decode_steps() == 0
    scheduler.table.held_back.clear()
    assert scheduler.decode_steps() == 7


def test_one_that_is_held_back_and_preempted_does_not_begin_again_before_it_was_asked_for() -> None:
    pipeline, _, b = torn()
    table = pipeline.scheduler.table
    table.held_back.add(id(b))
    landed(pipeline)
    pipeline.scheduler.cancel("a", 0)
    assert pipeline.schedule() is None
    assert not pipeline.scheduler.reservations.hold_to_move(b)
    table.held_back.clear()
    assert who(scheduled(pipeline)) == ["b"]


def test_one_that_was_to_be_computed_alone_still_is_when_it_comes_back_from_being_held() -> None:
    pipeline = pipeline_of(x := placed_request("x", 5, 9, alone=5), a := placed_request("a", 5, 9))
    reservations = pipeline.scheduler.reservations
    while not x.num_emitted:
        scheduled(pipeline)
        landed(pipeline)
    assert reservations.hold_to_move(x)
    for _ in range(3):
        scheduled(pipeline)
        landed(pipeline)
    reservations.decode_here(x)
    drain(pipeline)
    assert (a.output, x.output) == (all_of(a), all_of(x))
