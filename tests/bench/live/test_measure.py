"""The whole measurement, small: what matters is that it is one, not how fast anything is."""

from __future__ import annotations

import fcntl

import pytest

from bench.lab import system
from bench.lab.network import LOCK
from bench.lab.plan import PREFIX
from bench.live.measure import measure
from bench.live.modes import LIVE_MODES, PLAIN
from bench.live.workload import EngineKind, Workload

pytestmark = [
    pytest.mark.root,
    pytest.mark.stack,
    pytest.mark.ucx,
    pytest.mark.skipif(bool(system.missing()), reason=system.missing() or "a lab can be made"),
]


@pytest.fixture(autouse=True)
def _one_lab_at_a_time() -> None:
    try:
        with LOCK.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pytest.skip("another lab runs on this machine")


def workload(engine: EngineKind) -> Workload:
    # The burst has to last longer than a busy machine needs to form a pair; torch's layers take what they take.
    return Workload(engine, num_prompts=12, num_layers=6, prompt_tokens=128 if engine == "torch" else 32)


@pytest.mark.parametrize("engine", ["mock", "torch"])
async def test_every_mode_is_measured_and_gives_the_tokens_of_an_idle_instance(engine: EngineKind) -> None:
    result = await measure(workload(engine))
    assert result.modes == LIVE_MODES
    assert result.tokens_identical
    for run in result.runs:
        assert run.planned_by == "planner"
        assert run.live is not None
        assert sum(run.timeline.layers) > 0
    assert not [name for name in [*system.namespaces(), *system.links()] if name.startswith(PREFIX)]


async def test_without_live_scaling_no_pair_is_formed() -> None:
    result = await measure(workload("mock"), live=False)
    assert result.modes == (PLAIN,)
    assert result.tokens_identical
    (run,) = result.runs
    assert run.live is None
    assert run.planned_by == "rate"
