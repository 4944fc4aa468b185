"""The consumer of events, without a server."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from shared.bus import nats_events
from shared.bus.nats_events import EventSubscription
from shared.messages.live import WorkerOrder
from tests.wait_until import WAIT_S


async def test_a_consumer_is_made_again_whatever_the_client_raises_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nats_events, "RETRY_WAIT_S", 0.001)
    nothing: Any = None
    subscription = EventSubscription(nothing, "orders", WorkerOrder, nothing, nothing, nothing)
    raised = [RuntimeError("a fault of the client"), TimeoutError("no answer")]

    async def attach() -> None:
        if raised:
            raise raised.pop(0)

    monkeypatch.setattr(subscription, "_attach", attach)
    watching = asyncio.create_task(subscription._watch())
    subscription.reconnected()
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(WAIT_S):
            while raised or subscription._reconnected.is_set():
                assert not watching.done(), "nobody would hear an event any more"
                await asyncio.sleep(0.001)
    assert not watching.done()
    assert "a fault of the client" in caplog.text
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
