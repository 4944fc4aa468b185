"""Workers of one host that put their load reports together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest

from services.worker.instance import host_group
from services.worker.instance.host_group import HostGroup, group_name
from shared.messages.codec import encode
from shared.messages.load import HostLoad, LoadReport
from tests.services.monitor.core.reports import report
from tests.wait_until import eventually_sync

INTERVAL_S = 0.1


class Host:
    """Workers that report in turn, at a clock of their own."""

    def __init__(self) -> None:
        self.name = f"blitz.test.{uuid.uuid4().hex}"
        self.groups: dict[str, HostGroup] = {}
        self.now_s = 1000.0
        self.messages: list[LoadReport | HostLoad] = []

    def add(self, *names: str) -> None:
        for name in names:
            self.groups[name] = HostGroup(self.name, "h", interval_s=INTERVAL_S)

    def exchange(self, name: str, **changes: object) -> list[str]:
        """One worker reports; whose reports it publishes."""
        published = self.groups[name].exchange(self.report_of(name, **changes), self.now_s)
        self.messages += published
        return [r.worker_id for message in published for r in reports_in(message)]

    def report_of(self, name: str, **changes: object) -> LoadReport:
        return report(name, worker_id=name, **changes)  # type: ignore[arg-type]

    def round(self, *but: str) -> dict[str, list[str]]:
        """Every worker reports once; whose reports each published."""
        self.now_s += INTERVAL_S
        return {name: self.exchange(name) for name in self.groups if name not in but}

    def gatherer(self) -> str:
        (name,) = [name for name, group in self.groups.items() if group.gathers]
        return name

    def die(self, name: str) -> None:
        """As the kernel does when a process is killed."""
        self.groups.pop(name).leave()


def reports_in(message: LoadReport | HostLoad) -> tuple[LoadReport, ...]:
    return message.reports if isinstance(message, HostLoad) else (message,)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for group in made.groups.values():
        group.leave()


def test_a_worker_that_is_alone_speaks_for_itself(host: Host) -> None:
    host.add("a")
    assert [host.round() for _ in range(3)] == [{"a": ["a"]}] * 3
    assert all(isinstance(message, LoadReport) for message in host.messages)


def test_one_worker_publishes_for_all_in_one_message(host: Host) -> None:
    host.add("a", "b", "c", "d")
    for _ in range(3):
        said = host.round()
        assert set().union(*said.values()) == set("abcd"), "nobody is missing meanwhile"
    host.messages.clear()
    assert host.round() == {"a": ["a", "b", "c", "d"], "b": [], "c": [], "d": []}
    (message,) = host.messages
    assert isinstance(message, HostLoad)
    assert message.host == "h"


def test_the_newest_report_of_each_counts(host: Host) -> None:
    host.add("a", "b")
    host.round()
    host.round()
    for tokens in (1, 2, 3):
        host.exchange("b", queued_tokens=tokens)
    host.messages.clear()
    host.exchange("a")
    (message,) = host.messages
    assert [r.queued_tokens for r in reports_in(message)] == [0, 3]


def test_when_the_one_that_gathers_dies_no_report_of_the_others_is_missing(host: Host) -> None:
    host.add("a", "b", "c", "d")
    for _ in range(3):
        host.round()
    host.die(host.gatherer())
    for _ in range(5):
        assert set().union(*host.round().values()) == set("bcd")
    said = host.round()
    assert sorted(said.values(), key=len) == [[], [], ["b", "c", "d"]]


def test_a_worker_that_has_nothing_to_report_leaves_it_to_the_others(host: Host) -> None:
    host.add("a", "b", "c")
    for _ in range(3):
        host.round()
    spare = host.gatherer()
    host.groups[spare].leave()
    for _ in range(4):
        said = host.round(spare)
        assert set().union(*said.values()) == {"b", "c"}
    assert host.gatherer() == "b"
    for _ in range(3):
        host.round()
    assert host.round() == {"a": [], "b": ["b", "c", "a"], "c": []}


def test_while_the_one_that_gathers_hangs_the_others_speak_for_themselves(host: Host) -> None:
    host.add("a", "b", "c")
    for _ in range(3):
        host.round()
    said = [host.round("a") for _ in range(60)]
    assert said[2] == {"b": [], "c": []}, "a moment is nothing"
    assert said[4:] == [{"b": ["b"], "c": ["c"]}] * 56
    # What it finds when it goes on is old.
    host.messages.clear()
    host.now_s += INTERVAL_S
    assert host.exchange("a") == ["a"]
    for _ in range(20):
        host.round()
    assert host.round() == {"a": ["a", "b", "c"], "b": [], "c": []}


def test_no_message_is_too_large(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"w{i}" for i in range(20)]
    host.add(*names)
    one = len(encode(host.report_of("w10")))
    monkeypatch.setattr(host_group, "MAX_MESSAGE_BYTES", 5 * one + 20)
    for _ in range(3):
        host.round()
    host.messages.clear()
    assert host.round()["w0"] == names
    assert [len(reports_in(message)) for message in host.messages] == [5, 5, 5, 5]
    assert max(len(encode(message)) for message in host.messages) < 6 * one


def test_more_workers_than_one_takes_speak_for_themselves(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_group, "MAX_MEMBERS", 2)
    host.add("a", "b", "c", "d")
    for _ in range(6):
        assert set().union(*host.round().values()) == set("abcd")
    assert host.round()["d"] == ["d"]


@pytest.mark.parametrize("words", [b"\xff" * 10, b"x" * (host_group.MAX_REPORT_BYTES + 10), b""])
def test_one_that_talks_nonsense_is_put_out_and_nobody_else(host: Host, words: bytes) -> None:
    host.add("a", "b")
    for _ in range(3):
        host.round()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{host.name}")
        stranger.send(words)
        assert host.round() == {"a": ["a", "b"], "b": []}
        stranger.settimeout(5.0)
        assert stranger.recv(10) == b""


def test_a_member_speaks_for_nobody_else(host: Host) -> None:
    host.add("a")
    host.round()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{host.name}")
        for name in ("b", "c"):
            stranger.send(encode(host.report_of(name)))
            assert host.round() == {"a": ["a", "b"] if name == "b" else ["a"]}


@pytest.mark.parametrize("side", ["member", "gatherer"])
def test_processes_of_another_user_are_not_listened_to(host: Host, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    code = (
        "import os, socket, sys\nos.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "name = chr(0) + sys.argv[2]\n"
        "if sys.argv[1] == 'gatherer':\n    s.bind(name); s.listen(5)\nelse:\n    s.connect(name)\n"
        "print('there', flush=True)\nsys.stdin.readline()\n"
        "if sys.argv[1] == 'member':\n    print(s.recv(1), flush=True)\nsys.stdin.read()"
    )
    if side == "member":
        host.add("a")
        host.round()
    process = subprocess.Popen(
        [sys.executable, "-c", code, side, host.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        if side == "gatherer":
            host.add("a")
        assert [host.round() for _ in range(5)] == [{"a": ["a"]}] * 5
        if side == "member":
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "b''\n", "it was let in"
    finally:
        process.kill()
        process.communicate()


def test_workers_of_one_host_and_cluster_meet_and_no_others() -> None:
    one = group_name("nats://me:secret@n1:4222, nats://n2:4222", "h")
    assert one == group_name("nats://n2:4222,nats://you:other@n1:4222", "h")
    assert "secret" not in one
    names = {one, group_name("nats://n1:4222", "h"), group_name("nats://n1:4222", "h2"), group_name("nats://n3", "h")}
    assert len(names) == 4
    assert group_name("", "h") == "", "no server, no cluster"
    assert len(one) < 100


def test_without_a_name_every_worker_is_alone() -> None:
    groups = [HostGroup("", "h", interval_s=INTERVAL_S) for _ in range(2)]
    for group in groups:
        assert group.exchange(report(), 0.0) == [report()]
        group.leave()


WORKER = """
import json, sys, time
from services.worker.instance.host_group import HostGroup
from shared.messages.load import HostLoad
from tests.services.monitor.core.reports import report
name, address = sys.argv[1:]
group = HostGroup(address, "h", interval_s=0.05)
for number in range(100_000):
    mine = report(name, worker_id=name, queued_tokens=number)
    for message in group.exchange(mine, time.monotonic()):
        reports = message.reports if isinstance(message, HostLoad) else (message,)
        numbers = [[r.worker_id, r.queued_tokens] for r in reports]
        print(json.dumps([isinstance(message, HostLoad), numbers]), flush=True)
    time.sleep(0.05)
"""


def test_a_killed_process_that_gathered_is_replaced_and_few_reports_are_lost() -> None:
    address, names = f"blitz.test.{uuid.uuid4().hex}", ["a", "b", "c", "d"]
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", WORKER, name, address],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        for name in names
    }
    for process in processes.values():
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
    said: dict[str, list[int]] = defaultdict(list)
    gathered: list[tuple[str, int]] = []
    unread = dict.fromkeys(names, b"")

    def listen() -> None:
        for name, process in processes.items():
            assert process.stdout is not None
            *lines, rest = (unread[name] + (process.stdout.read() or b"")).split(b"\n")
            unread[name] = rest  # a line that has not come whole
            for line in lines:
                together, reports = json.loads(line)
                for worker_id, number in reports:
                    said[worker_id].append(number)
                if together:
                    gathered.append((name, len(reports)))

    def until(names_left: int) -> str:
        """Who speaks for all of them at last."""

        def is_told() -> bool:
            listen()
            return bool(gathered) and gathered[-1][1] == names_left

        gathered.clear()
        eventually_sync(is_told)
        return gathered[-1][0]

    def until_said(count: int) -> None:
        def are_said() -> bool:
            listen()
            return all(len(said[worker_id]) >= count for worker_id in processes)

        eventually_sync(are_said)
        listen()  # what was said before what was heard last, in a pipe that was read before that one

    try:
        for left in (4, 3, 2):
            first = until(left)
            said.clear()
            processes[first].send_signal(signal.SIGKILL)
            processes.pop(first).wait()
            if left > 2:
                until(left - 1)
            until_said(10)
            for survivor in processes:
                numbers = sorted(said[survivor])
                gaps = [b - a - 1 for a, b in pairwise(numbers)]
                # Half a second is ten reports; what it had taken and not passed on is lost.
                assert max(gaps, default=99) < 10, (survivor, numbers)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
