"""Reads as slow as those of another machine: of its disk, or of the link between its host memory and a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field


class Pace:
    """A way that all reads of one kind share, one behind the other. All methods on the event loop.

    Nothing is saved up while nobody reads, so no read comes ahead of the rate. What a reader loses between two waits it
    makes up for, as on a link that fills a buffer meanwhile.
    """

    def __init__(
        self,
        gbps: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``gbps`` None: no limit."""
        self.gbps = gbps
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = 0.0
        self._num_readers = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While a read goes on. One that was cancelled leaves nothing for the next to wait for."""
        if not self._num_readers:
            self._free_at_s = self._clock()
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1

    async def wait(self, num_bytes: int) -> None:
        """Return when so many more bytes would have come through."""
        if self.gbps is None:
            return
        self._free_at_s += num_bytes * 8 / (self.gbps * 1e9)
        await self._sleep(self._free_at_s - self._clock())


@dataclass(frozen=True, slots=True)
class Paces:
    """Of one worker."""

    disk: Pace = field(default_factory=Pace)
    host: Pace = field(default_factory=Pace)
    """From the memory of its host."""
