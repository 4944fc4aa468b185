"""A worker's GPU is the first that it sees, and it sees all."""

from __future__ import annotations

from pathlib import Path

import pytest

from compose import preflight
from compose.children import Addresses, worker_spec
from compose.config import StackConfig
from compose.gpus import gpus_here, own_first
from compose.preflight import Findings
from compose.state_dir import StateDir
from compose.workers import WorkersConfig, specs
from services.worker.config import WorkerConfig
from tests.services.worker.node.fake_nvml import FakeGpu, FakeNvml

GPUS = ("GPU-a", "GPU-b", "GPU-c")
ADDRESSES = Addresses(1, 2, None, 3)
VARIABLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def _visible(tmp_path: Path, index: int, **settings: object) -> str | None:
    config = StackConfig(models=(), state_dir=tmp_path, **({"device": "cuda"} | settings))  # type: ignore[arg-type]
    spec = worker_spec(config, StateDir(tmp_path), ADDRESSES, index, Findings(0, GPUS))
    return spec.env.get(VARIABLE)


def test_each_worker_has_another_gpu_as_its_own_and_sees_all(tmp_path: Path) -> None:
    assert [_visible(tmp_path, index) for index in range(4)] == [
        "GPU-a,GPU-b,GPU-c",
        "GPU-b,GPU-c,GPU-a",
        "GPU-c,GPU-a,GPU-b",
        "GPU-a,GPU-b,GPU-c",
    ]
    shown = _visible(tmp_path, 1)
    assert WorkerConfig.from_env({VARIABLE: shown or ""}).visible_gpu == "GPU-b"


def test_the_gpus_of_a_stack_are_those_that_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _visible(tmp_path, 1, env={VARIABLE: "4, 6"}) == "6,4"
    assert _visible(tmp_path, 1, service_env={"worker": {VARIABLE: "4,6"}}) == "6,4"
    assert _visible(tmp_path, 1, service_env={"worker-1": {VARIABLE: "4,6"}}) == "4,6", "said for this one"
    monkeypatch.setenv(VARIABLE, "0,1")
    assert _visible(tmp_path, 1) == "1,0"
    monkeypatch.setenv(VARIABLE, "")
    assert _visible(tmp_path, 1) == "", "hidden, as was said"


def test_workers_on_cpus_are_told_nothing_of_gpus(tmp_path: Path) -> None:
    assert _visible(tmp_path, 0, device="cpu") is None


def test_the_workers_of_a_container_do_the_same() -> None:
    env = {"BLITZ_WORKERS": "2", "BLITZ_WORKER_DEVICE": "cuda", "BLITZ_WORKER_ENGINE": "mock"}
    made = [spec.env[VARIABLE] for spec in specs(WorkersConfig.from_env(env), env, None, GPUS)]
    assert made == ["GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c,GPU-a"]
    listed = env | {VARIABLE: "7"}
    assert [spec.env[VARIABLE] for spec in specs(WorkersConfig.from_env(listed), listed, None, GPUS)] == ["7", "7"]
    cpus = {"BLITZ_WORKERS": "2"}
    assert [spec.env.get(VARIABLE) for spec in specs(WorkersConfig.from_env(cpus), cpus, None, GPUS)] == [None, None]


def test_gpus_are_found_where_there_is_a_driver() -> None:
    nvml = FakeNvml(FakeGpu("0000:3b:00.0", uuid="GPU-a"), FakeGpu("0000:3c:00.0", uuid="GPU-b"))
    assert gpus_here(lambda: nvml) == ("GPU-a", "GPU-b")
    assert gpus_here(lambda: FakeNvml(starts=False)) == ()
    assert gpus_here(lambda: None) == ()
    assert own_first({}, (), 0) == {}


def test_a_stack_on_gpus_looks_for_them_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compose.preflight.gpus_here", lambda: GPUS)
    on_gpus = StackConfig(models=(), state_dir=tmp_path, port=0, engine="mock", device="cuda")
    assert preflight.check(on_gpus).gpus == GPUS
    on_cpus = StackConfig(models=(), state_dir=tmp_path, port=0, engine="mock")
    assert preflight.check(on_cpus).gpus == ()
