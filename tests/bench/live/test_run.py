from __future__ import annotations

import msgspec
import pytest

from bench.lab.errors import LabFailed
from bench.live.modes import BEST_EFFORT, PLAIN, ZIGZAG
from tests.bench.live.samples import assignment, live_record, record, run

TTFT_S = (0.05, 0.08, 0.11, 0.2)


def test_figures_are_of_the_clients_times() -> None:
    made = run(ZIGZAG, TTFT_S)
    assert made.mean_s == pytest.approx(0.11)
    assert made.worst_s == 0.2
    assert 0.11 < made.p99_s < 0.2
    assert made.serving_s == pytest.approx(0.105)


def test_layers_are_counted_while_half_of_the_prompts_wait() -> None:
    # Two of four wait until the third first token, at 0.11 s: one bucket from 0.025 s on.
    assert run(ZIGZAG, TTFT_S).layers_per_s == pytest.approx(6 / 0.05)


def test_the_planners_times_are_preferred_to_the_rate() -> None:
    by_rate, planned = run(ZIGZAG, TTFT_S), run(ZIGZAG, TTFT_S, assigned=assignment())
    assert (by_rate.planned_by, planned.planned_by) == ("rate", "planner")
    assert run(ZIGZAG, TTFT_S, assigned=assignment(ready_s=())).planned_by == "rate"
    late = run(ZIGZAG, TTFT_S, assigned=assignment(ready_s=(0.2, 0.2, 0.2, 0.2)))
    assert late.planned.mean_s > planned.planned.mean_s
    assert late.recorded == planned.recorded


def test_other_tokens_than_an_idle_instances_are_noticed() -> None:
    assert all(run(ZIGZAG, TTFT_S).identical)
    assert run(ZIGZAG, TTFT_S, text="abce").identical == (False,) * 4


def test_a_run_without_the_pair_that_was_asked_for_does_not_count() -> None:
    with pytest.raises(LabFailed, match="because"):
        run(ZIGZAG, TTFT_S, made=record(ZIGZAG, live=()))


@pytest.mark.parametrize("other", [{"outcome": "failed", "reason": "it broke"}, {"policy": "best_effort"}])
def test_a_pair_that_failed_or_followed_another_policy_does_not_count(other: dict[str, str]) -> None:
    pair = msgspec.structs.replace(live_record(ZIGZAG), **other)
    with pytest.raises(LabFailed, match=next(iter(other.values()))):
        run(ZIGZAG, TTFT_S, made=record(ZIGZAG, live=(pair,)))


def test_a_pair_where_none_was_wanted_does_not_count() -> None:
    with pytest.raises(LabFailed, match="was not to scale live"):
        run(PLAIN, TTFT_S, made=record(PLAIN, live=(live_record(BEST_EFFORT),)))


def test_modes_ask_for_what_they_are() -> None:
    assert (ZIGZAG.live, PLAIN.live) == ("always", "never")
    assert BEST_EFFORT.planner_env == {"BLITZ_PLANNER_LIVE_POLICY": "best_effort"}
    assert PLAIN.planner_env == {}
