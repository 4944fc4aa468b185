"""Playback: the worked example, and what any schedule must keep to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadRequest
from shared.zigzag.batch import Side
from shared.zigzag.playback import Job, Lateness, Played, play
from shared.zigzag.queue import Policy
from shared.zigzag.sharing import share_evenly

EQUAL = [Job(f"b{i}", 1) for i in range(7)]
EVERY_SIX = [6 * k for k in range(7)]


@pytest.mark.parametrize(
    ("policy", "completions", "at_target"),
    [
        (Policy.ZIGZAG, (7, 12, 17, 21, 24, 27, 29), (0, 2, 2, 3, 4, 4, 5)),
        (Policy.BEST_EFFORT, (7, 13, 19, 25, 31, 37, 42), (0, 1, 1, 1, 1, 1, 2)),
        (Policy.OVERLAP, (7, 37, 14, 21, 28, 35, 42), (0, 7, 0, 0, 0, 0, 0)),
        (Policy.STOP_THE_WORLD, (7, 14, 21, 28, 35, 42, 43), (0, 0, 0, 0, 0, 0, 7)),
    ],
)
def test_worked_example(policy: Policy, completions: tuple[int, ...], at_target: tuple[int, ...]) -> None:
    played = play(EQUAL, EVERY_SIX, policy)
    assert played.completions == completions
    assert played.target_layers == at_target


def test_twelve_prompts_over_thirty_two_layers_take_two_thirds_of_stop_the_world() -> None:
    jobs = [Job(f"b{i:02}", 1) for i in range(12)]
    loaded_at = [6 * k for k in range(32)]
    zigzag, stop = play(jobs, loaded_at), play(jobs, loaded_at, Policy.STOP_THE_WORLD)
    assert round(zigzag.mean / stop.mean, 2) == 0.68
    assert round(zigzag.worst / stop.worst, 2) == 0.69


def test_without_a_target_the_source_serves_alone() -> None:
    assert play(EQUAL, [1000 + k for k in range(7)]).completions == tuple(7 * i for i in range(1, 8))


def test_a_target_with_everything_halves_the_time() -> None:
    assert play(EQUAL[:4], [0] * 7).completions == (7, 7, 14, 14)


def test_a_busy_source_leaves_the_first_batches_to_the_target() -> None:
    played = play(EQUAL[:2], [0, 1, 2, 3], source_free_at=3)
    # The target has everything and finishes what it has in hand; the source takes the next one.
    assert played.target_layers == (4, 0)
    assert played.completions == (4, 7)


def test_a_pull_with_activations_takes_the_sources_time_and_a_whole_batch_does_not() -> None:
    played = play(EQUAL, EVERY_SIX, pull_time=0.5)
    assert played.completions[0] == 7
    assert played.completions[1] == 12.5
    assert play([Job("a", 1)], EVERY_SIX, pull_time=0.5).completions == (7,)


def test_a_gate_delays_the_source() -> None:
    jobs = EQUAL[:2]
    assert play(jobs, EVERY_SIX, gates={"b0": 2}).completions[0] == 7 + 5
    assert play(jobs, EVERY_SIX, gates={"b0": 2}, lateness=Lateness((0.0, 1.0), 0.5)).completions[0] == 1.5 + 6


def test_arrivals_are_served_in_order_before_and_after_everything_is_loaded() -> None:
    jobs = [Job("a", 1), Job("b", 1, arrival=2), Job("c", 1, arrival=30), Job("d", 1, arrival=30)]
    played = play(jobs, [0, 1, 2, 3])
    assert list(played.completions) == [4, 6, 34, 34]
    assert {run.side for run in played.runs if run.batch_id in "cd"} == {Side.SOURCE, Side.TARGET}


def test_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadRequest):
        play(EQUAL, [0, 2, 1])
    with pytest.raises(BadRequest):
        play(EQUAL, EVERY_SIX, pull_time=-1)
    with pytest.raises(BadRequest):
        play([Job("a", 1), Job("a", 1)], EVERY_SIX)


def test_sharing_gives_each_batch_to_the_side_that_is_free_first() -> None:
    shares = share_evenly([("a", 3.0), ("b", 1.0), ("c", 1.0)], source_busy=0.0, target_busy=2.0)
    assert shares == [("a", Side.SOURCE), ("b", Side.TARGET), ("c", Side.TARGET)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Job], list[int], dict[str, int]]:
    num_layers = draw(st.integers(1, 6))
    costs = draw(st.lists(st.integers(1, 5), max_size=6))
    jobs = [Job(f"b{i}", cost, draw(st.integers(0, 20))) for i, cost in enumerate(costs)]
    loads = draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers))
    gated = {job.batch_id: draw(st.integers(0, num_layers)) for job in jobs} if draw(st.booleans()) else {}
    return jobs, list(itertools.accumulate(loads)), gated


def check(played: Played, jobs: list[Job], loaded_at: list[int]) -> None:
    """Every layer once, in order, on loaded weights, one at a time per side."""
    layers = sorted([layer for run in played.runs for layer in run.layers()], key=lambda layer: layer[3])
    for job, completion, at_target in zip(jobs, played.completions, played.target_layers, strict=True):
        own = sorted([layer for layer in layers if layer[1] == job.batch_id], key=lambda layer: layer[2])
        assert [layer[2] for layer in own] == list(range(len(loaded_at)))
        assert [layer[0] for layer in own].count(Side.TARGET) == at_target
        assert own[0][3] >= job.arrival
        assert own[-1][4] == pytest.approx(completion)
        for earlier, later in itertools.pairwise(own):
            assert later[3] >= earlier[4] - 1e-9
    for side in Side:
        own = [layer for layer in layers if layer[0] is side]
        for earlier, later in itertools.pairwise(own):
            assert later[3] >= earlier[4] - 1e-9
    assert all(start >= loaded_at[layer] for side, _, layer, start, _ in layers if side is Side.TARGET)


@given(cases(), st.sampled_from(Policy), st.integers(0, 12), st.sampled_from([0.0, 0.5]))
@settings(max_examples=300, deadline=None)
def test_every_schedule_runs_each_layer_once_in_order_on_loaded_weights(
    case: tuple[list[Job], list[int], dict[str, int]], policy: Policy, source_free_at: int, pull_time: float
) -> None:
    jobs, loaded_at, gates = case
    if policy is not Policy.ZIGZAG:
        gates = {}
    played = play(jobs, loaded_at, policy, gates=gates, source_free_at=source_free_at, pull_time=pull_time)
    check(played, jobs, loaded_at)
    if policy in {Policy.OVERLAP, Policy.STOP_THE_WORLD}:
        assert set(played.target_layers) <= {0, len(loaded_at)}, "no batch is shared"
