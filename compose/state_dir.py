"""The folder in which one stack keeps its files, held by a lock while the stack runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from compose import credentials, lock_holder
from compose.errors import StackRefused

_MAX_SOCKET_PATH_BYTES = 100
"""``sun_path`` holds 108 bytes."""


class StateDir:
    """Exclusive use of a folder. The lock is the kernel's: it ends with this process, even by SIGKILL."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.logs = self.path / "logs"
        self.nats = self.path / "nats"
        self.redis = self.path / "redis"
        self.credentials = self.path / "credentials"
        self._lock_fd: int | None = None

    @property
    def redis_socket(self) -> Path | None:
        """Where Redis listens; None where the path would be too long for a socket."""
        socket = self.redis / "redis.sock"
        return socket if len(os.fsencode(socket)) <= _MAX_SOCKET_PATH_BYTES else None

    def acquire(self, cluster: tuple[str, ...] = ()) -> None:
        """Create and lock the folder, empty the registry's part of it, and make new credentials; ``cluster``: as
        ``credentials.make`` takes it.

        The registry holds what runs now, so a new stack starts with none; within a run it survives
        Redis's restarts. The plan stream (the record of scale operations) is kept from run to run.
        Raises ``StackRefused`` if another stack holds the folder or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self.path / lock_holder.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StackRefused(f"the state directory {self.path} cannot be used: {error.strerror}") from error
        if not lock_holder.take(fd):
            holder = lock_holder.named(fd)
            os.close(fd)
            raise StackRefused(
                f"another stack (process {holder[0] if holder else 'unknown'}) uses the state directory {self.path}: "
                "stop it, or give this one its own --state-dir"
            )
        os.ftruncate(fd, 0)
        os.write(fd, lock_holder.own_line())
        self._lock_fd = fd
        shutil.rmtree(self.redis, ignore_errors=True)
        for folder in (self.logs, self.nats, self.redis):
            folder.mkdir(mode=0o700, exist_ok=True)
        try:
            credentials.make(self.credentials, cluster=cluster)
        except StackRefused:
            self.release()
            raise

    def release(self) -> None:
        """Give the folder back. Safe to call twice."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
