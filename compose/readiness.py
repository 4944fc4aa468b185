"""How the supervisor learns that a process it started is ready."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

from compose.probes import Probe

READY_FD_VARIABLE = "BLITZ_READY_FD"
_ASK_EVERY_S = 0.1
_ANSWER_S = 2.0


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


async def until_answer(probe: Probe) -> None:
    """Ask until the probe answers True. Cancel it when the process has ended."""
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                if await probe():
                    return
        await asyncio.sleep(_ASK_EVERY_S)
