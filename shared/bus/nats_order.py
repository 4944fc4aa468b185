"""What the client library leaves open: being sure that the server has seen what was sent, that a task ends, and that
what is late is not sent at all.

The client's own ``flush`` writes its PING ahead of commands that wait in its buffer, so it can return
before the server knows of a subscription just made. A request queues behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from shared import subjects

_TIMEOUT_S = 2.0
_CANCEL_AGAIN_S = 0.1


async def round_trip(client: Client) -> None:
    """Return once the server has processed everything sent so far, or after 2 s. At once while disconnected."""
    if client.is_connected:
        with contextlib.suppress(nats.errors.Error):  # "no responders" is the answer expected
            await client.request(subjects.nobody(), timeout=_TIMEOUT_S)


async def drain(client: Client, subscription: Subscription) -> None:
    """Withdraw the subscription; what the server had sent by then is handled before this returns."""
    with contextlib.suppress(nats.errors.Error):  # closed before, or disconnected meanwhile
        if client.is_connected:
            await client._send_unsubscribe(subscription._id)
            await round_trip(client)
            await subscription.drain()  # type: ignore[no-untyped-call]
        else:
            await subscription.unsubscribe()


def drop_unsent(client: Client, subjects: Collection[str]) -> None:
    """Take messages on these subjects out of what is to be sent once the connection is there again."""
    starts = tuple(f"{verb} {subject} ".encode() for subject in subjects for verb in ("PUB", "HPUB"))
    if starts:
        client._pending = [command for command in client._pending if not command.startswith(starts)]
        client._pending_data_size = sum(map(len, client._pending))


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it is done: the client swallows a cancellation that meets it while it flushes."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
