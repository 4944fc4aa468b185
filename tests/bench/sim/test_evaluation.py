"""What is asked of systems side by side."""

from __future__ import annotations

from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.sim.cluster import known_cluster
from bench.sim.evaluation import Evaluator
from bench.sim.latencies import LOCAL_NATS
from bench.sim.models import known_model
from bench.sim.run import simulate
from bench.sim.setup import Setup
from bench.systems import SYSTEMS, Split
from bench.traces.request import Trace, TraceRequest


def prompt_of(num_tokens: int) -> tuple[PlannedRequest, ...]:
    return plan_requests(Trace("one", (TraceRequest(0.0, num_tokens, 1),)), Shape())


def test_the_longest_prompt_within_reach_is_in_time_on_an_idle_instance() -> None:
    setup = Setup(cluster=known_cluster("b"), model=known_model("llama3-8b", "a100"))
    evaluator = Evaluator(setup, Trace("none", ()), Shape(), lambda _line: None)
    longest = max(n for n in range(2000, 8000, 50) if evaluator.within_reach(prompt_of(n)))
    (record,) = simulate(setup, SYSTEMS["static-full"], prompt_of(longest), split=Split(8, 8)).records
    assert record.ttft_s is not None
    assert 0.95 < (record.ttft_s - LOCAL_NATS.submit_s - LOCAL_NATS.tokens_s) / setup.model.slo_ttft_s < 1
