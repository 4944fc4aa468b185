"""What the benchmark of decisions does to the control plane, and that it is undone."""

from __future__ import annotations

import pytest

from bench.decisions.population import Population
from bench.decisions.states import States
from bench.decisions.stopwatch import Decision

GPUS, MODELS = 80, 4


def test_half_of_the_workers_serve_and_the_first_model_has_a_third_of_them() -> None:
    there = Population(GPUS, MODELS, seed=1)
    assert len(there.workers) == GPUS
    assert len(there.instances) == GPUS // 2
    assert list(there.counts().values()) == [13, 9, 9, 9]
    holders = [worker for worker in there.workers.values() if worker.copies]
    assert len({worker.info.host for worker in holders}) == MODELS


@pytest.mark.parametrize("state", ["quiet", "one_more", "a_tenth", "a_death", "a_burst"])
def test_after_a_state_all_is_as_before(state: str) -> None:
    states = States(GPUS, MODELS, seed=1)
    before = states.counts()
    for _ in range(3):
        getattr(states, state)()
    assert states.counts() == before
    assert states.num_leased == 0


def test_every_service_decides_in_every_state_that_asks_for_instances() -> None:
    states = States(GPUS, MODELS, seed=1)
    states.everything(2)
    measured = states.stopwatch.times_us()
    assert all(times for times in measured.values())
    for state in ("one more", "a tenth", "a death", "a burst"):
        assert len(measured[Decision(state, "planner", "round")]) == 2
    assert len(measured[Decision("quiet", "pool", "heartbeat")]) == 2 * GPUS
    assert len(measured[Decision("a burst", "planner", "demand")]) == 2 * MODELS
    assert {decision.service for decision in measured} == {"gateway", "monitor", "planner", "pool"}


def test_in_a_quiet_cluster_nothing_is_to_do() -> None:
    states = States(GPUS, MODELS, seed=1)
    states.quiet()
    assert states.num_wishes == 0
    assert Decision("quiet", "pool", "leases") not in states.stopwatch.times_us()
