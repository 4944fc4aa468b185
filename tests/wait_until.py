"""Waiting for what will be true soon. What never comes ends the wait, which says what it waited for."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from textwrap import dedent

WAIT_S = 120.0
"""Far more than anything takes on an idle machine: a busy one must not fail a test that would pass."""


async def eventually(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], timeout_s: float = WAIT_S
) -> None:
    """Wait until the condition, plain or awaitable, is truthy. Raises ``AssertionError``."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                result = condition()
                if inspect.isawaitable(result):
                    result = await result
                if result:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(_what(condition, timeout_s)) from None


def eventually_sync(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """As ``eventually``, without a loop."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, _what(condition, timeout_s)
        time.sleep(0.02)


def _what(condition: Callable[[], object], timeout_s: float) -> str:
    try:
        source = dedent(inspect.getsource(condition)).strip()
    except (OSError, TypeError):
        source = repr(condition)
    return f"not within {timeout_s:g} s: {source}"
