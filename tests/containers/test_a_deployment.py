"""One deployment from the outside: it serves, scales, is traced, has no rights, and survives what is done to it.

In this order: the last tests stop what the first ones use.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from compose.credentials import files_of_credentials
from compose.demo_model import NAME
from tests.containers.deployment import (
    ADMIN_KEY,
    NUM_WORKERS,
    SERVICES,
    Deployment,
    complete,
    traced_services,
    traces,
    undisturbed_streams,
)
from tests.containers.engine import docker, inspect, logs, say
from tests.wait_until import eventually_sync

WHOLE_AGAIN_S = 60.0
MIB = 1024 * 1024
LIMITS_MIB = {"nats": 2048, "redis": 1024, "jaeger": 2048, "worker": 0}
PIDS = {"nats": 256, "redis": 256, "jaeger": 256, "worker": 16384}
USERS = {"nats": 0, "redis": 999}
SECRETS = {
    "nats": ["nats_conf"],
    "redis": ["redis_conf", "redis_password"],
    "jaeger": [],
    "pool": ["nats_password", "nats_user", "redis_password"],
}
READ_ANOTHERS_MEMORY = """
import ctypes, os, pathlib
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
def maps(pid):
    try:
        return (pathlib.Path("/proc") / str(pid) / "maps").read_text()
    except OSError:
        return ""
# The last one that began is a worker; it runs Python.
pid = max(int(each.name) for each in pathlib.Path("/proc").iterdir()
    if each.name.isdigit() and int(each.name) != os.getpid() and "python" in maps(each.name))
first = next(line for line in maps(pid).splitlines() if " r" in line)
mine = ctypes.create_string_buffer(64)
to, of = Part(ctypes.addressof(mine), 64), Part(int(first.split("-")[0], 16), 64)
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
print(read(pid, ctypes.byref(to), 1, ctypes.byref(of), 1, 0), ctypes.get_errno())
"""


def test_administration_wants_the_key(deployment: Deployment) -> None:
    refused = deployment.command("models", "list", key="another", fails=True)
    assert "key" in refused
    assert NAME in deployment.command("models", "list")


def test_a_chat_completion_streams_from_a_container(deployment: Deployment) -> None:
    with deployment.client() as client:
        assert complete(client) == complete(client)


def test_the_command_is_in_the_gateways_container(deployment: Deployment) -> None:
    key = f"BLITZ_ADMIN_KEY={ADMIN_KEY}"
    assert NAME in docker("exec", "--env", key, deployment.ids["gateway"], "blitzscale", "models", "list")


def test_credentials_can_be_made_with_an_image_alone(deployment: Deployment, tmp_path: Path) -> None:
    image = str(inspect(deployment.ids["gateway"])[0]["Image"])
    docker(
        *("run", "--rm", "--network=none", "--user", str(os.getuid()), "--volume", f"{tmp_path}:/out"),
        *("--entrypoint", "blitzscale", image, "credentials", "/out"),
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(files_of_credentials())


def test_a_second_instance_is_copied_from_the_first_ones_memory(deployment: Deployment) -> None:
    record = json.loads(deployment.command("scale", NAME, "2", "--hold", "3600", "--json"))
    say({key: record[key] for key in ("trigger_to_serving_ms", "gbps", "bytes", "explain")})
    assert record["status"] == "done"
    (target,) = record["targets"]
    (other,) = {f"compose-{index}" for index in range(NUM_WORKERS)} - {target["worker_id"]}
    assert other in " ".join(record["explain"])
    assert record["bytes"] > 20 * MIB
    assert deployment.inside("worker", "python", "-c", READ_ANOTHERS_MEMORY).split() == ["64", "0"]


def test_traces_of_requests_and_of_scaling_arrive(deployment: Deployment) -> None:
    def shared(*services: str) -> set[str]:
        return set.intersection(*(set(traces(service)) for service in services))

    eventually_sync(lambda: {"gateway", "planner", "worker"} <= traced_services())
    eventually_sync(lambda: shared("gateway", "worker"))
    eventually_sync(lambda: shared("planner", "worker"))
    assert any("worker.load" in names for names in traces("worker").values())


def _processes(container: str) -> list[int]:
    """Of a container, as this machine counts them."""
    return [int(pid) for pid in docker("top", container, "-o", "pid").split()[1:]]


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_no_rights_and_its_limits(deployment: Deployment, service: str) -> None:
    (found,) = inspect(deployment.ids[service])
    pids = _processes(deployment.ids[service])
    assert len(pids) >= 1
    for pid in pids:
        status = dict(re.findall(r"^(\w+):\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapAmb"], 16) == 0, pid
        assert status["NoNewPrivs"] == "1"
        assert set(status["Uid"].split()) == {str(USERS.get(service, 10001))}
    host = found["HostConfig"]
    assert host["Memory"] == LIMITS_MIB.get(service, 2048) * MIB
    assert host["PidsLimit"] == PIDS.get(service, 512)
    assert host["ReadonlyRootfs"]
    assert not host["Privileged"]
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "3"}}
    if service == "worker":
        assert host["ShmSize"] == 512 * MIB


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_sees_its_own_secrets_only(deployment: Deployment, service: str) -> None:
    seen = [
        mount["Destination"].rpartition("/")[2]
        for mount in inspect(deployment.ids[service])[0]["Mounts"]
        if mount["Destination"].startswith("/run/secrets/")
    ]
    assert sorted(seen) == SECRETS.get(service, ["nats_password", "nats_user"])


@pytest.mark.parametrize("service", [each for each in SERVICES if each != "gateway"])
def test_streams_survive_a_killed(deployment: Deployment, service: str) -> None:
    with undisturbed_streams(deployment):
        docker("kill", deployment.ids[service])
        time.sleep(1.0)
        # An engine starts again what dies, but not what it was told to kill.
        docker("start", deployment.ids[service])
        deployment.wait_healthy()


@pytest.mark.parametrize("service", ["pool", "planner", "monitor", "worker", "gateway"])
def test_what_dies_is_started_again(deployment: Deployment, service: str) -> None:
    began = deployment.states()[service]["StartedAt"]
    # All that there is besides the container's init, which nobody inside can kill.
    deployment.inside(service, "python", "-c", "import os, signal; os.kill(-1, signal.SIGKILL)")
    eventually_sync(lambda: deployment.states()[service]["StartedAt"] != began)
    deployment.wait_healthy()


def test_all_at_once_start_again(deployment: Deployment) -> None:
    ids = list(deployment.ids.values())
    docker("kill", *ids)
    began_s = time.monotonic()
    started = [subprocess.Popen(["docker", "start", each], stdout=subprocess.DEVNULL) for each in ids]
    assert [each.wait(60) for each in started] == [0] * len(ids)
    deployment.wait_healthy()
    healthy_s = time.monotonic() - began_s
    deployment.serve_demo()
    whole_s = time.monotonic() - began_s
    say(f"healthy after {healthy_s:.1f} s, answers after {whole_s:.1f} s")
    assert whole_s < WHOLE_AGAIN_S


def test_nothing_writes_to_its_image(deployment: Deployment) -> None:
    for service, container in deployment.ids.items():
        assert [line for line in logs(container) if "Read-only file system" in line or "Errno 30" in line] == []
        tried = deployment.inside(service, "sh", "-c", "echo x > /probe; echo x > /root/probe; echo x > /app/probe")
        assert tried.count("ead-only") + tried.count("ermission denied") + tried.count("nonexistent") >= 2, tried


@pytest.mark.parametrize("service", ["gateway", "worker", "monitor", "planner", "pool", "jaeger", "redis", "nats"])
def test_a_container_that_is_stopped_ends_well_and_in_time(deployment: Deployment, service: str) -> None:
    container = deployment.ids[service]
    began_s = time.monotonic()
    docker("stop", container)
    took_s = time.monotonic() - began_s
    state: dict[str, Any] = deployment.states()[service]
    say(f"{service}: {took_s:.1f} s")
    assert state["ExitCode"] == 0, logs(container)[-20:]
    assert not state["OOMKilled"]
    (found,) = inspect(container)
    assert took_s < (found["Config"].get("StopTimeout") or 10)
