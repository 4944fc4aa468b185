"""Children that a fork server forks are like those that are started afresh."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from compose.child import Child, ChildSpec
from compose.forking import ForkServer
from compose.restart_policy import RestartPolicy
from compose.supervisor import Supervisor
from tests.wait_until import eventually

QUICK = RestartPolicy(first_delay_s=0.02, max_delay_s=0.05, stable_s=600.0, max_failed_starts=3)

PRELOADED = "import os\nIMPORTED_BY = os.getpid()\n"
PROGRAM = """
import gc, json, os, sys, time
import preloaded
print(json.dumps({
    "imported_by": preloaded.IMPORTED_BY, "name": __name__, "argv": sys.argv, "cwd": os.getcwd(),
    "own": os.environ["OWN"],
    "others": os.environ.get("OF_THE_SERVER"), "files":
    [fd for fd in sorted(map(int, os.listdir("/proc/self/fd"))) if os.path.exists(f"/proc/self/fd/{fd}")],
    "collects_garbage": gc.isenabled(), "but_not_what_was_imported": gc.get_freeze_count() > 0,
    "ready_fd": int(os.environ["BLITZ_READY_FD"]), "group": os.getpgrp(), "session": os.getsid(0),
}))
sys.stderr.write("to stderr\\n")
os.write(int(os.environ["BLITZ_READY_FD"]), b"ready")
if "EXIT" in os.environ:
    raise SystemExit(int(os.environ["EXIT"]))
time.sleep(600)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    (tmp_path / "program.py").write_text(PROGRAM)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
async def server(tmp_path: Path, env: dict[str, str]) -> AsyncIterator[ForkServer]:
    made = ForkServer(("preloaded", "missing"), env | {"OF_THE_SERVER": "1"}, tmp_path, tmp_path / "server.log")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def supervisor(tmp_path: Path, server: ForkServer) -> AsyncIterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", policy=QUICK)
    yield made
    pids = [child.pid for child in made.children.values() if child.pid is not None]
    made.kill_all()
    await made.stop([])
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def _spec(server: ForkServer, tmp_path: Path, env: dict[str, str], **more: str) -> ChildSpec:
    argv = (sys.executable, "-m", "program")
    return ChildSpec("worker-7", argv, env | {"OWN": "mine"} | more, 60.0, tmp_path, tells_ready=True, forks=server)


def _server_pid() -> int:
    [server] = [p for p in psutil.Process().children() if "compose.fork_server" in p.cmdline()]
    return server.pid


async def test_it_has_what_was_imported_and_is_itself_in_everything_else(
    supervisor: Supervisor, server: ForkServer, tmp_path: Path, env: dict[str, str]
) -> None:
    child = await supervisor.start(_spec(server, tmp_path, env))
    await eventually(lambda: child.ready and len(child.log.last_lines) == 2)
    told = json.loads(child.log.last_lines[0])
    assert child.log.last_lines[1] == "to stderr"
    assert told["imported_by"] == _server_pid()
    assert (told["name"], told["own"], told["others"]) == ("__main__", "mine", None)
    assert (told["cwd"], told["argv"]) == (str(tmp_path), [str(tmp_path / "program.py")])
    assert told["files"] == [0, 1, 2, told["ready_fd"]]
    assert told["group"] == told["session"] == child.pid
    assert told["collects_garbage"]
    assert told["but_not_what_was_imported"]
    process = psutil.Process(child.pid)
    assert process.ppid() == os.getpid()
    assert process.name() == "worker-7"
    assert process.cmdline()[1:3] == ["-m", "program"]


async def test_a_killed_one_is_forked_again_and_without_its_server_started_afresh(
    supervisor: Supervisor, server: ForkServer, tmp_path: Path, env: dict[str, str]
) -> None:
    child = await supervisor.start(_spec(server, tmp_path, env))
    await eventually(lambda: child.ready)
    forked_from = _server_pid()
    for death, server_lives in ((1, True), (2, False), (3, False)):
        if not server_lives and psutil.pid_exists(forked_from):
            os.kill(forked_from, signal.SIGKILL)
            await eventually(lambda: not psutil.pid_exists(forked_from))
        child.signal(signal.SIGKILL)
        await eventually(lambda n=death: len(_told(child)) == n + 1 and child.ready)  # type: ignore[misc]
        assert child.num_restarts == death
        assert _told(child)[-1]["imported_by"] == (forked_from if server_lives else child.pid)


async def test_what_only_a_first_start_is_told_is_not_told_to_the_next(
    supervisor: Supervisor, server: ForkServer, tmp_path: Path, env: dict[str, str]
) -> None:
    spec = dataclasses.replace(_spec(server, tmp_path, env), first_env={"OWN": "first"})
    child = await supervisor.start(spec)
    await eventually(lambda: child.ready and len(_told(child)) == 1)
    child.signal(signal.SIGKILL)
    await eventually(lambda: len(_told(child)) == 2)
    assert [told["own"] for told in _told(child)] == ["first", "mine"]


def _told(child: Child) -> list[dict[str, object]]:
    return [json.loads(line) for line in child.log.last_lines if line.startswith("{")]


async def test_how_it_ended_is_known(
    supervisor: Supervisor, server: ForkServer, tmp_path: Path, env: dict[str, str]
) -> None:
    process = await server.spawn("one", "program", env | {"OWN": "", "EXIT": "3"}, tmp_path, {"BLITZ_READY_FD": 1})
    assert process is not None
    assert await process.wait() == 3
    process = await server.spawn("two", "program", env | {"OWN": ""}, tmp_path, {"BLITZ_READY_FD": 1})
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == process.returncode == -signal.SIGKILL


async def test_what_would_have_imported_other_things_is_not_forked(server: ForkServer, env: dict[str, str]) -> None:
    here = env | {"OF_THE_SERVER": "2", "BLITZ_WORKER_ID": "worker-9"}
    assert server.suits(here)
    assert not server.suits(here | {"OMP_NUM_THREADS": "17"})
    assert not server.suits({key: value for key, value in here.items() if key != "PYTHONPATH"})
    assert not server.suits(here | {"CUDA_MODULE_LOADING": "EAGER"})


async def test_which_gpus_a_fork_sees_is_said_to_it_alone(server: ForkServer, env: dict[str, str]) -> None:
    assert server.suits(env | {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}), "CUDA reads it when it starts, in the fork"


async def test_nothing_is_forked_from_a_process_with_threads(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    server = ForkServer(("threaded",), env, tmp_path, tmp_path / "server.log")
    await server.start()
    try:
        assert await server.spawn("one", "program", env, tmp_path, {}) is None
        assert "threads" in (tmp_path / "server.log").read_text()
    finally:
        await server.stop()


@pytest.fixture
def network() -> Iterator[str]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    name = f"blzfork-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.parametrize("is_forked", [True, False])
async def test_one_of_another_network_sees_its_interfaces_only(
    supervisor: Supervisor, server: ForkServer, tmp_path: Path, env: dict[str, str], network: str, is_forked: bool
) -> None:
    (tmp_path / "looks.py").write_text(
        "import os, socket, time\nprint(os.listdir('/sys/class/net'), socket.if_nameindex())\ntime.sleep(600)\n"
    )
    argv = (sys.executable, "-m", "looks")
    forks = server if is_forked else None
    child = await supervisor.start(ChildSpec("worker-7", argv, env, 5.0, tmp_path, network=network, forks=forks))
    await eventually(lambda: bool(child.log.last_lines))
    assert list(child.log.last_lines) == ["['lo'] [(1, 'lo')]"]
    assert os.listdir("/sys/class/net") != ["lo"]
