"""KV of a batch that the source of a pair pulled: asked for as there is memory for it, while its other layers run."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque

from services.worker.engine.base import Engine
from services.worker.link import LinkLost
from services.worker.live.batches import PromptBatch
from services.worker.live.links import LinkToTarget
from services.worker.live.tensors import Tensors, can_tag_kv
from shared.aio import in_thread
from shared.errors import BlitzError, TransferAborted, TransportError
from shared.messages.common import Ack
from shared.messages.live import PullKv
from shared.transport.base import Buffer

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Layers come together up to so many bytes; a larger layer comes alone."""
WINDOW_BYTES = 64 << 20
"""Of KV that may be on its way, or wait to be imported; at least one piece."""


class KvFetch:
    """Of one pair; one batch after the other."""

    def __init__(self, pair_id: str, engine: Engine, link: LinkToTarget, tensors: Tensors) -> None:
        self._pair_id = pair_id
        self._engine = engine
        self._link = link
        self._tensors = tensors

    async def fetch(self, batch: PromptBatch, serial: int, num_layers: int) -> bool:
        """KV of the first so many layers. Whether it is here; nothing is written any more either way.

        ``serial``: of the claim.
        """
        try:
            await self._receive(batch, serial, num_layers)
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

    async def _receive(self, batch: PromptBatch, serial: int, num_layers: int) -> None:
        """Raises ``LinkLost``, ``BlitzError``, or what the engine raises."""
        tables = batch.block_tables
        layer_bytes = batch.num_tokens * self._engine.kv_bytes_per_token_layer
        if not can_tag_kv(serial, num_layers):
            raise TransportError(f"claim {serial} is more than a pair can count for KV")
        each = max(1, PIECE_BYTES // layer_bytes)
        ahead = max(1, WINDOW_BYTES // (each * layer_bytes))
        firsts = deque(range(0, num_layers, each))
        posted: deque[tuple[int, int, asyncio.Future[Buffer]]] = deque()
        try:
            while firsts or posted:
                while firsts and len(posted) < ahead:
                    first = firsts.popleft()
                    last = min(first + each, num_layers)
                    asked = self._ask(batch.batch_id, serial, first, last, (last - first) * layer_bytes)
                    posted.append((first, last, asyncio.ensure_future(asked)))
                first, last, piece = posted[0]
                kv = await self._link.until(piece)
                if batch.ended:
                    raise TransferAborted("all of its requests were cancelled")
                posted.popleft()
                work = functools.partial(self._engine.import_kv, tables, batch.lengths, last, kv, first_layer=first)
                (await in_thread(work)).result()
        finally:
            for _, _, piece in posted:
                piece.cancel()
            await asyncio.gather(*(piece for _, _, piece in posted), return_exceptions=True)

    async def _ask(self, batch_id: str, serial: int, first: int, last: int, num_bytes: int) -> Buffer:
        receiving = asyncio.ensure_future(self._tensors.receive_kv(num_bytes, serial, first))
        receiving.add_done_callback(lambda done: done.cancelled() or done.exception())  # the question may fail first
        try:
            await asyncio.sleep(0)  # the receive is posted
            message = PullKv(
                pair_id=self._pair_id, batch_id=batch_id, serial=serial, first_layer=first, last_layer=last
            )
            await self._link.ask_pair("pull_kv", message, Ack)
            return await receiving
        finally:
            receiving.cancel()
