"""``blitzscale up --detach`` and ``blitzscale down`` as a user runs them: what lives on, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from compose import lock_holder
from compose.lock_holder import NothingRuns
from compose.ports import free_port
from tests.wait_until import eventually_sync

pytestmark = pytest.mark.stack
END_S = 240.0


class Box:
    """A state directory, and what is started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.env, capture_output=True, text=True, timeout=END_S, check=False
        )

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "compose", *arguments, "--state-dir", str(self.path)]

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"BLITZ_WORKER_ARENA_MIB": "64", "BLITZ_WORKER_KV_MIB": "64"}

    @property
    def pid(self) -> int:
        with lock_holder.find(self.path) as holder:
            return holder.pid

    def is_free(self) -> bool:
        try:
            self.pid  # noqa: B018 - looked for
        except NothingRuns:
            return True
        return False


UP = ("up", "--detach", "--engine", "mock", "--workers", "1", "--port", "0")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    if not made.is_free():
        made.run("down", "--kill")


def shown(box: Box, *command: str) -> str:
    """What a command prints that needs no state directory."""
    done = subprocess.run(
        [sys.executable, "-m", "compose", *command], env=box.env, capture_output=True, text=True, timeout=END_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def family(pid: int) -> list[psutil.Process]:
    """A supervisor, and all that it has started."""
    supervisor = psutil.Process(pid)
    return [supervisor, *supervisor.children(recursive=True)]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def none_lives(processes: list[psutil.Process]) -> bool:
    return not any(map(lives, processes))


def test_a_detached_stack_serves_until_it_is_stopped(box: Box) -> None:
    up = box.run(*UP)
    assert (up.returncode, up.stderr) == (0, "")
    url = re.search(r"serves at (http://\S+)", up.stdout)
    assert url
    assert f"blitzscale down --state-dir {box.path}" in up.stdout
    assert "Ctrl-C" not in up.stdout
    running = family(box.pid)
    assert len(running) >= 7, "a supervisor, NATS, Redis, four services and a worker"
    assert os.getsid(box.pid) == box.pid, "no terminal reaches it"
    seen = json.loads(shown(box, "top", "--json", "--once", "--url", url[1]))["entities"]
    assert seen["worker/worker-0"]["model"] == seen["model/demo"]["name"] == "demo"
    model = json.loads(shown(box, "models", "show", "demo", "--json", "--url", url[1]))
    assert [instance["workers"] for instance in model["instances"]] == [["worker-0"]]

    def operations() -> list[str]:
        found = json.loads(shown(box, "models", "show", "demo", "--json", "--url", url[1]))["operations"]
        return [operation["status"] for operation in found]

    # An instance serves before its operation is known to be done.
    eventually_sync(lambda: operations() == ["done"])

    again = box.run(*UP)
    assert again.returncode == 1
    assert f"error: another stack (process {box.pid}) uses the state directory" in again.stderr

    down = box.run("down")
    assert (down.returncode, down.stderr) == (0, "")
    assert down.stdout.endswith("stopped\n")
    assert none_lives(running)
    log = (box.path / "logs" / "blitz.log").read_text().splitlines()
    # How long a process may take to stop depends on how busy the machine is.
    log = [line for line in log if "did not stop within" not in line]
    assert [line.partition("INFO blitz: ")[2][:8] for line in log[-2:]] == ["stopping", "stopped"]
    nothing = box.run("down")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert nothing.stderr == f"error: no stack runs in {box.path}\n"


def test_a_second_call_does_not_wait_for_streams(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLITZ_MOCK_LAYER_BASE_MS", "1000")
    up = box.run(*UP)
    assert up.returncode == 0, up.stderr
    url = re.search(r"serves at (http://\S+)", up.stdout)
    assert url
    running = family(box.pid)
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "stream": True}
    with httpx.stream("POST", f"{url[1]}/v1/chat/completions", json=chat, timeout=END_S) as stream:
        assert stream.status_code == 200
        both = [subprocess.Popen(box.command("down"), env=box.env, stdout=subprocess.PIPE) for _ in range(2)]
        assert [process.wait(END_S) for process in both] == [0, 0]
    for process in both:
        process.communicate()
    assert none_lives(running)
    assert "killing everything" in (box.path / "logs" / "blitz.log").read_text()


def test_killed_it_leaves_nothing_and_is_known_to_be_gone(box: Box) -> None:
    assert box.run(*UP, "--quiet").returncode == 0
    running = family(box.pid)
    running[0].send_signal(signal.SIGKILL)
    eventually_sync(lambda: none_lives(running))
    assert box.run("down").returncode == 1
    assert box.run(*UP, "--quiet").returncode == 0
    running = family(box.pid)
    killed = box.run("down", "--kill", "--json")
    assert (killed.returncode, killed.stderr) == (0, "")
    assert f'"pid": {running[0].pid}' in killed.stdout
    assert none_lives(running)


def test_what_does_not_come_up_says_why_and_leaves_nothing(box: Box) -> None:
    late = box.run(*UP, "--timeout", "1")
    assert late.returncode == 1
    assert re.fullmatch(r"error: not ready after 1 s: .*\n", late.stderr)
    assert box.is_free()
    port = free_port()
    missing = box.run("up", "--detach", "--port", str(port), str(box.path / "none"))
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: ")
    assert missing.stderr.count("\n") == 1


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_until_it_serves_it_ends_with_its_launcher(box: Box, how: signal.Signals, status: int) -> None:
    launcher = subprocess.Popen(
        box.command(*UP), env=box.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if "waiting for" in line:
            break
    running = family(box.pid)
    launcher.send_signal(how)
    _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == status
    assert "Traceback" not in errors
    eventually_sync(lambda: none_lives(running))
