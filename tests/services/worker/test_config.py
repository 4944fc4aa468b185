"""The worker's settings."""

from __future__ import annotations

import re

import pytest

from services.worker.config import MIB, WorkerConfig
from shared.settings import SettingsError


def test_an_empty_environment_gives_a_worker_that_can_run() -> None:
    config = WorkerConfig.from_env({})
    assert config.engine == "torch"
    assert config.device == "cpu"
    assert re.fullmatch(r"[A-Za-z0-9_-]+", config.worker_id), "it becomes part of a subject"
    assert config.max_queued_tokens == 4 * config.max_batch_tokens


def test_units_are_converted() -> None:
    config = WorkerConfig.from_env(
        {
            "BLITZ_WORKER_ENGINE": "mock",
            "BLITZ_WORKER_ARENA_MIB": "3",
            "BLITZ_WORKER_KV_MIB": "5",
            "BLITZ_MOCK_LAYER_BASE_MS": "2.5",
            "BLITZ_MOCK_LAYER_PER_TOKEN_US": "10",
            "BLITZ_MOCK_STEP_MS": "1",
        }
    )
    assert (config.arena_bytes, config.kv_bytes) == (3 * MIB, 5 * MIB)
    timing = config.mock
    assert (timing.layer_base_s, timing.layer_per_token_s, timing.step_overhead_s) == pytest.approx(
        (0.0025, 1e-5, 1e-3)
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BLITZ_WORKER_ENGINE", "magic"),
        ("BLITZ_WORKER_DEVICE", "abacus"),
        ("BLITZ_WORKER_ARENA_MIB", "0"),
        ("BLITZ_WORKER_KV_MIB", "much"),
        ("BLITZ_WORKER_BLOCK_SIZE", "0"),
        ("BLITZ_WORKER_STALL_S", "0"),
        ("BLITZ_WORKER_DRAIN_TIMEOUT_S", "-1"),
        ("BLITZ_HEALTH_PORT", "65536"),
        ("BLITZ_DIE_WITH_PARENT", "perhaps"),
    ],
)
def test_a_bad_value_is_refused_with_its_variable_and_value(variable: str, value: str) -> None:
    with pytest.raises(SettingsError) as refused:
        WorkerConfig.from_env({variable: value})
    assert variable in refused.value.message
    assert value in refused.value.message
