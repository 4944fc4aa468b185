"""Files with secrets in them, and the folder that they are in."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compose.errors import StackRefused

TRIES = 50
PAUSE_S = 0.1
"""Between two tries for a folder that another process holds: it is done within a second."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Have the folder, which is made if missing, for this process alone: two that write at once would leave some files
    of each. The lock is the kernel's: it ends with this process, even by SIGKILL.

    Raises ``StackRefused`` if another process keeps it, or if it cannot be made or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StackRefused(f"{folder} cannot be written: {error.strerror}") from error
    try:
        _lock(folder, fd)
        yield
    finally:
        os.close(fd)


def write(path: Path, text: str, mode: int) -> None:
    """Replace a file as a whole: whoever reads sees the old text or the new one, also if this process is killed or the
    machine stops. For whoever has the folder ``alone``: the text's way there has one name.

    Never readable by more than ``mode`` says, not for a moment; whoever holds the old one open keeps it.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def sync(folder: Path) -> None:
    """Bring its files' names to the disk: where the machine stops later, all that was written before is there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(folder: Path, fd: int) -> None:
    for _ in range(TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError as error:
            raise StackRefused(f"{folder} cannot be locked: {error.strerror}: give one on a local disk") from error
        else:
            return
    raise StackRefused(f"another process is writing credentials to {folder}: call again when it has ended")
