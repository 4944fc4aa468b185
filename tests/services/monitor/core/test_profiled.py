"""What a profile says of an instance, in the verdict."""

from __future__ import annotations

import pytest

from services.monitor.core.demand import DemandSettings, ModelDemand
from services.monitor.core.policy import DemandPolicy
from shared.step_fit import DensePoint, StepFit
from tests.records import profile
from tests.services.monitor.core.reports import queue, report

POLICY = DemandPolicy(utilisation=1.0, down_window_s=0.0, prefill_tokens_per_s=10.0, slack_s=1.0)


def profiled(**changes: object) -> ModelDemand:
    demand = ModelDemand(POLICY)
    demand.profile = profile(**changes)
    return demand


@pytest.mark.parametrize(("requests", "tokens_per_s", "desired"), [(10, 1000.0, 1), (1, 500.0, 1)])
def test_speed_is_that_at_the_length_of_the_prompts_that_come(requests: int, tokens_per_s: float, desired: int) -> None:
    demand = profiled()
    demand.on_load(report(prefill_tokens_per_s=77.0), 0.0)
    demand.on_queue("g", queue(1000, arrived_requests=requests), 0.0)
    demand.colocated(0.0, 1)
    assert demand.tokens_per_s == pytest.approx(tokens_per_s)


def test_the_prompts_of_the_last_minute_say_how_long_prompts_are() -> None:
    demand = profiled()
    demand.on_load(report(), 0.0)
    short, long = 1_000_000, 0
    demand.on_queue("g", queue(200 * short, arrived_requests=short), 0.0)
    of_short = demand.tokens_per_s
    for second in range(600):
        long += 10
        arrived = 200 * short + 8000 * long
        demand.on_queue("g", queue(arrived, arrived_requests=short + long), float(second))
    alone = profiled()
    alone.on_queue("g", queue(8000, arrived_requests=1), 0.0)
    assert demand.tokens_per_s == pytest.approx(alone.tokens_per_s)
    assert demand.tokens_per_s != pytest.approx(of_short)
    # And while none comes, they are as long as the last ones.
    demand.on_queue("g", queue(arrived, arrived_requests=short + long), 6000.0)
    assert demand.tokens_per_s == pytest.approx(alone.tokens_per_s)


def test_a_profile_goes_before_the_figure_that_is_configured_and_what_is_reported() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(prefill_tokens_per_s=77.0), 0.0)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(3000, queued_tokens=3000, inflight=30), 0.1)
    assert demand.colocated(0.1, 1).desired == 30  # no more than requests, at 10 tokens/s
    demand.profile = profile()
    assert demand.colocated(0.1, 1).desired == 3


def test_what_one_instance_can_decode_follows_from_the_contexts_that_run() -> None:
    demand = profiled()
    # A step of n requests of 100 tokens takes 10 + n (1 + 1) ms: 20 within 50 ms.
    demand.on_load(report(running_requests=30, running_tokens=3000), 0.0)
    assert demand.colocated(0.0, 1, DemandSettings(slo_tbt_s=0.05)).needed == pytest.approx(1.5)
    # Of 400 tokens: 10 + n (1 + 4) ms.
    demand.on_load(report(running_requests=30, running_tokens=12_000), 0.0)
    assert demand.colocated(0.0, 1, DemandSettings(slo_tbt_s=0.05)).needed == pytest.approx(30 / 8)


def test_where_steps_are_no_line_an_instance_decodes_as_many_as_a_step_takes_within_the_objective() -> None:
    """10 ms up to 16 requests, 2 ms for each more; the straight line beside it says 20."""
    steps = StepFit(
        dense=(DensePoint(num_tokens=16, seconds=0.01), DensePoint(num_tokens=116, seconds=0.21)),
        prompts_s=0.0,
        prompt_token_s=0.0,
        pair_s=0.0,
        decodes_s=0.0,
        request_s=0.0,
        context_token_s=0.0,
        error=1e5,
    )
    demand = profiled(step_fit=steps)
    demand.on_load(report(running_requests=72, running_tokens=7200), 0.0)
    assert demand.colocated(0.0, 1, DemandSettings(slo_tbt_s=0.05)).needed == pytest.approx(72 / 36, rel=0.02)


def test_until_an_instance_has_loaded_its_profile_says_how_long_that_takes() -> None:
    slow, quick = profiled(load=profile().load[:1]), profiled()
    for demand in (slow, quick):
        demand.on_load(report(), 0.0)
        demand.colocated(0.0, 1)
        demand.on_load(report(), 2.5)
    # Loads from a host's memory take 0.5 s, from disk 4 s: an idle instance is kept for twice that.
    assert quick.colocated(2.5, 1).desired == 0
    assert slow.colocated(2.5, 1).desired == 1


def test_without_load_or_reports_there_is_a_verdict_too() -> None:
    assert profiled().colocated(0.0, 0).desired == 0
