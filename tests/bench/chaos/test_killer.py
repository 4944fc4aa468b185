from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import pytest

from bench.chaos import killer as killer_module
from bench.chaos.injected_fault import InjectedFault, now_s
from bench.chaos.killer import Killer
from bench.chaos.plan import How, Kill


class FakeProcesses:
    """Those that are killed come back with another pid, once they are told to."""

    def __init__(self, *names: str) -> None:
        self.pids: dict[str, int | None] = {name: index for index, name in enumerate(names)}
        self.sent: list[tuple[str, int]] = []

    def names(self) -> Sequence[str]:
        return tuple(self.pids)

    def pid(self, name: str) -> int | None:
        return self.pids[name]

    def signal(self, name: str, pid: int | None, number: int) -> None:
        assert number == signal.SIGCONT or pid == self.pids[name]
        self.sent.append((name, number))
        if number == signal.SIGKILL:
            self.pids[name] = None

    def comes_back(self, name: str) -> bool:
        return not name.startswith("vllm")

    def come_back(self, name: str) -> None:
        self.pids[name] = 100 + len(self.sent)


def kill(member: str, how: How = "KILL", stopped_s: float = 0.0) -> Kill:
    return Kill(0.0, member.partition("-")[0], member, how, stopped_s)


async def test_a_kill_is_told_before_and_its_return_after() -> None:
    processes = FakeProcesses("nats")
    told: list[str] = []

    def before(fault: InjectedFault) -> None:
        assert not processes.sent
        told.append(f"before {fault.member}")

    async def after(fault: InjectedFault) -> None:
        assert processes.pid("nats") is not None
        told.append(f"after {fault.member}")

    killer = Killer(processes, before=before, after=after)
    running = asyncio.create_task(killer.run([kill("nats")], start_s=now_s()))
    while not processes.sent:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not running.done()
    processes.come_back("nats")
    await running
    assert told == ["before nats", "after nats"]
    assert killer.kills() == {"nats": 1}
    assert killer.faults[0].over_s is not None


async def test_whoever_is_away_is_passed_over_and_a_kind_that_is_away_is_skipped() -> None:
    processes = FakeProcesses("worker-0", "worker-1")
    killer = Killer(processes)
    plan = [kill("worker-1"), kill("worker-1"), kill("worker-0")]
    running = asyncio.create_task(killer.run(plan, start_s=now_s()))
    while not killer.skipped:
        await asyncio.sleep(0)
    assert [fault.member for fault in killer.faults] == ["worker-1", "worker-0"]
    assert killer.skipped == {"worker": 1}
    for name in processes.names():
        processes.come_back(name)
    await running


async def test_a_stopped_member_is_continued_and_not_struck_meanwhile() -> None:
    processes = FakeProcesses("redis")
    killer = Killer(processes)
    await killer.run([kill("redis", "STOP", 0.05), kill("redis", "STOP", 0.05)], start_s=now_s())
    assert processes.sent == [("redis", signal.SIGSTOP), ("redis", signal.SIGCONT)]
    assert killer.skipped == {"redis": 1}


async def test_nobody_stays_stopped_when_it_is_cancelled() -> None:
    processes = FakeProcesses("redis")
    running = asyncio.create_task(Killer(processes).run([kill("redis", "STOP", 60.0)], start_s=now_s()))
    while not processes.sent:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes.sent[-1] == ("redis", signal.SIGCONT)


async def test_what_nobody_starts_again_is_over_when_it_is_gone() -> None:
    processes = FakeProcesses("vllm_core-0")
    killer = Killer(processes)
    await killer.run([kill("vllm_core-0")], start_s=now_s())
    assert killer.faults[0].over_s is not None
    assert killer.faults[0].worker == "worker-0"


async def test_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = FakeProcesses("vllm_gate-0", "worker-0")
    processes.pids["vllm_gate-0"] = None
    killer = Killer(processes)
    running = asyncio.create_task(killer.run([kill("vllm_gate-0"), kill("worker-0")], start_s=now_s()))
    while not processes.sent:
        await asyncio.sleep(0)
    assert processes.sent == [("worker-0", signal.SIGKILL)], "others are not late"
    for name in processes.names():
        processes.come_back(name)
    await running
    assert killer.kills() == {"vllm_gate": 1, "worker": 1}
    monkeypatch.setattr(killer_module, "MOMENT_S", 0.0)
    await killer.run([kill("vllm_gate-0")], start_s=now_s())
    assert killer.skipped == {"vllm_gate": 1}


async def test_of_several_nats_servers_only_one_is_away_at_a_time() -> None:
    processes = FakeProcesses("nats-0", "nats-1", "nats-2")
    killer = Killer(processes)
    running = asyncio.create_task(killer.run([kill("nats-0"), kill("nats-1")], start_s=now_s()))
    while not killer.skipped:
        await asyncio.sleep(0)
    assert [fault.member for fault in killer.faults] == ["nats-0"]
    processes.come_back("nats-0")
    await running
