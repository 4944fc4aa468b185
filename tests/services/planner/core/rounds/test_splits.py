"""Splits of pairs' batches in virtual time."""

from __future__ import annotations

import pytest

from services.planner.core.live.split import assign
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.pair_record import LivePair
from shared.errors import Conflict, NotFound
from shared.messages.live import PlanSplit, SplitBatch
from tests.records import model, worker_record
from tests.services.planner.core.driven import Driven

UNEQUAL = (8.0, 1.0, 1.0, 1.0, 4.0)


def paired() -> tuple[Driven, LivePair]:
    """One instance serves, and shares its batches with another one that takes about 10 s to load."""
    record = model("m", min_instances=0, weights_bytes=int(10 * 10e9 / 8))
    workers = [
        worker_record("w0", record, "serving", host="h0", arena_bytes=1 << 40),
        worker_record("w1", host="h1", arena_bytes=1 << 40),
    ]
    made = Driven([record], workers)
    request = ScaleRequest("m", 2, made.now_s, "asked", live="always", by_hand=True)
    made.planner.rounds.ask(request, made.moment)
    made.round()
    (operation,) = made.planner.operations.running()
    (pair,) = operation.pairs.values()
    return made, pair


def asks(pair: LivePair) -> PlanSplit:
    batches = tuple(SplitBatch(batch_id=f"b{i}", layer_s=layer_s) for i, layer_s in enumerate(UNEQUAL))
    return PlanSplit(pair_id=pair.pair_id, batches=batches, source_free_s=0.0, pull_s=0.0)


@pytest.mark.parametrize(("elapsed_s", "told"), [(0.005, True), (100.0, False)])
def test_gates_are_the_next_revision_unless_they_come_too_late(elapsed_s: float, told: bool) -> None:
    made, pair = paired()
    asking, request = made.planner.splits.request(asks(pair), made.now_s)
    assert asking is pair
    assert request is not None
    found = assign(request.jobs, request.loaded_at, source_free_at=request.source_free_at, max_nodes=1)
    assert found.gates
    revision = made.planner.splits.gates(pair, found, elapsed_s, made.now_s + elapsed_s)
    assert (revision is not None) == told
    if revision is not None:
        assert (revision.revision, {g.batch_id: g.num_layers for g in revision.gates}) == (1, dict(found.gates))


def test_a_target_that_has_everything_and_a_pair_that_is_over_get_none() -> None:
    made, pair = paired()
    _, request = made.planner.splits.request(asks(pair), made.now_s)
    assert request is not None
    found = assign(request.jobs, request.loaded_at, max_nodes=0)
    target = pair.assignment.target
    made.report(pair.assignment.plan_id, "loaded", target.worker_id, target.instance_id)
    assert made.planner.splits.gates(pair, found, 0.0, made.now_s) is None
    pair.fail("its source is gone")
    with pytest.raises(Conflict, match="failed"):
        made.planner.splits.request(asks(pair), made.now_s)


def test_an_unknown_pair_is_told_so() -> None:
    made, pair = paired()
    made.planner.operations.reset()
    with pytest.raises(NotFound):
        made.planner.splits.request(asks(pair), made.now_s)
