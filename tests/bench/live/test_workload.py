from __future__ import annotations

import pytest

from bench.live.workload import Workload
from shared.errors import BadRequest


def test_prompts_are_equally_long_and_all_different() -> None:
    prompts = Workload("mock", num_prompts=12, prompt_tokens=64).prompts
    assert {len(prompt) for prompt in prompts} == {64}
    assert len(set(prompts)) == 12
    assert prompts == Workload("torch", num_prompts=12, prompt_tokens=64).prompts


def test_the_rate_brings_a_layer_in_ratio_layer_times() -> None:
    workload = Workload("mock", layer_s=0.01, ratio=6)
    assert workload.rate(4_000_000).seconds(4_000_000) == pytest.approx(0.06)
    assert workload.with_layer_s(0.02).rate(4_000_000).seconds(4_000_000) == pytest.approx(0.12)


def test_a_prompt_fills_a_batch_and_the_burst_fits_a_queue() -> None:
    workload = Workload("torch", num_prompts=12, prompt_tokens=64, output_tokens=4)
    env = workload.worker_env()
    assert env["BLITZ_WORKER_PREFILL_CHUNK"] == "64"
    assert 64 <= int(env["BLITZ_WORKER_MAX_BATCH_TOKENS"]) < 2 * 64
    assert int(env["BLITZ_WORKER_MAX_QUEUED_TOKENS"]) >= 12 * 64
    assert int(env["BLITZ_WORKER_MAX_RUNNING"]) >= 12
    assert "BLITZ_MOCK_LAYER_PER_TOKEN_US" not in env


def test_the_mock_takes_a_layer_time_for_a_prompts_layer() -> None:
    env = Workload("mock", prompt_tokens=64, layer_s=0.012).worker_env()
    assert float(env["BLITZ_MOCK_LAYER_PER_TOKEN_US"]) * 64 / 1e6 == pytest.approx(0.012)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_prompts": 1}, "num_prompts"),
        ({"num_layers": 0}, "num_layers"),
        ({"prompt_tokens": 3}, "not 3"),
        ({"layer_s": 0.0}, "layer_s"),
        ({"ratio": -1.0}, "ratio"),
    ],
)
def test_a_burst_that_measures_nothing_is_refused(settings: dict[str, float], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        Workload("mock", **settings)  # type: ignore[arg-type]


def test_a_link_slower_than_any_is_refused() -> None:
    with pytest.raises(BadRequest, match="no rate"):
        Workload("mock", layer_s=10, ratio=900).rate(4_000_000)
