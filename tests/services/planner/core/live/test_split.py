"""Splits: predictions that the playback meets, gates that are used only where they help, and good yardsticks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.core.live.bound import Problem, predict
from services.planner.core.live.ilp import improve
from services.planner.core.live.search import best_first_come_split, good_splits
from services.planner.core.live.split import assign
from shared.zigzag.playback import Job, play
from tests.wait_until import WAIT_S

UNEQUAL = Problem((1.0, 5.0, 3.0, 4.0), (0.0, 6.0, 12.0, 18.0, 24.0))


def jobs_of(costs: tuple[float, ...]) -> list[Job]:
    return [Job(f"b{i:02}", cost) for i, cost in enumerate(costs)]


def gates_of(split: tuple[int, ...]) -> dict[str, int]:
    return {f"b{i:02}": layers for i, layers in enumerate(split)}


@st.composite
def splits(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...]]:
    num_layers = draw(st.integers(1, 7))
    costs = draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.5, 7.0]), min_size=1, max_size=6))
    loads = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0]), min_size=num_layers, max_size=num_layers))
    source_free_at, pull_time = draw(st.sampled_from([0.0, 4.0, 20.0])), draw(st.sampled_from([0.0, 0.25]))
    problem = Problem(tuple(costs), tuple(itertools.accumulate(loads)), source_free_at, pull_time)
    return problem, tuple([draw(st.integers(0, num_layers)) for _ in costs])


@given(splits())
@settings(max_examples=600, deadline=None)
def test_any_split_played_back_meets_its_predicted_times(case: tuple[Problem, tuple[int, ...]]) -> None:
    problem, split = case
    played = play(
        jobs_of(problem.costs),
        problem.loaded_at,
        gates=gates_of(split),
        source_free_at=problem.source_free_at,
        pull_time=problem.pull_time,
    )
    for completion, predicted in zip(played.completions, predict(problem, split), strict=True):
        assert completion <= predicted + 1e-9


def test_the_prediction_of_the_worked_example_is_within_a_layer() -> None:
    problem = Problem((1.0,) * 7, tuple([6.0 * k for k in range(7)]))
    played = play(jobs_of(problem.costs), problem.loaded_at)
    # One layer of slack: the bound allows for a later batch's layer that runs when a layer arrives.
    assert sum(predict(problem, played.target_layers)) - sum(played.completions) <= 7


def test_the_papers_third_constraint_admits_what_cannot_be_done() -> None:
    # With 13 batches C3 as printed reads 6 * 2 <= 0 + (13 - 2 + 1) * (2 - 1) for T(1) = 0, T(2) = 2, and is met: it
    # counts on 12 later batches to fill the time, also when the source has long pulled them. The bound does not.
    problem = Problem((1.0,) * 13, (0.0, 6.0, 12.0))
    assert predict(problem, (0, 2, *[0] * 11))[1] >= 6.0 + 1.0 + 1.0


@given(splits())
@settings(max_examples=60, deadline=None)
def test_an_assignment_is_never_worse_than_none(case: tuple[Problem, tuple[int, ...]]) -> None:
    problem, _ = case
    jobs, busy, pull_time = jobs_of(problem.costs), problem.source_free_at, problem.pull_time
    assigned = assign(jobs, problem.loaded_at, source_free_at=busy, pull_time=pull_time)
    assert assigned.played.mean <= assigned.free.mean
    if assigned.gates:
        again = play(jobs, problem.loaded_at, gates=assigned.gates, source_free_at=busy, pull_time=pull_time)
        assert again.mean == assigned.played.mean < assigned.free.mean


def test_unequal_batches_gain_from_gates() -> None:
    assigned = assign(jobs_of(UNEQUAL.costs), UNEQUAL.loaded_at)
    assert assigned.free.mean == 23.75
    assert assigned.played.mean <= 22.5
    assert assigned.split is not None
    assert assigned.split.predicted_mean >= assigned.played.mean


def test_equal_batches_need_no_gates() -> None:
    assigned = assign(jobs_of((2.0,) * 5), UNEQUAL.loaded_at)
    assert assigned.split is None
    assert assigned.gates == {}


def test_no_batches_need_no_assignment() -> None:
    assert assign([], UNEQUAL.loaded_at).played.completions == ()


def test_the_integer_program_finds_the_shapes_that_the_search_is_not_told() -> None:
    start = (0,) * 4
    found = improve(UNEQUAL, start, WAIT_S, keep_shapes=False)
    assert found is not None
    assert play(jobs_of(UNEQUAL.costs), UNEQUAL.loaded_at, gates=gates_of(found)).mean < 23.75
    assert improve(UNEQUAL, start, WAIT_S) == start


def test_a_bound_of_nodes_instead_of_time_finds_the_same_each_time() -> None:
    problem = Problem((3.0, 2.0, 8.0, 6.0, 4.0, 4.0, 8.0, 8.0), tuple([6.0 * layer for layer in range(8)]))
    start = good_splits(problem)[0]
    assert improve(problem, start, 0.0, max_nodes=0) == start, "no node is visited, and the solver keeps what it has"
    found = improve(problem, start, 0.0, max_nodes=1)
    assert found not in {None, start}
    assert found == improve(problem, start, 1e-9, max_nodes=1)
    assert assign(jobs_of(problem.costs), problem.loaded_at, max_nodes=1).split is not None


def test_the_integer_program_runs_without_a_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen.__init__", refuse)
    assert improve(UNEQUAL, good_splits(UNEQUAL)[0], WAIT_S) is not None


def test_the_best_first_come_split_is_the_best_of_all() -> None:
    for costs in itertools.product((1.0, 2.5, 4.0), repeat=4):
        problem = Problem(costs, (0.0, 3.0, 7.0, 8.0), source_free_at=2.0)
        totals = []
        for chosen in itertools.product((False, True), repeat=4):
            source, target, total = 2.0, 0.0, 0.0
            for cost, at_target in zip(costs, chosen, strict=True):
                if at_target:
                    for loaded in problem.loaded_at:
                        target = max(target, loaded) + cost
                    total += target
                else:
                    source += cost * 4
                    total += source
            totals.append(total / 4)
        assert best_first_come_split(problem)[0] == pytest.approx(min(totals))
        assert best_first_come_split(problem, limit=2)[0] >= min(totals) - 1e-9
