from __future__ import annotations

import pytest

from bench.lab.errors import LabFailed
from bench.live.modes import STOP_THE_WORLD
from bench.live.prediction import LoadTimes, busy_until_s, predict
from bench.live.workload import Workload
from shared.messages.live import ZigzagAssignment
from shared.zigzag.queue import Policy
from tests.bench.live.samples import BURST_AT_S, assignment, record

EXAMPLE = Workload("mock", num_prompts=7, num_layers=7, layer_s=0.01)
EVERY_SIX = LoadTimes(tuple(0.06 * k for k in range(7)), 0.36)


@pytest.mark.parametrize(
    ("policy", "completions"),
    [
        (Policy.ZIGZAG, (7, 12, 17, 21, 24, 27, 29)),
        (Policy.BEST_EFFORT, (7, 13, 19, 25, 31, 37, 42)),
        (Policy.OVERLAP, (7, 37, 14, 21, 28, 35, 42)),
        (Policy.STOP_THE_WORLD, (7, 14, 21, 28, 35, 42, 43)),
        (None, (7, 14, 21, 28, 35, 42, 49)),
    ],
)
def test_a_burst_completes_as_the_worked_example_in_seconds(
    policy: Policy | None, completions: tuple[int, ...]
) -> None:
    played = predict(EXAMPLE, policy, EVERY_SIX, waiting=3)
    assert played.completions_s == pytest.approx([each / 100 for each in completions])
    assert played.worst_s == pytest.approx(completions[-1] / 100)
    assert played.mean_s == pytest.approx(sum(completions) / 700)
    assert completions[-2] / 100 < played.p99_s < played.worst_s


def test_one_instance_alone_runs_its_own_rate_of_layers_and_two_run_more() -> None:
    assert predict(EXAMPLE, None, EVERY_SIX, waiting=3).layers_per_s == pytest.approx(100)
    # Until the fifth first token at 24: 24 layers by the source, and the target idles only once it has caught up.
    assert 150 < predict(EXAMPLE, Policy.ZIGZAG, EVERY_SIX, waiting=3).layers_per_s <= 200


def test_six_of_twelve_wait_until_the_seventh_first_token() -> None:
    assert busy_until_s([float(each) for each in range(1, 13)], 6) == 7.0
    assert busy_until_s([3.0, 1.0, 2.0], 3) == 1.0
    assert busy_until_s([1.0], 2) == 0.0


def test_the_target_finishes_nothing_before_it_has_everything() -> None:
    assert LoadTimes((0.1, 0.2, 0.3), 0.5).for_playback == (0.1, 0.2, 0.5)
    assert LoadTimes((0.1, 0.2, 0.3), 0.25).for_playback == (0.1, 0.2, 0.3)


def test_layers_out_of_order_are_ready_with_the_one_before() -> None:
    assert LoadTimes((0.2, 0.1, 0.3), 0.3).for_playback == (0.2, 0.2, 0.3)


def test_planned_times_are_the_planners_since_the_burst() -> None:
    times = LoadTimes.of_assignment(assignment(), 1.01)
    assert times is not None
    assert times.layers_s == pytest.approx((1.02, 1.04, 1.06, 1.08))
    assert times.loaded_s == pytest.approx(1.09)


def test_an_assignment_may_tell_no_times() -> None:
    untold: ZigzagAssignment = assignment(ready_s=())
    assert LoadTimes.of_assignment(untold, BURST_AT_S) is None


def test_recorded_times_count_from_the_burst_and_not_from_the_trigger() -> None:
    times = LoadTimes.of_record(record(STOP_THE_WORLD), BURST_AT_S, num_layers=4)
    assert times.layers_s == pytest.approx((0.03, 0.05, 0.07, 0.09))
    assert times.loaded_s == pytest.approx(0.1)


def test_a_record_without_every_layer_is_refused() -> None:
    with pytest.raises(LabFailed, match="4 layers ready at worker-1, not of 5"):
        LoadTimes.of_record(record(STOP_THE_WORLD), BURST_AT_S, num_layers=5)


def test_a_rate_brings_unit_after_unit() -> None:
    times = LoadTimes.of_rate([100, 100, 50], 1000.0, num_layers=2)
    assert times.layers_s == pytest.approx((0.1, 0.2))
    assert times.loaded_s == pytest.approx(0.25)
