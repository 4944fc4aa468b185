"""The scheduler of a pair's source: batches whose first layers ran elsewhere, of requests that a third one decodes."""

from __future__ import annotations

import pytest

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from tests.services.worker.core.scheduling.harness import departing, lending, names, sampled, step


def split(*sequences: ActiveSequence) -> Scheduler:
    """They have their first tokens; KV of the first layers is not here."""
    scheduler = lending(*sequences)
    scheduler.lend()
    assert scheduler.reservations.reserve(sequences)
    for sequence in sequences:
        scheduler.reservations.adopt(sequence, sampled(sequence), kv_here=False)
    scheduler.check()
    return scheduler


def test_what_is_decoded_elsewhere_keeps_its_blocks_until_the_batch_is_over() -> None:
    gone, stays = departing("gone"), departing("stays")
    scheduler = split(gone, stays)
    assert scheduler.reservations.token_of(gone) == Sampled(gone.output[0])
    used = scheduler.pool.num_used
    scheduler.reservations.leave(gone)
    assert gone.finished
    assert scheduler.take_ended() == [], "it leaves without a word"
    assert scheduler.num_requests == 1
    assert scheduler.pool.num_used == used
    scheduler.check()
    scheduler.reservations.stay(stays)
    assert scheduler.schedule() is None, "KV of its first layers is not here"
    scheduler.reservations.kv_arrived([gone, stays])
    assert scheduler.reservations.take_prefilled() == [], "nobody else decodes it"
    assert scheduler.pool.num_used < used
    (output,) = step(scheduler)
    assert output.request_id == "stays"
    scheduler.check()


@pytest.mark.parametrize("stays_first", [True, False])
def test_what_stays_is_decoded_here_whenever_that_is_known(stays_first: bool) -> None:
    one = departing("a")
    scheduler = lending(one)
    scheduler.lend()
    assert scheduler.reservations.reserve([one])
    if stays_first:
        scheduler.reservations.stay(one)
    scheduler.reservations.adopt(one, sampled(one), kv_here=False)
    if not stays_first:
        scheduler.reservations.stay(one)
    assert scheduler.reservations.token_of(one) is None
    scheduler.reservations.kv_arrived([one])
    assert names(scheduler.table.running) == ["a"]


def test_kv_that_is_lost_after_all_is_computed_again_for_those_that_are_left() -> None:
    gone, stays = departing("gone"), departing("stays")
    scheduler = split(gone, stays)
    scheduler.reservations.leave(gone)
    scheduler.reservations.stay(stays)
    scheduler.reservations.kv_lost([gone, stays])
    assert scheduler.pool.num_used == 0
    assert names(scheduler.table.waiting) == ["stays"]
    scheduler.check()


def test_only_what_is_held_for_decode_is_released_by_who_hands_it_over() -> None:
    one = departing("a")
    scheduler = lending(one)
    scheduler.lend()
    assert scheduler.reservations.reserve([one])
    used = scheduler.pool.num_used
    scheduler.cancel(*one.key)
    scheduler.reservations.release_held(one)
    assert scheduler.pool.num_used == used > 0, "its batch is still computed"
    scheduler.reservations.release([one])
    assert scheduler.pool.num_used == 0
