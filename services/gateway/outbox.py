"""Messages to workers: submits one by one, cancels at once, acknowledgements in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.gateway.config import GatewayConfig
from services.gateway.core.stream import StreamState
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.common import Ack
from shared.messages.generation import AckTerminal, Cancel, StreamRef, Submit
from shared.subjects import Process

log = logging.getLogger(__name__)

STRAY_PAUSE_S = 1.0
"""A stream that no request needs is cancelled again no sooner than this."""


class Outbox:
    """Collects cancels and acknowledgements inline; ``run`` publishes them."""

    def __init__(self, bus: Bus, clock: Callable[[], float], config: GatewayConfig, incarnation: str) -> None:
        self._bus = bus
        self._clock = clock
        self._config = config
        self._incarnation = incarnation
        self._cancels: list[tuple[Process, Cancel]] = []
        self._acks: dict[Process, list[StreamRef]] = {}
        self._strays: dict[tuple[Process, str, int], float] = {}
        self._filled = asyncio.Event()

    async def submit(self, stream: StreamState, worker: Process, attempt: int) -> None:
        """Ask the worker to which a stream was submitted to take it, in that attempt. Raises ``BlitzError``."""
        message = Submit(
            request_id=stream.request_id,
            attempt=attempt,
            gateway_id=self._config.gateway_id,
            instance_id=stream.instance_id,
            model=stream.model,
            model_hash=stream.model_hash,
            prompt_token_ids=stream.prompt_token_ids,
            sampling=stream.sampling,
            output_token_ids=tuple(stream.output_token_ids),
            arrived_at_s=stream.arrived_at_s,
            decode_at=stream.decode_at,
            alone_tokens=stream.alone_tokens,
            gateway_incarnation=self._incarnation,
            may_wait=stream.may_wait,
            cache_scope=stream.cache_scope,
        )
        subject = subjects.worker_submit(worker)
        await self._bus.request(subject, message, Ack, timeout_s=self._config.submit_timeout_s)

    def cancel(self, worker: Process, request_id: str, attempt: int) -> None:
        """Tell a worker to forget an attempt."""
        self._strays[worker, request_id, attempt] = self._clock()
        self._cancels.append((worker, Cancel(request_id=request_id, attempt=attempt)))
        self._filled.set()

    def cancel_stray(self, worker: Process, request_id: str, attempt: int) -> None:
        """The same for a stream that should no longer send, unless its worker was told just now."""
        told_s = self._strays.get((worker, request_id, attempt))
        if told_s is None or self._clock() - told_s >= STRAY_PAUSE_S:
            self.cancel(worker, request_id, attempt)

    def acknowledge(self, worker: Process, request_id: str, attempt: int) -> None:
        """The terminal part has arrived; the worker may forget the tokens."""
        self._acks.setdefault(worker, []).append(StreamRef(request_id=request_id, attempt=attempt))
        self._filled.set()

    def forget_strays(self, now_s: float) -> None:
        """Drop the memory of cancels long past."""
        self._strays = {key: at for key, at in self._strays.items() if now_s - at < 10 * STRAY_PAUSE_S}

    async def run(self) -> None:
        """Publish for ever."""
        while True:
            await self._filled.wait()
            await self.flush()

    async def flush(self) -> None:
        """Publish what is there."""
        self._filled.clear()
        cancels, self._cancels = self._cancels, []
        acks, self._acks = self._acks, {}
        try:
            for worker, cancel in cancels:
                await self._bus.publish(subjects.worker_cancel(worker), cancel)
            for worker, streams in acks.items():
                await self._bus.publish(subjects.worker_ack(worker), AckTerminal(streams=tuple(streams)))
        except BlitzError as error:
            # Both are repeated when the worker's next part shows that it did not receive them.
            log.warning("could not reach workers: %s", error)
