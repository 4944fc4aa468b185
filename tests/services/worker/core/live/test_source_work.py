"""What a pair's source runs, and when it asks for more."""

from __future__ import annotations

import pytest

from services.worker.core.live.source_work import AfterPull, Kv, PullTime, SourceRun, SourceWork, after_pull
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


def test_the_next_is_asked_for_a_pull_before_what_is_left_is_done() -> None:
    scheduler, (a, b) = scheduler_of("a", "b")
    work: SourceWork[SourceRun] = SourceWork(NUM_LAYERS, 100)
    assert work.free_in_s(scheduler, 0.0) == 0.0
    work.begin(a, 0.0)
    assert work.remaining_s == 2.0
    assert work.free_in_s(scheduler, 2.0) == work.free_in_s(scheduler, 9.0) == 0.0
    assert work.free_in_s(scheduler, 1.5) == 0.5, "while the last layer runs"
    assert work.free_in_s(scheduler, 0.0) is None, "not before its end"
    work.begin(b, 0.0)
    assert work.free_in_s(scheduler, 2.0) is None
    assert work.free_in_s(scheduler, 2.5) == 1.5
    for run in (a, b):
        work.ran(run, 10)
        work.done(run, scheduler)
    assert work.free_in_s(scheduler, 0.0) == 0.0
    scheduler.table.lending = False
    scheduler.add(request("c", 600))
    scheduler.schedule()
    assert work.free_in_s(scheduler, 9.0) is None, "a prompt of its own is unfinished"


def test_parts_of_a_layer_that_have_run_count_as_run_and_say_how_long_the_others_take() -> None:
    scheduler, (a,) = scheduler_of("a")
    work: SourceWork[SourceRun] = SourceWork(NUM_LAYERS, 4)
    work.begin(a, 0.0)
    a.busy_s = 0.4
    assert not work.ran(a, 4)
    assert a.layer_s == pytest.approx(1.0), "2.0 was expected"
    assert work.remaining_s == pytest.approx(0.6)
    assert work.next_part(a) == (4, 7)
    assert work.free_in_s(scheduler, 0.4) == pytest.approx(0.2), "the next part takes 0.3"
    assert work.free_in_s(scheduler, 0.2) is None


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
