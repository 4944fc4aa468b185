"""What gateways are told of the steps of requests that are computed alone: before each, and after it.

Should the process die in such a step, the request's gateway knows that it was in it, and no other was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

from prometheus_client import CollectorRegistry, Counter

from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import StepOutput
from services.worker.requests.inbox import Inbox
from shared.bus.base import Bus

log = logging.getLogger(__name__)

SAY_S = 1.0
"""Longest that the engine waits for a word to be sent; without it the gateway does not know of this step."""


class StepAnnouncer:
    """See ``services.worker.engine.loop.StepListener``. Made on the event loop, called on the engine's thread."""

    def __init__(self, bus: Bus, inbox: Inbox, *, metrics: CollectorRegistry) -> None:
        self._steps = Counter(
            "blitz_worker_alone_steps_total",
            "Steps of requests that are computed alone. Nothing is in flight beside them.",
            registry=metrics,
        )
        self._bus = bus
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()

    def begins(self, sequence: ActiveSequence) -> None:
        self._steps.inc()
        self._say(sequence, begins=True)

    def ended(self, sequence: ActiveSequence) -> None:
        if not sequence.finished:
            self._say(sequence, begins=False)

    def _say(self, sequence: ActiveSequence, *, begins: bool) -> None:
        self._inbox.on_output(StepOutput((sequence.computing(begins),)))
        sent = self._sent()
        try:
            future = asyncio.run_coroutine_threadsafe(sent, self._loop)
        except RuntimeError:  # the event loop has ended, and the process with it
            sent.close()
            return
        try:
            future.result(SAY_S)
        except FutureTimeoutError:
            future.cancel()
            log.warning("request %s is computed alone, and its gateway could not be told", sequence.request_id)
        except CancelledError:
            return

    async def _sent(self) -> None:
        """Until the server has all that was said so far. At once while the bus is away."""
        if self._bus.connected_since_s is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAY_S):
                await self._inbox.flushed()
                await self._bus.flush()
