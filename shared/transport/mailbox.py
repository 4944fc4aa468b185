"""Commands for a thread that may be asleep in ``epoll``."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """A queue of commands with a wake-up. ``post`` from any thread; the rest from the owner only."""

    def __init__(self) -> None:
        self._commands: deque[Callable[[], None]] = deque()
        self._owner: int | None = None
        self._asleep = False
        self._lock = threading.Lock()
        self._closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._event_fd, select.EPOLLIN)

    def own(self) -> None:
        """Make the calling thread the owner."""
        self._owner = threading.get_ident()

    def watch(self, fd: int) -> None:
        """Let events on ``fd`` end ``sleep`` too."""
        self._epoll.register(fd, select.EPOLLIN)

    def post(self, command: Callable[[], None]) -> bool:
        """Run ``command`` on the owner, at once when that is the caller. False after ``close``."""
        if threading.get_ident() == self._owner:
            command()
            return True
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
            if self._asleep:
                # One write per sleep: a busy owner looks at the queue by itself.
                self._asleep = False
                os.eventfd_write(self._event_fd, 1)
        return True

    def run_posted(self) -> bool:
        """Run the commands that are there; whether there were any."""
        if not self._commands:
            return False
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        return True

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a command, an event on a watched descriptor, or the time-out."""
        with self._lock:
            if self._commands:
                return
            self._asleep = True
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._event_fd:
                os.eventfd_read(self._event_fd)
        self._asleep = False

    def close(self) -> None:
        """Refuse further commands, run those that came before, release the descriptors."""
        with self._lock:
            self._closed = True
        while self.run_posted():
            pass
        self._owner = None
        self._epoll.close()
        os.close(self._event_fd)
