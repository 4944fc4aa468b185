"""Waiting for what will be true soon."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

TIMEOUT_S = 20.0
"""Generous: a loaded machine must not fail a test that would pass."""


async def eventually(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], timeout_s: float = TIMEOUT_S
) -> None:
    """Wait until the condition, plain or awaitable, is truthy. Raises ``TimeoutError``."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if inspect.isawaitable(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.01)
