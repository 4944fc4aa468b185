"""What a pair's source runs, and when it asks for more."""

from __future__ import annotations

import pytest

from services.worker.core.pairing.source_work import AfterPull, Kv, PullTime, SourceRun, SourceWork, after_pull
from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from tests.services.worker.live.members import batch_of, request

NUM_LAYERS = 2


def scheduler_of(*names: str) -> tuple[Scheduler, list[SourceRun]]:
    """Requests of 10 tokens that were lent, and have blocks again; each is a batch with a layer of 2 s."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=256, block_size=4))
    scheduler.table.lending = True
    for name in names:
        scheduler.add(request(name, 10))
    lent = scheduler.lend()
    assert scheduler.reservations.reserve(lent)
    return scheduler, [SourceRun(batch_of(s.request_id, s, layer_s=2.0), 1) for s in lent]


def test_layers_are_run_in_parts_and_the_first_layer_is_the_first_that_the_target_did_not_run() -> None:
    _, (run,) = scheduler_of("a")
    work: SourceWork[SourceRun] = SourceWork(NUM_LAYERS, 4)
    work.begin(run, 7.0)
    assert run.batch.sequences[0].first_scheduled_s == 7.0
    assert (work.first, run.next_layer, work.next_part(run)) == (run, 1, (0, 4))
    assert not work.ran(run, 4)
    assert work.next_part(run) == (4, 7)
    assert not work.ran(run, 7)
    assert not work.is_through(run)
    assert work.ran(run, 10)
    assert work.is_through(run)


def test_it_is_free_when_what_is_left_takes_no_longer_than_a_pull() -> None:
    scheduler, (a, b) = scheduler_of("a", "b")
    work: SourceWork[SourceRun] = SourceWork(NUM_LAYERS, 100)
    assert work.is_free(scheduler, 0.0)
    work.begin(a, 0.0)
    assert work.remaining_s == 2.0
    assert not work.is_free(scheduler, 1.9)
    assert work.is_free(scheduler, 2.0)
    work.begin(b, 0.0)
    assert not work.is_free(scheduler, 2.0)
    for run in (a, b):
        work.ran(run, 10)
        work.done(run, scheduler)
    assert work.is_free(scheduler, 0.0)
    scheduler.table.lending = False
    scheduler.add(request("c", 600))
    scheduler.schedule()
    assert not work.is_free(scheduler, 9.0), "a prompt of its own is unfinished"


@pytest.mark.parametrize("kv_first", [False, True])
@pytest.mark.parametrize("is_here", [False, True])
def test_requests_decode_once_the_layers_have_run_and_the_kv_is_here(kv_first: bool, is_here: bool) -> None:
    scheduler, (run,) = scheduler_of("a")
    work: SourceWork[SourceRun] = SourceWork(NUM_LAYERS, 100)
    work.begin(run, 0.0)
    if kv_first:
        work.kv_over(run, scheduler, is_here=is_here)
    work.ran(run, 10)
    run.batch.adopt(scheduler.reservations, [Sampled(5)], 0.0, kv_here=run.kv is Kv.HERE)
    work.done(run, scheduler)
    if not kv_first:
        assert not scheduler.table.running
        work.kv_over(run, scheduler, is_here=is_here)
    (sequence,) = run.batch.sequences
    assert (sequence in scheduler.table.running) == is_here
    assert (sequence in scheduler.table.waiting) == (not is_here), "it is computed again"


def test_a_batch_that_failed_is_computed_in_steps() -> None:
    scheduler, (run,) = scheduler_of("a")
    work: SourceWork[SourceRun] = SourceWork(NUM_LAYERS, 100)
    work.begin(run, 0.0)
    run.has_failed = True
    work.done(run, scheduler)
    assert not scheduler.table.waiting, "its blocks are still written"
    work.kv_over(run, scheduler, is_here=True)
    assert list(scheduler.table.waiting) == list(run.batch.sequences)


def test_the_lead_is_what_pulls_take_but_no_more_than_a_layer() -> None:
    time = PullTime()
    time.took(2.0, layer_s=5.0)
    assert (time.pull_s, time.lead_s) == (1.0, 1.0)
    time.took(2.0, layer_s=0.75)
    assert (time.pull_s, time.lead_s) == (1.5, 0.75)


@pytest.mark.parametrize(
    ("pulled", "can_dissolve", "gets_prompts", "has_backlog", "then"),
    [
        (True, False, True, True, AfterPull.HAND_OVER),
        (True, False, False, False, AfterPull.ASK_AGAIN),
        (False, True, True, True, AfterPull.DISSOLVE),
        (False, False, False, True, AfterPull.DISSOLVE),
        (False, False, True, True, AfterPull.RUN_BACKLOG),
        (False, False, True, False, AfterPull.ASK_AGAIN),
    ],
)
def test_what_comes_after_a_pull(
    pulled: bool, can_dissolve: bool, gets_prompts: bool, has_backlog: bool, then: AfterPull
) -> None:
    found = after_pull(pulled=pulled, can_dissolve=can_dissolve, gets_prompts=gets_prompts, has_backlog=has_backlog)
    assert found is then
