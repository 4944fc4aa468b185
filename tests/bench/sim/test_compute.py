"""What steps take in the simulator, and in the mock engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sim.compute import Compute
from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.engine.mock.played import played_step_s
from shared.profile import Profile
from tests.bench.sim.instances import PROFILES, sequence
from tests.services.worker.engine.batches import forward, slice_of


@given(
    st.sampled_from(PROFILES),
    st.lists(st.tuples(st.integers(1, 700), st.integers(1, 5)), min_size=1, max_size=8),
    st.sampled_from([0.75, 1.0, 1.25]),
)
def test_batches_take_what_the_mock_engine_plays(
    profile: Profile, lengths: list[tuple[int, int]], scale: float
) -> None:
    compute = Compute(profile, scale=scale, overhead_s=1.0)
    scheduler = Scheduler(SchedulerConfig(num_blocks=1000, block_size=16, max_batch_tokens=600))
    for number, (prompt_tokens, max_tokens) in enumerate(lengths):
        scheduler.add(sequence(f"r{number}", prompt_tokens, max_tokens))
    while (batch := scheduler.schedule()) is not None:
        slices = [slice_of(0, (0,) * p.num_tokens, p.start, p.sequence.block_table, p.sample) for p in batch.slices]
        assert compute.batch_s(batch) == scale * played_step_s(profile, forward(*slices))
        scheduler.complete(batch, [Sampled(0) for piece in batch.slices if piece.sample])


@given(st.sampled_from(PROFILES), st.integers(1, 64), st.integers(1, 100_000), st.integers(1, 300), st.floats(0, 20))
def test_a_run_of_decode_steps_is_those_steps(
    profile: Profile, num_requests: int, context_tokens: int, steps: int, passed_s: float
) -> None:
    compute = Compute(profile, overhead_s=0.001)
    run = compute.decodes(3.0, num_requests, context_tokens, steps)
    ends_s, now_s = [], 3.0
    for step in range(steps):
        now_s += compute.step_s(0, 0, num_requests, context_tokens + step * num_requests) + 0.001
        ends_s.append(now_s)
    assert [run.ended_s(step) for step in range(1, steps + 1)] == pytest.approx(ends_s, rel=1e-9)
    assert run.ends_s(steps) == [run.ended_s(step) for step in range(1, steps + 1)]
    ended = run.num_ended(3.0 + passed_s)
    assert ended == sum(run.ended_s(step) <= 3.0 + passed_s for step in range(1, steps + 1))
    rest = run.after(ended)
    assert rest.ended_s(steps - ended) == pytest.approx(run.ended_s(steps), rel=1e-9)
    assert run.num_ended(run.ended_s(ended)) == ended
    assert sum(run.steps_s(0, steps)) == pytest.approx(run.ended_s(steps) - 3.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="take"):
        Compute(PROFILES[0], scale=scale)
