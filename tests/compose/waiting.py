"""Bounded waiting, for tests of processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Returns when ``condition`` holds; fails the test after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        await asyncio.sleep(0.02)


def until_sync(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """As ``until``, for tests without a loop."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)
