"""The settings of all workers of a host, and what each of them gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from compose.workers import WorkersConfig, specs
from shared.cgroup import GroupLimits
from shared.settings import SettingsError

SMALL = {"BLITZ_WORKER_ARENA_MIB": "100", "BLITZ_WORKER_KV_MIB": "20", "BLITZ_WORKER_HOST_CACHE_MIB": "80"}


def limited(monkeypatch: pytest.MonkeyPatch, memory_mib: int | None) -> None:
    limit = GroupLimits(None, memory_mib * 1024 * 1024 if memory_mib is not None else None)
    monkeypatch.setattr("compose.workers.limits", lambda: limit)


def test_a_host_without_settings_has_one_worker() -> None:
    config = WorkersConfig.from_env({})
    assert config.num_workers == 1


def test_ids_begin_with_the_hosts_name_and_ports_follow_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(9)))
    env = {"BLITZ_WORKERS": "3", "BLITZ_WORKER_HOST": "leaf-2.pod_7", "BLITZ_HEALTH_PORT": "9090", "X": "y"}
    made = [spec.env for spec in specs(WorkersConfig.from_env(env), env, None)]
    assert [one["BLITZ_WORKER_ID"] for one in made] == [f"leaf-2-pod_7-{index}" for index in range(3)]
    assert [one["BLITZ_HEALTH_PORT"] for one in made] == ["9091", "9092", "9093"]
    for one in made:
        assert one["BLITZ_WORKER_HOST"] == "leaf-2.pod_7"
        assert one["BLITZ_WORKERS_PER_HOST"] == "3"
        assert one["OMP_NUM_THREADS"] == "3"
        assert one["X"] == "y"


def test_without_a_port_workers_have_none() -> None:
    env = {"BLITZ_WORKERS": "2"}
    assert [spec.env["BLITZ_HEALTH_PORT"] for spec in specs(WorkersConfig.from_env(env), env, None)] == ["", ""]


def test_this_process_outlasts_its_workers_drain() -> None:
    config = WorkersConfig.from_env({"BLITZ_WORKER_DRAIN_TIMEOUT_S": "7"})
    (spec,) = specs(config, {}, None)
    assert 7 < spec.stop_grace_s < config.drain_timeout_s


def test_memory_beyond_the_containers_limit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 600)
    WorkersConfig.from_env(SMALL | {"BLITZ_WORKERS": "3"})
    with pytest.raises(SettingsError, match=r"4 x \(100 \+ 20 \+ 80\) MiB of .* limit of 600 MiB") as caught:
        WorkersConfig.from_env(SMALL | {"BLITZ_WORKERS": "4"})
    assert caught.value.param == "BLITZ_WORKER_ARENA_MIB"
    limited(monkeypatch, None)
    WorkersConfig.from_env(SMALL | {"BLITZ_WORKERS": "4"})


def test_shared_memory_as_containers_have_it_is_refused_for_several_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_blocks=16384, f_frsize=4096))
    WorkersConfig.from_env({"BLITZ_WORKERS": "1"})
    with pytest.raises(SettingsError, match=r"/dev/shm has 64 MiB, and BLITZ_WORKERS=2 need 128 MiB"):
        WorkersConfig.from_env({"BLITZ_WORKERS": "2"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BLITZ_WORKERS", "0"),
        ("BLITZ_WORKERS", "many"),
        ("BLITZ_WORKER_HOST", "a host"),
        ("BLITZ_WORKER_HOST", "x" * 121),
        ("BLITZ_WORKER_ID", "worker-7"),
        ("BLITZ_WORKER_KV_MIB", "-1"),
        ("BLITZ_HEALTH_PORT", "http"),
        ("BLITZ_HEALTH_PORT", "65535"),
    ],
)
def test_what_no_worker_could_start_with_is_refused_before_any_does(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        WorkersConfig.from_env({name: value})
