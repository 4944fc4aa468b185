"""``blitzscale up`` as a user runs it: it serves, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.stack, pytest.mark.ucx]

END_S = 240.0
URL = "http://127.0.0.1:8000"
GOLDEN = Path(__file__).parent / "golden/up.txt"
QUICK_START = Path(__file__).parent / "golden/quick_start.txt"
README = Path(__file__).parents[2] / "README.md"


class Running(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    said: str
    """So far."""
    shared_before: set[str]
    """What others had in shared memory, perhaps in the name of an earlier process of the same id."""


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Running]:
    """A running ``blitzscale up`` with the demo model."""
    shared_before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-m", "compose", "up", "--workers", "2", "--port", "0", "--state-dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"BLITZ_WORKER_ARENA_MIB": "64", "BLITZ_WORKER_KV_MIB": "64"},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        served = re.search(r"serves at (http://\S+)", line)
        if served:
            break
    else:
        pytest.fail("".join(lines))
    yield Running(process, served.group(1), "".join(lines), shared_before)
    process.kill()
    process.stdout.close()
    process.wait()


def _family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 8, "NATS, Redis, four services and two workers"
    return children


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_gone(processes: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + END_S
    while left := [process for process in processes if _runs(process)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def test_its_lines_are_what_a_newcomer_needs(up: Running, tmp_path: Path) -> None:
    """From the start to Ctrl-C: where it is, what to paste, and nothing of what it is made of."""
    assert up.process.stdout is not None
    said = up.said
    while "what each process says" not in said:
        said += up.process.stdout.readline()
    up.process.send_signal(signal.SIGINT)
    said += up.process.stdout.read()
    assert up.process.wait(END_S) == 0
    said = said.replace(up.url, "http://127.0.0.1:8000").replace(str(tmp_path), "STATE")
    # How often it says what it waits for, and how long a part may take to close, depends on how busy the machine is.
    told = [line for line in said.splitlines() if not re.search("waiting for|did not close within", line)]
    # Columns are as wide as the longest path.
    told = [re.sub(r"(?<=\S) {2,}", "  ", line) for line in told]
    assert told == GOLDEN.read_text().splitlines()


def test_what_the_readme_has_a_newcomer_paste_says_is_golden(up: Running) -> None:
    """The commands of its quick start, one after the other: figures apart, each says the same every time."""
    (block,) = (each for each in re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL) if "status" in each)
    commands = re.split(r"\n(?=\S)", block.replace("source .venv/bin/activate\n", "").strip())
    golden = re.split(r"^(?=\$ )", QUICK_START.read_text(), flags=re.MULTILINE)[1:]
    assert len(golden) == len(commands)
    for command, expected in zip(commands, golden, strict=True):
        only_looks = not re.match("curl|blitzscale scale", command)
        deadline_s = time.monotonic() + END_S
        while (said := _pasted(command, up.url)) != expected and only_looks and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert said == expected


def _pasted(command: str, url: str) -> str:
    """What a command says, without what differs from one start to the next: ids, figures, what a model with random
    weights says, and what the monitor has seen by now."""
    program, *words = shlex.split(command.replace(URL, url).replace("\\\n", ""), comments=True)
    if program == "curl":  # which not every machine has
        address, _, header, _, body = words
        headers = dict([header.split(": ")])
        said = httpx.post(address, headers=headers, content=body, timeout=END_S).raise_for_status().text
    else:
        env = os.environ | {"BLITZ_URL": url, "COLUMNS": "400"}
        blitzscale = [sys.executable, "-m", "compose", *words]
        ended = subprocess.run(blitzscale, env=env, capture_output=True, text=True, timeout=END_S, check=False)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        said = ended.stdout + ended.stderr
    said = re.sub(r'"content":"(\\.|[^"\\])*"', '"content":"TEXT"', said)
    for pattern, name in (
        (r'(?<="finish_reason":)"\w+"', '"REASON"'),
        (rf"\b{re.escape(socket.gethostname())}\b", "HOST"),
        (r"\b[0-9a-f]{12,}\b", "ID"),
        (r"\S+/models/demo", "DEMO"),
        (r"(?<=  load  ).*", "LOAD"),
        (r"\d+(\.\d+)?", "N"),
    ):
        said = re.sub(pattern, name, re.sub(r"(?<=\S) {2,}", "  ", said))
    lines = [line.rstrip() for line in said.strip().splitlines()]
    # Which of the workers has the instance is not the same every time either; their table is the last one.
    lines.sort(key=lambda line: line if line.startswith("worker-N") else "")
    return "\n".join([f"$ {command.partition('  #')[0].rstrip()}", *lines, ""])


def test_to_stop_an_idle_stack_is_nothing_to_be_warned_of(up: Running) -> None:
    process = up.process
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=END_S)[0]
    assert said.rstrip().endswith("stopped")
    assert "requests of" not in said, "there are none"
    # How long a part may take to close is a matter of how busy the machine is.
    told = [line for line in said.splitlines() if "did not close within" not in line]
    assert not [line for line in told if re.search(r" (WARNING|ERROR|CRITICAL) |\[(WRN|ERR|FTL)\]", line)], said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_it_ends(up: Running, how: signal.Signals) -> None:
    process, url = up.process, up.url
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
        timeout=END_S,
    )
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 8
    family = _family(process)
    mine = {str(p.pid) for p in family}
    process.send_signal(how)
    _wait_gone(family)
    if how == signal.SIGINT:
        assert process.wait(END_S) == 0
    shared = set(os.listdir("/dev/shm")) - up.shared_before
    left = [name for name in shared if mine & set(re.findall(r"\d+", name))]
    assert left == []
