"""Which process holds a state directory, so that it can be asked to stop, and never another one.

The lock's file names the holder by process id and start time. It counts only while the kernel's lock is held, and while
a process with that id began then and belongs to the file's owner: ids are used again, and files are left behind. What
is signalled is a descriptor of that very process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from pathlib import Path
from types import TracebackType

import psutil

from compose.errors import StackError, StackRefused

LOCK = "lock"
_MAX_BYTES = 64
_STARTED = 19
"""Of the fields after the command's name in ``/proc/PID/stat``: clock ticks since the machine began."""
_TRIES = 20
PAUSE_S = 0.05
"""A stack that begins has the lock a moment before it says so in the file."""


class NothingRuns(StackError):
    """No stack holds the state directory."""


class LockHolder:
    """A process that holds a lock. Closed with ``with``."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    def __enter__(self) -> LockHolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def signal(self, number: signal.Signals) -> None:
        """Nothing where it has ended. Raises ``StackRefused`` where this user may not."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise StackRefused(f"process {self.pid} is another user's: stop it as that one") from error

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])

    def descendants(self) -> list[psutil.Process]:
        """Processes that it started, and theirs."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def own_line() -> bytes:
    """What this process writes to the lock's file."""
    return f"{os.getpid()} {_started(os.getpid())}\n".encode()


def take(lock: int) -> bool:
    """Hold the lock from now on. False: another process does, for longer than one that only looks (``find``)."""
    for pause_s in (PAUSE_S, 0.0):
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(pause_s)
    return False


def named(lock: int) -> tuple[int, int] | None:
    """Process id and start time as the file says. None: it says nothing of the kind."""
    words = os.pread(lock, _MAX_BYTES, 0).split()
    if len(words) < 2 or not all(word.isdigit() and len(word) < 20 for word in words[:2]):
        return None
    return int(words[0]), int(words[1])


def find(folder: Path) -> LockHolder:
    """The holder of a state directory. Raises ``NothingRuns``, and ``StackRefused`` where it cannot be known."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NothingRuns(f"no stack runs in {folder}: there has been none") from None
    except OSError as error:
        raise StackRefused(f"the state directory {folder} cannot be read: {error.strerror}") from error
    try:
        for _ in range(_TRIES):
            if not _is_held(lock):
                raise NothingRuns(f"no stack runs in {folder}")
            if (holder := _process(lock)) is not None:
                return holder
            time.sleep(PAUSE_S)
    finally:
        os.close(lock)
    raise StackRefused(
        f"{folder} is in use, and by which process cannot be seen from here (it may run in a container): stop it there"
    )


def _is_held(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def _process(lock: int) -> LockHolder | None:
    found = named(lock)
    if found is None or not 0 < found[0] < 1 << 31:
        return None
    pid, started = found
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    # After the descriptor: what is compared is the process that it stands for.
    try:
        if _started(pid) == started and os.stat(f"/proc/{pid}").st_uid == os.fstat(lock).st_uid:
            return LockHolder(pid, descriptor)
    except OSError:
        pass  # it has ended
    os.close(descriptor)
    return None


def _started(pid: int) -> int:
    """Raises ``OSError`` where there is no such process."""
    # A command's name may have blanks and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[_STARTED])
