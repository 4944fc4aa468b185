"""The stack with real NATS and Redis servers and stand-ins for the services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from compose.config import StackConfig
from compose.errors import ProcessGaveUp, StackNotReady, StackRefused
from compose.ports import free_port
from compose.restart_policy import RestartPolicy
from compose.stack import Stack
from shared.messages.admin import FloorStatus, InstanceStatus, ModelStatus, Status
from tests.compose.fake_services import journal, write_fake_services
from tests.wait_until import eventually, eventually_sync

pytestmark = pytest.mark.stack
READY_S = 240.0
"""For what takes two seconds where nothing else runs."""
END_S = 240.0
QUICK = RestartPolicy(first_delay_s=0.05, max_delay_s=0.1, max_failed_starts=3)
NAMES = {"nats", "redis", "pool", "planner", "monitor", "gateway", "worker-0", "worker-1"}


@pytest.fixture
def fake_env(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "fake"
    folder.mkdir()
    return write_fake_services(folder)


def stack_config(tmp_path: Path, env: dict[str, str], demo: Path, **more: object) -> StackConfig:
    settings = {"models": (demo,), "state_dir": tmp_path / "state", "port": 0, "env": env, "stop_grace_s": 60.0}
    return StackConfig(**(settings | more))  # type: ignore[arg-type]


def living(pids: list[int]) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if lives(pid)]


async def test_everything_starts_serves_the_model_and_stops_in_order(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path
) -> None:
    said: list[str] = []
    config = stack_config(tmp_path, fake_env, demo_model)
    async with Stack(config, sink=lambda _name, line: said.append(line), say=said.append) as stack:
        status = await stack.wait_ready(READY_S)
        assert set(stack.processes) == NAMES
        assert [model.name for model in status.models] == ["demo"]
        assert status.models[0].path == str(demo_model)
        pids = [child.pid or 0 for child in stack.processes.values()]
        assert living(pids) == pids
    assert living(pids) == []
    stops = [line.split()[1] for line in journal(tmp_path / "fake") if line.startswith("stop")]
    assert stops[0] == "gateway"
    assert set(stops[1:3]) == {"planner", "monitor"}
    assert set(stops[3:5]) == {"worker-0", "worker-1"}
    assert stops[5:] == ["pool"]
    assert said[0].startswith("starting; logs in")
    assert any("registered model demo" in text for text in said)


async def test_several_of_a_kind_have_names_seats_and_ports_of_their_own(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLITZ_GATEWAY_ID", "of-somebody-else")
    config = stack_config(
        tmp_path, fake_env, demo_model, workers=1, planners=2, monitors=2, pools=2, gateways=2, port=free_port()
    )
    kinds = ("planner", "monitor", "pool", "gateway")
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        several = {f"{kind}-{index}" for kind in kinds for index in range(2)}
        assert set(stack.processes) == several | {"nats", "redis", "worker-0"}
        envs = {name: stack.processes[name].spec.env for name in several}
        assert {envs[f"pool-{i}"]["BLITZ_POOL_SEAT"] for i in range(2)} == {"pool-0", "pool-1"}
        assert {envs[f"gateway-{i}"]["BLITZ_GATEWAY_ID"] for i in range(2)} == {""}
        ports = [int(envs[f"gateway-{i}"]["BLITZ_GATEWAY_PORT"]) for i in range(2)]
        assert ports[0] == config.port < ports[1]
        assert stack.urls == tuple(f"http://127.0.0.1:{port}" for port in ports)
        assert envs["planner-1"]["BLITZ_NATS_USER"] == "planner"
    stops = [line.split()[1] for line in journal(tmp_path / "fake") if line.startswith("stop")]
    assert stops[:2] == ["gateway"] * 2
    assert stops[-2:] == ["pool"] * 2


def _environment(pid: int | None) -> dict[str, str]:
    assert pid is not None
    return psutil.Process(pid).environ()


async def test_one_of_two_that_cannot_start_is_left_down(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path
) -> None:
    config = stack_config(tmp_path, fake_env, demo_model, planners=2, service_env={"planner-1": {"FAKE_BROKEN": "1"}})
    async with Stack(config, policy=QUICK) as stack:
        await stack.wait_ready(READY_S)
        assert stack.processes["planner-1"].state == "gave_up"


async def test_the_models_get_the_stacks_objectives(tmp_path: Path, fake_env: dict[str, str], demo_model: Path) -> None:
    config = stack_config(tmp_path, fake_env, demo_model, workers=1, slo_ttft_s=0.5, slo_tbt_s=0.0625)
    async with Stack(config) as stack:
        [model] = (await stack.wait_ready(READY_S)).models
        assert (model.slo_ttft_s, model.slo_tbt_s) == (0.5, 0.0625)


async def test_a_stack_is_ready_while_its_models_sleep(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path
) -> None:
    config = stack_config(tmp_path, fake_env, demo_model, workers=1, keep_alive_s=60.0)
    async with Stack(config) as stack:
        status = await stack.wait_ready(READY_S)
        [model] = status.models
        assert (model.keep_alive_s, model.min_instances, status.instances) == (60.0, 0, ())


def test_a_model_that_something_is_asked_of_does_not_sleep() -> None:
    model = ModelStatus(name="m", min_instances=0)
    asked = FloorStatus(model="m", instances=1)
    assert Status(models=(model,)).sleeps(model)
    assert Status(models=(model,), floors=(FloorStatus(model="other", instances=1),)).sleeps(model)
    assert not Status(models=(model,), floors=(asked,)).sleeps(model)
    for changes in ({"min_instances": 1}, {"queued_requests": 1}, {"instances": 1}):
        awake = msgspec.structs.replace(model, **changes)
        assert not Status(models=(awake,)).sleeps(awake)


def test_a_disaggregated_model_is_served_once_it_has_its_least_number_in_both_roles() -> None:
    def status(model: ModelStatus, *roles: str) -> Status:
        instances = [InstanceStatus(id=f"i-{n}", model="m", state="serving", role=r) for n, r in enumerate(roles)]
        return Status(models=(model,), instances=tuple(instances))

    model = ModelStatus(name="m", served_as="disaggregated", min_instances=2)
    for roles in ((), ("colocated",) * 4, ("prefill", "prefill", "decode"), ("decode", "decode", "prefill")):
        assert not status(model, *roles).is_served(model), roles
    assert status(model, "prefill", "decode", "decode", "prefill").is_served(model)
    woken = msgspec.structs.replace(model, min_instances=0)
    assert status(woken, "prefill").is_served(woken)
    assert not status(woken).is_served(woken)
    plain = ModelStatus(name="m", min_instances=2)
    assert status(plain, "colocated").is_served(plain)


@pytest.mark.parametrize("what", ["workers", "planners", "monitors", "pools", "gateways"])
def test_none_of_a_kind_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(StackRefused, match=f"--{what} must be at least 1, not 0"):
        StackConfig(models=(), state_dir=tmp_path, **{what: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("keep_alive_s", [-1.0, 2_592_001.0, float("nan"), float("inf")])
def test_a_keep_alive_that_is_none_is_refused(tmp_path: Path, keep_alive_s: float) -> None:
    with pytest.raises(StackRefused, match="--keep-alive must be from 0 to 2592000 seconds"):
        StackConfig(models=(), state_dir=tmp_path, keep_alive_s=keep_alive_s)


@pytest.mark.parametrize("slo_s", [0.0, -1.0, float("nan"), float("inf")])
def test_objectives_that_are_none_are_refused(tmp_path: Path, slo_s: float) -> None:
    with pytest.raises(StackRefused, match="--slo-tbt must be from 1 to 3600000 milliseconds"):
        StackConfig(models=(), state_dir=tmp_path, slo_tbt_s=slo_s)


async def test_children_get_their_environment(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://traces:4318")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("BLITZ_ADMIN_KEY", "secret")
    monkeypatch.setenv("BLITZ_NATS_PASSWORD", "of another server")
    per_service = {"worker": {"EXTRA": "all", "BLITZ_WORKER_LEAF": "leaf-7"}, "worker-1": {"EXTRA": "one"}}
    config = stack_config(tmp_path, fake_env, demo_model, service_env=per_service, engine="mock")
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        found = {
            name: json.loads((tmp_path / "fake" / f"{name}.env").read_text()) for name in NAMES - {"nats", "redis"}
        }
        assert {env["BLITZ_NATS_URL"] for env in found.values()} == {stack.addresses.nats_url}
        for name, env in found.items():
            kind = name.partition("-")[0]
            assert env["BLITZ_NATS_USER"] == kind
            assert env["BLITZ_NATS_PASSWORD_FILE"] == str(stack.state_dir.credentials / f"nats-{kind}.password")
            assert env["BLITZ_NATS_PASSWORD"] == env["BLITZ_NATS_CREDS_FILE"] == ""
        assert {env["OTEL_EXPORTER_OTLP_ENDPOINT"] for env in found.values()} == {"http://traces:4318"}
        assert all("OTEL_SERVICE_NAME" not in env for env in found.values())
        assert found["pool"]["BLITZ_REDIS_URL"] == stack.addresses.redis_url
        assert found["pool"]["BLITZ_REDIS_PASSWORD_FILE"] == str(stack.state_dir.credentials / "redis.password")
        assert "BLITZ_REDIS_PASSWORD_FILE" not in found["worker-0"]
        assert f"http://{found['gateway']['BLITZ_GATEWAY_HOST']}:{found['gateway']['BLITZ_GATEWAY_PORT']}" == stack.url
        assert found["gateway"]["BLITZ_ADMIN_KEYS"] == "secret"
        worker = found["worker-1"]
        assert worker["BLITZ_WORKER_ENGINE"] == "mock"
        assert worker["BLITZ_WORKER_THREADS"] == worker["OMP_NUM_THREADS"] == str(config.worker_threads)
        assert (worker["EXTRA"], found["worker-0"]["EXTRA"], worker["BLITZ_WORKER_LEAF"]) == ("one", "all", "leaf-7")
        assert "EXTRA" not in found["pool"]


async def test_whatever_dies_comes_back(tmp_path: Path, fake_env: dict[str, str], demo_model: Path) -> None:
    async with Stack(stack_config(tmp_path, fake_env, demo_model), policy=QUICK) as stack:
        await stack.wait_ready(READY_S)
        before = {name: child.pid for name, child in stack.processes.items()}
        for name in ("nats", "redis", "worker-0", "gateway"):
            stack.kill(name)
            await eventually(lambda name=name: stack.processes[name].pid not in (None, before[name]))  # type: ignore[misc]
        assert stack.processes["pool"].pid == before["pool"]


async def test_workers_can_be_added_and_taken_away(tmp_path: Path, fake_env: dict[str, str], demo_model: Path) -> None:
    async with Stack(stack_config(tmp_path, fake_env, demo_model, workers=1)) as stack:
        await stack.wait_ready(READY_S)
        assert await stack.add_worker() == "worker-1"
        await eventually(lambda: (tmp_path / "fake" / "worker-1").exists())
        pid = stack.processes["worker-0"].pid
        await stack.remove_process("worker-0")
        assert pid is not None
        assert living([pid]) == []
        assert "worker-0" not in stack.processes


@pytest.mark.parametrize("name", ["pool", "planner", "gateway", "worker"])
async def test_a_service_that_cannot_start_ends_the_wait_with_its_last_lines(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path, name: str
) -> None:
    broken = {name: {"FAKE_BROKEN": "1"}}
    stack = Stack(stack_config(tmp_path, fake_env, demo_model, service_env=broken), policy=QUICK)
    with pytest.raises(ProcessGaveUp, match=f"{name}.* keeps dying") as caught:
        async with stack:
            await stack.wait_ready(READY_S)
    assert caught.value.last_lines[-1] == "the wrong kind of electricity"


async def test_one_worker_that_cannot_start_is_left_down_and_the_others_serve(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path
) -> None:
    broken = {"worker-1": {"FAKE_BROKEN": "1"}}
    said: list[str] = []
    config = stack_config(tmp_path, fake_env, demo_model, service_env=broken)
    async with Stack(config, policy=QUICK, say=said.append) as stack:
        await stack.wait_ready(READY_S)
        assert stack.processes["worker-0"].ready
        assert stack.processes["worker-1"].state == "gave_up"
        assert any("worker-1 IS GIVEN UP" in text for text in said)
        assert any("the wrong kind of electricity" in text for text in said)


async def test_servers_and_services_that_die_again_and_again_come_back(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path
) -> None:
    async with Stack(stack_config(tmp_path, fake_env, demo_model), policy=QUICK) as stack:
        await stack.wait_ready(READY_S)
        for name in ("nats", "redis", "pool", "worker-0"):
            child = stack.processes[name]
            for death in range(1, 2 + QUICK.max_failed_starts):
                await eventually(lambda child=child: child.ready and child.pid is not None)  # type: ignore[misc]
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                await eventually(lambda child=child, death=death: child.num_restarts == death)  # type: ignore[misc]
        await eventually(lambda: all(child.ready for child in stack.processes.values()))


@pytest.mark.parametrize(("name", "ends"), [("planner", False), ("redis", False), ("nats", True), ("gateway", True)])
async def test_once_it_serves_only_what_requests_need_ends_it(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path, name: str, ends: bool
) -> None:
    async with Stack(stack_config(tmp_path, fake_env, demo_model), policy=QUICK) as stack:
        await stack.wait_ready(READY_S)
        child = stack.processes[name]
        child.spec = replace(child.spec, argv=(sys.executable, "-c", "raise SystemExit('gone for good')"))
        gave_up = asyncio.ensure_future(stack.wait_gave_up())
        stack.kill(name)
        await eventually(lambda: child.state == "gave_up")
        if ends:
            await eventually(gave_up.done)
            assert isinstance(gave_up.exception(), ProcessGaveUp)
        await asyncio.sleep(0.05)
        assert gave_up.done() == ends
        gave_up.cancel()


async def test_a_deadline_says_what_is_missing(tmp_path: Path, fake_env: dict[str, str], demo_model: Path) -> None:
    broken = {"worker-1": {"FAKE_BROKEN": "1"}}
    slow = RestartPolicy(first_delay_s=30.0, max_delay_s=30.0)
    async with Stack(stack_config(tmp_path, fake_env, demo_model, service_env=broken), policy=slow) as stack:
        others = [child for name, child in stack.processes.items() if name != "worker-1"]
        await eventually(lambda: all(child.ready for child in others) and (tmp_path / "fake/worker-0").exists())
        with pytest.raises(StackNotReady, match="waiting for workers: 1 of 2 are here"):
            await stack.wait_ready(0.5)


async def test_a_second_stack_on_the_same_state_is_refused_and_disturbs_nothing(
    tmp_path: Path, fake_env: dict[str, str], demo_model: Path
) -> None:
    config = stack_config(tmp_path, fake_env, demo_model)
    async with Stack(config) as stack:
        with pytest.raises(StackRefused, match="another stack"):
            async with Stack(config):
                pass
        await stack.wait_ready(READY_S)


class Up:
    """``blitzscale up`` as a process of its own."""

    def __init__(self, tmp_path: Path, env: dict[str, str], *arguments: str) -> None:
        self.state = tmp_path / "state"
        command = [sys.executable, "-m", "compose", "up", "--state-dir", str(self.state), *arguments]
        self.output = tmp_path / "up.txt"
        with self.output.open("w") as output:
            root = str(Path(__file__).parents[2])
            environment = {**os.environ, **env}
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=root, start_new_session=True
            )
        self.pids: list[int] = []

    def wait_serving(self) -> None:
        eventually_sync(lambda: "BlitzScale serves at" in self.text() or self.process.poll() is not None)
        assert "BlitzScale serves at" in self.text(), self.text()
        self.pids = [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        assert len(self.pids) == len(NAMES) + 2, "and the two that they are forked from"

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_up_serves_the_demo_and_ctrl_c_stops_everything(tmp_path: Path, fake_env: dict[str, str]) -> None:
    port = free_port()
    up = Up(tmp_path, fake_env, "--port", str(port), "--workers", "2")
    try:
        up.wait_serving()
        assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in up.text()
        assert "random" in up.text()
        eventually_sync(lambda: "\nworker-1  | started\n" in up.text())
        assert (up.state / "logs" / "worker-1.log").read_text() == "started\n"
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(END_S) == 0
        assert living(up.pids) == []
        assert up.text().rstrip().endswith("blitz     | stopped")
    finally:
        up.end()


def test_up_killed_outright_leaves_nothing(tmp_path: Path, fake_env: dict[str, str]) -> None:
    up = Up(tmp_path, fake_env, "--port", "0", "--workers", "2")
    try:
        up.wait_serving()
        up.process.kill()
        up.process.wait()
        eventually_sync(lambda: not living(up.pids))
    finally:
        up.end()
    again = Up(tmp_path, fake_env, "--port", "0", "--workers", "2")
    try:
        again.wait_serving()
    finally:
        again.end()
        eventually_sync(lambda: not living(again.pids))


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, fake_env: dict[str, str]) -> None:
    up = Up(tmp_path, fake_env | {"FAKE_DEAF": "1"}, "--port", "0", "--workers", "2")
    try:
        up.wait_serving()
        up.process.send_signal(signal.SIGINT)
        eventually_sync(lambda: "Ctrl-C again" in up.text())
        assert living(up.pids)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(END_S) == 0
        assert "did not stop within" not in up.text(), "nothing was waited for"
        assert living(up.pids) == []
    finally:
        up.end()


def test_up_ends_when_a_service_cannot_run(tmp_path: Path, fake_env: dict[str, str]) -> None:
    up = Up(tmp_path, fake_env | {"FAKE_BROKEN": "1"}, "--port", "0")
    try:
        assert up.process.wait(END_S) == 1
        assert "the wrong kind of electricity" in up.text()
        assert "keeps dying (exit status 1" in up.text().splitlines()[-1]
    finally:
        up.end()
