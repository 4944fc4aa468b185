"""How the supervisor learns that a process it started is ready."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

READY_FD_VARIABLE = "BLITZ_READY_FD"


class ReadyPipe:
    """A pipe whose writing end a child inherits: it writes once it is ready."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)

    @contextlib.contextmanager
    def listening(self, told: Callable[[], None]) -> Iterator[None]:
        """For as long as the child runs, which has its end by now. ``told()``: it wrote."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            # Once is enough, and a child that closed its end has nothing more to say.
            loop.remove_reader(self._reading)
            with contextlib.suppress(BlockingIOError):
                if os.read(self._reading, 64):
                    told()

        os.close(self.writing)
        loop.add_reader(self._reading, read)
        try:
            yield
        finally:
            read()  # it may have died right after it wrote
            os.close(self._reading)

    def close(self) -> None:
        """There is no child: it could not be started."""
        os.close(self.writing)
        os.close(self._reading)
