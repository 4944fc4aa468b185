"""Who holds a state directory: the process that has the lock, and no other one, whatever the file says."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compose import lock_holder
from compose.errors import StackRefused
from compose.lock_holder import LOCK, NothingRuns
from compose.state_dir import StateDir

HOLDS = """
import fcntl, os, sys
from compose import lock_holder
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, sys.argv[2].encode() if len(sys.argv) > 2 else lock_holder.own_line())
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(folder: Path, *line: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the lock, and wrote ``line``, or who it is."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder / LOCK), *line], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        assert process.poll() is None, "it has nothing to do with the stack"
        process.kill()


def started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_the_holder_is_found_and_signalled(tmp_path: Path) -> None:
    with holding(tmp_path) as process, lock_holder.find(tmp_path) as holder:
        assert holder.pid == process.pid
        assert not holder.wait(0)
        holder.signal(signal.SIGTERM)
        assert holder.wait(60)
        assert process.wait() == -signal.SIGTERM
        holder.signal(signal.SIGTERM)


def test_a_file_that_was_left_behind_names_nobody(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    with pytest.raises(NothingRuns, match="there has been none"):
        lock_holder.find(tmp_path)
    (tmp_path / LOCK).write_text(f"{bystander.pid} {started(bystander.pid)}\n")
    with pytest.raises(NothingRuns):
        lock_holder.find(tmp_path)


def test_an_id_that_is_used_again_is_another_process(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    earlier = int(started(bystander.pid)) - 1
    with (
        holding(tmp_path, f"{bystander.pid} {earlier}"),
        pytest.raises(StackRefused, match="cannot be seen from here"),
    ):
        lock_holder.find(tmp_path)


@pytest.mark.parametrize(
    "line", ["", "x", "17", "-1 5", "0 0", f"{1 << 40} 7", "9" * 64, pytest.param(f"{os.getpid()}", id="own")]
)
def test_what_names_no_process_is_refused(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_holder, "PAUSE_S", 0.0)
    with holding(tmp_path, line), pytest.raises(StackRefused, match="cannot be seen from here"):
        lock_holder.find(tmp_path)


def test_who_only_looks_keeps_no_stack_from_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDir(tmp_path)
    state.acquire()
    state.release()
    looks = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    with pytest.raises(StackRefused, match="another stack"):
        state.acquire()
    # It is over while the stack waits.
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _seconds: os.close(looks))
        state.acquire()
    state.release()
