"""How the KV of pulled batches gets to the source: while their other layers run, and off the engine's thread.

One batch after the other, as they decode. The source asks for layers as it has room for them; the target keeps its copy
until the claim is settled. What does not come is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from dataclasses import dataclass

from services.worker.instance.instance import Instance
from services.worker.link import LinkLost
from services.worker.live.link_to_target import LinkToTarget
from services.worker.live.source_stepper import SourceBatch, SourceStepper
from services.worker.live.tensors import Tensors
from shared.aio import in_thread
from shared.errors import BlitzError, TransferAborted
from shared.messages.common import Ack
from shared.messages.live import PullKv
from shared.transport.base import Buffer

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Layers come together up to so many bytes; a larger layer comes alone."""
WINDOW_BYTES = 64 << 20
"""Of KV that may be on its way, or wait to be imported; at least one piece."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A batch whose KV is to be fetched. ``unasked``: as it comes from a target that sends it whole."""

    pulled: SourceBatch
    claim_id: str
    serial: int
    unasked: asyncio.Future[Buffer] | None = None


class KvFetching:
    """Event loop only."""

    def __init__(
        self, pair_id: str, instance: Instance, link: LinkToTarget, stepper: SourceStepper, tensors: Tensors
    ) -> None:
        self._pair_id = pair_id
        self._engine_thread = instance.engine
        self._link = link
        self._stepper = stepper
        self._tensors = tensors
        self._queue: deque[Coming] = deque()
        self._running: asyncio.Task[None] | None = None

    def fetch(self, coming: Coming) -> None:
        """Begin soon. The batch was begun at the source, and has its blocks there."""
        self._queue.append(coming)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    async def idle(self) -> None:
        """Until nothing is fetched, and nothing written into any block, any more. Short once the pair is lost."""
        if self._running is not None:
            await asyncio.wait({self._running})

    async def stop(self) -> None:
        """At the end of the process."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self) -> None:
        while self._queue:
            coming = self._queue.popleft()
            is_here = await self._fetch(coming)
            self._link.settle(coming.claim_id)
            with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
                await self._say_over(coming.pulled, is_here)

    async def _say_over(self, pulled: SourceBatch, is_here: bool) -> None:
        call = self._engine_thread.call(lambda _: self._stepper.kv_over(pulled, is_here=is_here), between_layers=True)
        await asyncio.wrap_future(call)

    async def _fetch(self, coming: Coming) -> bool:
        batch = coming.pulled.batch
        try:
            await self._receive(coming)
        except (LinkLost, BlitzError) as error:
            log.log(
                logging.DEBUG if batch.ended else logging.WARNING,
                "batch %s is computed again: its KV does not come: %s",
                *(batch.batch_id, error),
            )
        except Exception:  # an engine may raise anything about KV that is not right
            log.exception("batch %s is computed again: its KV cannot be imported", batch.batch_id)
        else:
            return True
        return False

    async def _receive(self, coming: Coming) -> None:
        """Raises ``LinkLost``, ``BlitzError``, or what the engine raises."""
        pulled, engine = coming.pulled, self._engine_thread.loop.engine
        batch, tables = pulled.batch, pulled.batch.block_tables
        layer_bytes = batch.num_tokens * engine.kv_bytes_per_token_layer
        each = pulled.first_layer if coming.unasked is not None else max(1, PIECE_BYTES // layer_bytes)
        ahead = max(1, WINDOW_BYTES // (each * layer_bytes))
        firsts = deque(range(0, pulled.first_layer, each))
        posted: deque[tuple[int, int, asyncio.Future[Buffer]]] = deque()
        try:
            while firsts or posted:
                while firsts and len(posted) < ahead:
                    first = firsts.popleft()
                    last = min(first + each, pulled.first_layer)
                    piece = coming.unasked
                    if piece is None:
                        piece = asyncio.ensure_future(self._ask(coming, first, last, (last - first) * layer_bytes))
                    posted.append((first, last, piece))
                first, last, piece = posted[0]
                kv = await self._link.until(piece)
                if batch.ended:
                    raise TransferAborted("nobody waits for it any more")
                posted.popleft()
                work = functools.partial(engine.import_kv, tables, batch.lengths, last, kv, first_layer=first)
                await in_thread(work)
        finally:
            for _, _, piece in posted:
                piece.cancel()
            await asyncio.gather(*(piece for _, _, piece in posted), return_exceptions=True)

    async def _ask(self, coming: Coming, first: int, last: int, num_bytes: int) -> Buffer:
        receiving = asyncio.ensure_future(self._tensors.receive_kv(num_bytes, coming.serial, first))
        receiving.add_done_callback(lambda done: done.cancelled() or done.exception())  # the question may fail first
        try:
            await asyncio.sleep(0)  # the receive is posted
            message = PullKv(
                pair_id=self._pair_id,
                batch_id=coming.pulled.batch.batch_id,
                serial=coming.serial,
                first_layer=first,
                last_layer=last,
            )
            await self._link.ask_pair("pull_kv", message, Ack)
            return await receiving
        finally:
            receiving.cancel()
