"""Time as an event loop has it: none passes while its process stands still, as it may for seconds on a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType

import pytest

TICK_S = 0.005


class LoopTime:
    """For modules that measure, in the place of ``time``."""

    process_time = staticmethod(time.process_time)

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        self._now_s += 1e-7  # it is never the same twice
        return self._now_s

    async def tick(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._now_s += TICK_S


@asynccontextmanager
async def loop_time(*modules: ModuleType) -> AsyncIterator[None]:
    """These modules have it in the block."""
    clock = LoopTime()
    with pytest.MonkeyPatch.context() as patched:
        for module in modules:
            patched.setattr(module, "time", clock)
        ticking = asyncio.create_task(clock.tick())
        try:
            yield
        finally:
            ticking.cancel()
