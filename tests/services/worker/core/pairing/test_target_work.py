"""What a pair's target runs, and what it gives to the source."""

from __future__ import annotations

import pytest

from services.worker.core.pairing.target_work import LayerEnd, TargetRun, TargetWork
from shared.messages.live import Gate
from shared.zigzag.queue import Claim
from tests.services.worker.live.members import assignment, batch_of, request

NUM_LAYERS = 3


def work_of(*names: str, policy: str = "zigzag", part_tokens: int = 100) -> TargetWork[TargetRun]:
    """Batches of 10 tokens that have arrived."""
    work: TargetWork[TargetRun] = TargetWork(NUM_LAYERS, part_tokens, assignment(policy=policy))
    for name in names:
        work.add(TargetRun(batch_of(name, request(name, 10))), behind_seal=False)
        work.queue.arrived(name)
    return work


def run_layer(work: TargetWork[TargetRun]) -> LayerEnd:
    run = work.next()
    assert run is not None
    assert work.ran(run, work.next_part(run)[1])
    return work.end_layer(run)


def test_a_layer_is_run_part_by_part_before_another_is_begun() -> None:
    work = work_of("a", "b", part_tokens=4)
    assert work.next() is None
    work.set_layers_ready(1, complete=False)
    parts = []
    for _ in range(3):
        run = work.next()
        assert run is not None
        parts.append((run.batch.batch_id, *work.next_part(run)))
        through = work.ran(run, parts[-1][2])
    assert parts == [("a", 0, 4), ("a", 4, 7), ("a", 7, 10)]
    assert through
    assert work.end_layer(work.batches["a"]) == LayerEnd(ended=False, finished=False)
    following = work.next()
    assert following is not None
    assert following.batch.batch_id == "b"


def test_the_last_layer_counts_once_the_source_knows() -> None:
    work = work_of("a")
    work.set_layers_ready(NUM_LAYERS, complete=False)
    assert work.queue.layers_ready == NUM_LAYERS - 1
    run_layer(work)
    run_layer(work)
    assert work.next() is None
    work.set_layers_ready(0, complete=True)
    assert run_layer(work) == LayerEnd(ended=True, finished=True)
    assert (work.finished, work.batches) == (["a"], {})


def test_a_pull_that_waits_is_granted_at_the_end_of_the_layer_and_one_that_gave_up_is_not() -> None:
    for waits in (True, False):
        work = work_of("a")
        work.set_layers_ready(2, complete=False)
        run = work.next()
        assert run is not None
        assert work.pull("claim", waits=waits) is None
        work.ran(run, 10)
        work.end_layer(run)
        assert (work.claim_of("a") is not None) == waits
        claim = work.pull("claim", waits=False)
        assert isinstance(claim, Claim)
        assert (claim.batch_id, claim.first_layer) == ("a", 1)


def test_what_the_source_settles_is_free_once() -> None:
    work = work_of("a", "b")
    work.pull("1", waits=False)
    assert work.settle({"1", "unknown"}) == ["a"]
    assert work.settle({"1"}) == []
    assert [b.batch_id for b in work.drop(("a", "a", "c"))] == ["a"]
    assert list(work.batches) == ["b"]


def test_a_cancelled_batch_is_dropped_unless_the_engine_or_the_source_has_it() -> None:
    work = work_of("a", "b", "c")
    work.set_layers_ready(1, complete=False)
    work.pull("1", waits=False)
    run = work.next()
    assert run is not None
    assert run.batch.batch_id == "b"
    assert [work.cancel(name) for name in ("a", "b", "c", "d")] == [False, False, True, False]
    assert not work.is_wanted
    assert work.end_layer(run) == LayerEnd(ended=True, finished=False)


def test_sharing_waits_for_a_layer_that_only_the_source_could_go_on_from() -> None:
    work = work_of("a", "b", "c")
    work.set_layers_ready(1, complete=False)
    run = work.next()
    assert run is not None
    assert work.share("end", 0.0) is None
    work.ran(run, 10)
    work.end_layer(run)
    shares = work.share("end", 0.0)
    assert shares is not None
    assert [(c.batch_id, c.first_layer) for c in shares.given] == [("a", 1), ("b", 0), ("c", 0)]
    assert [c.batch_id for c in work.queue.open_claims()] == ["a"], "the source settles it once it has its KV"
    assert work.is_over


@pytest.mark.parametrize("policy", ["best_effort", "overlap", "stop_the_world"])
def test_the_baselines_part_as_soon_as_everything_is_loaded(policy: str) -> None:
    work = work_of("a", "b", policy=policy)
    work.set_layers_ready(1, complete=False)
    assert not work.is_over
    work.set_layers_ready(0, complete=True)
    assert work.is_over
    assert work.pull("1", waits=True) is None
    assert work.wanted == ""


def test_zigzag_goes_on_while_begun_batches_wait() -> None:
    work = work_of("a", "b", "c")
    work.set_layers_ready(1, complete=False)
    run_layer(work)
    run_layer(work)
    work.set_layers_ready(0, complete=True)
    assert not work.is_over


def test_gates_come_too_late_once_everything_is_loaded() -> None:
    work = work_of("a")
    work.set_gates((Gate(batch_id="a", num_layers=1),))
    assert work.queue.batch("a").gate == 1
    work.set_layers_ready(0, complete=True)
    work.set_gates((Gate(batch_id="a", num_layers=2),))
    assert work.queue.batch("a").gate == 1


def test_halted_it_runs_nothing_and_closed_it_has_nothing() -> None:
    work = work_of("a")
    work.set_layers_ready(1, complete=False)
    work.next()
    work.halt()
    assert work.next() is None
    assert [b.batch_id for b in work.close()] == ["a"]
    assert work.batches == {}
