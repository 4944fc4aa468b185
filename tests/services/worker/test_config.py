"""The worker's settings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from services.worker.config import MIB, WorkerConfig
from shared.settings import SettingsError


def test_an_empty_environment_gives_a_worker_that_can_run() -> None:
    config = WorkerConfig.from_env({})
    assert config.engine == "torch"
    assert config.device == "cpu"
    assert re.fullmatch(r"[A-Za-z0-9_-]+", config.worker_id), "it becomes part of a subject"
    assert config.max_queued_tokens == 4 * config.max_batch_tokens


@pytest.mark.parametrize(("cores", "sharers", "threads"), [(8, None, 8), (8, "2", 4), (9, "4", 2), (2, "4", 1)])
def test_threads_are_a_share_of_the_cores_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, cores: int, sharers: str | None, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(3, 3 + cores)))
    environ = {} if sharers is None else {"BLITZ_WORKERS_PER_HOST": sharers}
    assert WorkerConfig.from_env(environ).num_threads == threads
    assert WorkerConfig.from_env(environ | {"BLITZ_WORKER_THREADS": "5"}).num_threads == 5


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


def test_facts_of_the_machine_are_left_to_be_found_unless_set() -> None:
    unset = WorkerConfig.from_env({"BLITZ_WORKER_NIC_GBPS": "", "BLITZ_WORKER_SCRATCH_DIR": " "})
    assert (unset.nic, unset.nic_gbps, unset.scratch_dir) == ("", None, None)
    assert (unset.scale_up_domain, unset.scale_up_gbps, unset.host_link_gbps) == ("", None, None)
    assert (unset.ssd_gbps, unset.host_cache_bytes) == (None, unset.arena_bytes)
    config = WorkerConfig.from_env(
        {
            "BLITZ_WORKER_NIC": "mlx5_0:2",
            "BLITZ_WORKER_NIC_GBPS": "0.5",
            "BLITZ_WORKER_SCRATCH_DIR": "/scratch",
            "BLITZ_WORKER_HOST_CACHE_MIB": "2",
        }
    )
    assert (config.nic, config.nic_gbps, config.scratch_dir) == ("mlx5_0:2", 0.5, Path("/scratch"))
    assert config.host_cache_bytes == 2 * MIB


@pytest.mark.parametrize(("visible", "gpu"), [("", ""), ("3", "3"), ("2,0,1", "2"), ("GPU-8a4e0c5f", "GPU-8a4e0c5f")])
def test_the_first_visible_gpu_is_the_workers(visible: str, gpu: str) -> None:
    assert WorkerConfig.from_env({"CUDA_VISIBLE_DEVICES": visible}).visible_gpu == gpu


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BLITZ_WORKER_ENGINE", "magic"),
        ("BLITZ_WORKER_DEVICE", "abacus"),
        ("BLITZ_WORKER_ARENA_MIB", "0"),
        ("BLITZ_WORKER_KV_MIB", "much"),
        ("BLITZ_WORKER_KV_MIB", "99999999999999999999"),
        ("BLITZ_WORKER_ARENA_MIB", "99999999999999"),
        ("BLITZ_WORKER_THREADS", "100000"),
        ("BLITZ_WORKER_ID", "@@"),
        ("BLITZ_WORKER_ID", "worker.0"),
        ("BLITZ_WORKER_BLOCK_SIZE", "0"),
        ("BLITZ_WORKER_STALL_S", "0"),
        ("BLITZ_WORKER_DRAIN_TIMEOUT_S", "-1"),
        ("BLITZ_WORKER_NIC", "eth 0"),
        ("BLITZ_WORKER_NIC", "../eth0"),
        ("BLITZ_WORKER_NIC_GBPS", "0"),
        ("BLITZ_WORKER_NIC_GBPS", "fast"),
        ("BLITZ_WORKER_SCALE_UP_GBPS", "-1"),
        ("BLITZ_WORKER_HOST_LINK_GBPS", "inf"),
        ("BLITZ_WORKER_SSD_GBPS", "0"),
        ("BLITZ_WORKER_HOST_CACHE_MIB", "-1"),
        ("BLITZ_HEALTH_PORT", "65536"),
        ("BLITZ_DIE_WITH_PARENT", "perhaps"),
    ],
)
def test_a_bad_value_is_refused_with_its_variable_and_value(variable: str, value: str) -> None:
    with pytest.raises(SettingsError) as refused:
        WorkerConfig.from_env({variable: value})
    assert variable in refused.value.message
    assert value in refused.value.message


def test_engines_of_others_are_offered_where_they_are_named() -> None:
    assert (WorkerConfig.from_env({}).engines, WorkerConfig.from_env({}).vllm_python) == ((), None)
    environ = {"BLITZ_WORKER_ENGINES": " vllm, vllm", "BLITZ_VLLM_PYTHON": sys.executable}
    config = WorkerConfig.from_env(environ)
    assert (config.engines, config.vllm_python) == (("vllm",), Path(sys.executable))


@pytest.mark.parametrize(
    ("environ", "key", "said"),
    [
        ({"BLITZ_WORKER_ENGINES": "vllm"}, "BLITZ_VLLM_PYTHON", "the Python interpreter of vLLM's environment"),
        (
            {"BLITZ_WORKER_ENGINES": "vllm,sglang"},
            "BLITZ_WORKER_ENGINES",
            "'sglang': there is no such engine, but vllm",
        ),
        (
            {"BLITZ_WORKER_ENGINES": "vllm", "BLITZ_VLLM_PYTHON": "/nowhere/python"},
            "BLITZ_VLLM_PYTHON",
            "BLITZ_VLLM_PYTHON=/nowhere/python: there is no program",
        ),
        ({"BLITZ_WORKER_ENGINES": "vllm", "BLITZ_VLLM_PYTHON": "/tmp"}, "BLITZ_VLLM_PYTHON", "there is no program"),
        ({"BLITZ_WORKER_ENGINE": "none"}, "BLITZ_WORKER_ENGINES", "BLITZ_WORKER_ENGINE=none: name another engine in"),
    ],
)
def test_engines_that_cannot_be_offered_are_refused(environ: dict[str, str], key: str, said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)) as refused:
        WorkerConfig.from_env(environ)
    assert refused.value.param == key
