"""A file of keys that the gateway reads again when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from shared.settings import SettingsError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
AGAIN_S = 10.0
"""A file that could not be used is read again after so long, changed or not: what was missing may have been a right, or
a free file descriptor."""

Signature = tuple[int, int, int, int]
"""Changes when the file does."""
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """What ``read`` makes of the file goes to ``apply``, at once and after each change. For the event loop only."""

    def __init__(self, path: str, read: Callable[[str], T], apply: Callable[[T], None], what: str) -> None:
        """``what`` the log calls what is read. Raises ``SettingsError``, as ``read`` does."""
        self._path = path
        self._read = read
        self._apply = apply
        self._what = what
        self.num_good = 0
        self.num_bad = 0
        """How often the file could be used, and could not."""
        self._said = ""
        """Why the file cannot be used; empty: it can."""
        self._again_s = 0.0
        self._seen = signature(path)
        self._take(read(path))

    async def look(self) -> None:
        """Read the file if it has changed. A bad one changes nothing, and is logged."""
        now = await asyncio.to_thread(signature, self._path)
        if now == self._seen and not (self._said and time.monotonic() >= self._again_s):
            return
        self._seen = now
        try:
            found = await asyncio.to_thread(self._read, self._path)
        except SettingsError as error:
            self._again_s = time.monotonic() + AGAIN_S
            self.num_bad += 1
            if error.message != self._said:
                log.error("%s; the %s that were read before stay", error, self._what)
            self._said = error.message
            return
        self._said = ""
        self._take(found)
        log.info("%s read from %s", self._what, self._path)

    async def watch(self) -> None:
        """Look regularly, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    def _take(self, found: T) -> None:
        self._apply(found)
        self.num_good += 1


def signature(path: str) -> Signature | None:
    """None if there is no readable file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
