"""Asking the pool, as the process ends, until a copy may go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shared.errors import BlitzError, Conflict

log = logging.getLogger(__name__)

ASK_INTERVAL_S = 0.3
POOL_SILENT_S = 5.0
"""A pool that does not answer for so long finds no successor for a copy either."""


async def wait_until_retired(ask: Callable[[], Awaitable[None]], what: str) -> None:
    """Return once the pool lets a copy go: another is there, or nobody else could hold one. Otherwise it has another
    worker load it meanwhile, perhaps from this one. ``ask`` raises ``Conflict`` as long as the copy must stay.

    Returns, too, if the pool cannot be asked. No limit of its own: cancel it.
    """
    loop = asyncio.get_running_loop()
    heard_s, waits = loop.time(), False
    while True:
        try:
            await ask()
        except Conflict as error:
            heard_s = loop.time()
            if not waits:
                log.info("%s waits for another worker to take it over: %s", what, error)
            waits = True
        except BlitzError as error:
            if loop.time() - heard_s >= POOL_SILENT_S:
                log.warning("%s goes without the pool's word: %s", what, error)
                return
        else:
            return
        await asyncio.sleep(ASK_INTERVAL_S)
