from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from compose.child import ChildSpec, describe_exit
from compose.errors import StackRefused
from compose.restart_policy import RestartPolicy
from compose.supervisor import Supervisor
from tests.wait_until import WAIT_S, eventually

# However long a busy machine takes for a start, what lived for that long has not been well.
QUICK = RestartPolicy(first_delay_s=0.02, max_delay_s=0.05, stable_s=600.0, max_failed_starts=3)
READY = "import os\nos.write(int(os.environ['BLITZ_READY_FD']), b'ready')\n"
FOREVER = "import time\nprint('up', flush=True)\ntime.sleep(600)"


def python(name: str, code: str, *, grace_s: float = 60.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-S", "-c", code), dict(os.environ), grace_s)


class Told:
    """What the supervisor printed."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.said: list[str] = []

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def supervisor(tmp_path: Path, told: Told) -> AsyncIterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", sink=told.line, say=told.said.append, policy=QUICK)
    yield made
    pids = [child.pid for child in made.children.values() if child.pid is not None]
    made.kill_all()
    await made.stop([])
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_a_childs_lines_reach_the_sink_and_its_file(supervisor: Supervisor, told: Told, tmp_path: Path) -> None:
    written = tmp_path / "written"
    child = await supervisor.start(
        python(
            "talker",
            "import sys, time\nprint('out')\nsys.stderr.write('err')\n"
            f"open({str(written)!r}, 'w').close()\ntime.sleep(600)",
        )
    )
    await supervisor.start(python("other", FOREVER))
    await eventually(lambda: ("other", "up") in told.lines and written.exists())
    supervisor.kill_all()
    await supervisor.stop([])
    assert ("talker", "err") in told.lines
    assert "err" in child.log.path.read_text()


async def test_a_child_that_dies_is_started_again_and_it_is_said(supervisor: Supervisor, told: Told) -> None:
    child = await supervisor.start(python("worker-0", FOREVER))
    await eventually(lambda: ("worker-0", "up") in told.lines)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: child.pid not in (None, first))
    assert child.num_restarts == 1
    assert any("worker-0 died (killed by SIGKILL" in text for text in told.said)


async def test_a_crash_loop_is_given_up_with_the_last_lines(supervisor: Supervisor, told: Told) -> None:
    child = await supervisor.start(python("pool", "raise SystemExit('no such setting')"))
    error = await supervisor.wait_gave_up()
    assert child.state == "gave_up"
    assert error.name == "pool"
    assert "pool keeps dying (exit status 1" in str(error)
    assert error.last_lines[-1] == "no such setting"
    assert child.num_restarts == 2


@pytest.mark.parametrize("how", ["told", "probed"])
async def test_a_process_that_was_ready_is_started_again_as_often_as_it_dies(supervisor: Supervisor, how: str) -> None:
    asked = []

    async def answers() -> bool:
        asked.append(1)
        return True

    code = READY + FOREVER if how == "told" else FOREVER
    spec = replace(python("nats", code), tells_ready=how == "told", probe=answers if how == "probed" else None)
    child = await supervisor.start(spec)
    for death in range(1, 6):
        await eventually(lambda: child.ready and child.pid is not None)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await eventually(lambda death=death: child.num_restarts == death)  # type: ignore[misc]
    await eventually(lambda: child.ready and child.state == "running")
    assert bool(asked) == (how == "probed")


async def test_a_process_that_dies_right_after_it_was_ready_was_ready(supervisor: Supervisor) -> None:
    child = await supervisor.start(replace(python("pool", READY), tells_ready=True))
    await eventually(lambda: child.num_restarts >= 5)
    assert child.state != "gave_up"


@pytest.mark.parametrize("spec", [{"tells_ready": True}, {"probe": None}])
async def test_a_process_that_is_not_ready_in_several_starts_is_given_up(
    supervisor: Supervisor, spec: dict[str, Any]
) -> None:
    async def refuses() -> bool:
        raise ConnectionRefusedError

    spec = {"probe": refuses} if "probe" in spec else spec
    child = await supervisor.start(replace(python("redis", "import time\ntime.sleep(0.15)"), **spec))
    error = await supervisor.wait_gave_up()
    assert "before it is ready" in str(error)
    assert child.num_restarts == 2


async def test_without_one_that_the_rest_can_do_without_nobody_is_stopped(tmp_path: Path, told: Told) -> None:
    supervisor = Supervisor(
        tmp_path / "logs", say=told.said.append, policy=QUICK, serves_on=lambda name: name == "worker-1"
    )
    gave_up = asyncio.ensure_future(supervisor.wait_gave_up())
    try:
        child = await supervisor.start(python("worker-1", "raise SystemExit('no such device')"))
        other = await supervisor.start(python("worker-0", FOREVER))
        await eventually(lambda: child.state == "gave_up")
        assert any("worker-1 IS GIVEN UP" in text for text in told.said)
        assert told.said[-1].strip() == "no such device"
        await asyncio.sleep(0.05)
        assert not gave_up.done()
        assert other.state == "running"
        await supervisor.start(python("pool", "raise SystemExit('no such setting')"))
        assert (await gave_up).name == "pool"
    finally:
        gave_up.cancel()
        supervisor.kill_all()
        await supervisor.stop([])


async def test_deaths_that_were_asked_for_are_not_a_crash_loop(supervisor: Supervisor, told: Told) -> None:
    child = await supervisor.start(python("worker-0", FOREVER))
    for _ in range(5):
        before = child.pid
        child.signal(signal.SIGKILL)
        await eventually(lambda before=before: child.pid not in (None, before))  # type: ignore[misc]
    assert child.state == "running"


async def test_a_command_that_cannot_be_started_is_refused_by_name(supervisor: Supervisor) -> None:
    with pytest.raises(StackRefused, match=r"nats cannot be started \(/no/such/nats-server\)"):
        await supervisor.start(ChildSpec("nats", ("/no/such/nats-server",), {}))


async def test_stop_follows_the_order_and_lets_children_finish(
    supervisor: Supervisor, told: Told, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    code = (
        "import signal, sys, time\n"
        "def stop(number, frame):\n"
        "    time.sleep({delay})\n"
        "    open({journal!r}, 'a').write({name!r} + '\\n')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    for name, delay in (("nats", 0.0), ("worker-0", 0.1), ("gateway", 0.3)):
        await supervisor.start(python(name, code.format(delay=delay, journal=str(journal), name=name)))
    await eventually(lambda: len(told.lines) == 3)
    await supervisor.stop([["gateway"], ["worker-0"], ["nats"]])
    assert journal.read_text().split() == ["gateway", "worker-0", "nats"]
    assert {child.state for child in supervisor.children.values()} == {"stopped"}


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(supervisor: Supervisor, told: Told) -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    child = await supervisor.start(python("monitor", code, grace_s=0.3))
    await eventually(lambda: bool(told.lines))
    pid = child.pid
    await supervisor.stop([["monitor"]])
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert any("monitor did not stop within 0.3 s" in text for text in told.said)


async def test_a_suspended_child_still_stops(supervisor: Supervisor, told: Told) -> None:
    child = await supervisor.start(python("worker-0", FOREVER, grace_s=600.0))
    await eventually(lambda: bool(told.lines))
    child.signal(signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        await supervisor.stop([["worker-0"]])
    assert not any("did not stop" in text for text in told.said), "it is not killed"
    assert child.pid is None


async def test_stopping_while_a_restart_waits_does_not_start_it_again(tmp_path: Path, told: Told) -> None:
    slow = RestartPolicy(first_delay_s=60.0, max_delay_s=60.0)
    supervisor = Supervisor(tmp_path / "logs", sink=told.line, say=told.said.append, policy=slow)
    child = await supervisor.start(python("pool", "pass"))
    await eventually(lambda: child.state == "waiting")
    await supervisor.stop([])
    assert child.state == "stopped"
    assert child.num_restarts == 1


async def test_ctrl_c_in_the_terminal_does_not_reach_the_children(supervisor: Supervisor) -> None:
    child = await supervisor.start(python("gateway", FOREVER))
    assert child.pid is not None
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()


async def test_two_children_of_one_name_are_refused(supervisor: Supervisor) -> None:
    await supervisor.start(python("pool", FOREVER))
    with pytest.raises(ValueError, match="pool"):
        await supervisor.start(python("pool", FOREVER))


def test_exits_are_described_for_people() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-99) == "killed by signal 99"
