"""What a pair asks to be split, and whether the answer comes in time."""

from __future__ import annotations

import math

import msgspec
import pytest

from services.planner.core.live.request import MAX_BATCHES, SplitRequest, gates_in_time, split_request
from services.planner.core.live.split import assign
from shared.errors import BadRequest
from shared.messages.live import Gate, PlanSplit, SplitBatch
from shared.zigzag.playback import Job
from tests.services.planner.core.live.some_pairs import assignment

NOW_S = 100.0
"""Since the plan."""


def ask(*costs: float, **changes: object) -> PlanSplit:
    batches = tuple(SplitBatch(batch_id=f"b{i}", layer_s=cost) for i, cost in enumerate(costs))
    asked = PlanSplit(pair_id="plan-p-w1", batches=batches, source_free_s=0.5, pull_s=0.01)
    return msgspec.structs.replace(asked, **changes)


def found(asked: PlanSplit, *ready_s: float, **changes: object) -> SplitRequest:
    made = split_request(asked, msgspec.structs.replace(assignment(), **changes), NOW_S, ready_s=ready_s)
    assert made is not None
    return made


def test_times_count_from_now_and_never_fall() -> None:
    made = found(ask(0.1, 0.2), layers_ready_s=(100.0, 102.0, 101.0), loaded_s=105.0)
    assert made.jobs == (Job("b0", 0.1), Job("b1", 0.2))
    assert made.loaded_at == (0.0, 2.0, 5.0)
    assert made.source_free_at == 0.5
    assert made.pull_time == 0.01
    assert found(ask(0.1), layers_ready_s=(102.0, 101.0, 103.0)).loaded_at == (2.0, 2.0, 3.0)


def test_a_source_that_is_free_is_free_now() -> None:
    assert found(ask(0.1, source_free_s=-9.0)).source_free_at == 0.0


def test_the_last_layer_counts_once_everything_is_there() -> None:
    assert found(ask(0.1), layers_ready_s=(101.0, 102.0), loaded_s=104.0).loaded_at == (1.0, 4.0)


def test_layers_that_come_late_make_the_others_late() -> None:
    plan = {"layers_ready_s": (97.0, 99.0, 101.0, 103.0), "loaded_s": 104.0}
    # The second came 0.5 s late.
    assert found(ask(0.1), 97.0, 99.5, **plan).loaded_at == (0.0, 0.0, 1.5, 4.5)
    # The second is 1 s late and not here yet.
    assert found(ask(0.1), 97.0, **plan).loaded_at == (0.0, 0.0, 2.0, 5.0)
    assert found(ask(0.1), **plan).loaded_at == (0.0, 2.0, 4.0, 7.0)
    # The third was 1.5 s early.
    assert found(ask(0.1), 95.5, 97.5, 99.5, **plan).loaded_at == (0.0, 0.0, 0.0, 2.5)
    # Every layer is there, and the head is not.
    assert found(ask(0.1), 93.0, 95.0, 97.0, 99.0, **plan).loaded_at == (0.0, 0.0, 0.0, 0.0)
    assert found(ask(0.1), 96.0, 97.0, 98.0, 99.5, **plan).loaded_at == (0.0, 0.0, 0.0, 0.5)


def test_without_batches_or_times_there_is_nothing_to_split() -> None:
    assert split_request(ask(), assignment(), NOW_S) is None
    assert split_request(ask(0.1), assignment(layers_ready_s=(), loaded_s=0.0), NOW_S) is None


def test_the_earliest_batches_are_split() -> None:
    made = found(ask(*[0.1] * (MAX_BATCHES + 5)))
    assert [job.batch_id for job in made.jobs] == [f"b{i}" for i in range(MAX_BATCHES)]


@pytest.mark.parametrize("layer_s", [0.0, -1.0, math.nan, math.inf])
def test_layers_take_time(layer_s: float) -> None:
    with pytest.raises(BadRequest, match=f"'b1' cannot take {layer_s!r}"):
        split_request(ask(0.1, layer_s), assignment(), NOW_S)


@pytest.mark.parametrize("changes", [{"pull_s": -0.1}, {"pull_s": math.nan}, {"source_free_s": math.inf}])
def test_times_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        split_request(ask(0.1, **changes), assignment(), NOW_S)


def test_a_batch_that_is_named_twice_is_refused() -> None:
    twice = (SplitBatch(batch_id="b", layer_s=0.1), SplitBatch(batch_id="b", layer_s=0.2))
    with pytest.raises(BadRequest, match="twice"):
        split_request(ask(batches=twice), assignment(), NOW_S)


JOBS = [Job(f"b{i}", cost) for i, cost in enumerate((8.0, 1.0, 1.0, 1.0, 4.0))]
LOADED_AT = [6.0 * (k + 1) for k in range(7)]


def test_gates_are_of_use_as_long_as_the_time_that_passed_costs_less_than_they_gain() -> None:
    split = assign(JOBS, LOADED_AT, time_limit_s=0)
    gain_s = split.free.mean - split.played.mean
    assert gain_s > 0, "these batches can be split better than the rules do"
    assert gates_in_time(split, 0.9 * gain_s) == tuple(
        Gate(batch_id=name, num_layers=layers) for name, layers in split.gates.items()
    )
    assert gates_in_time(split, 1.1 * gain_s) == ()


def test_a_split_that_gains_nothing_sets_no_gates() -> None:
    assert gates_in_time(assign([Job("a", 1.0), Job("b", 1.0)], LOADED_AT), 0.0) == ()
