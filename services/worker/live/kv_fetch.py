"""KV of a batch that the source of a pair pulled: asked for piece by piece, while its other layers run."""

from __future__ import annotations

import logging

from services.worker.engine.base import Engine
from services.worker.kv_transfer.connector import KvRange
from services.worker.link import LinkLost
from services.worker.live.batches import PromptBatch
from services.worker.live.links import LinkToTarget
from services.worker.live.tensors import PairTensors, can_tag_kv
from shared.errors import BlitzError, TransferAborted, TransportError
from shared.messages.common import Ack
from shared.messages.live import PullKv

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Layers come together up to so many bytes; a larger layer comes alone."""


class KvFetch:
    """Of one pair; one batch after the other."""

    def __init__(self, pair_id: str, engine: Engine, link: LinkToTarget, tensors: PairTensors) -> None:
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
        if not can_tag_kv(serial, num_layers):
            raise TransportError(f"claim {serial} is more than a pair can count for KV")

        async def ask(kv: KvRange) -> None:
            message = PullKv(
                pair_id=self._pair_id,
                batch_id=batch.batch_id,
                serial=serial,
                first_layer=kv.first_layer,
                last_layer=kv.last_layer,
            )
            await self._link.ask_pair("pull_kv", message, Ack)

        async def check_wanted() -> None:
            if batch.ended:
                raise TransferAborted("all of its requests were cancelled")

        layer_bytes = batch.num_tokens * self._engine.kv_bytes_per_token_layer
        each = min(num_layers, max(1, PIECE_BYTES // layer_bytes))
        pieces = list(batch.kv(0, num_layers).pieces(each))
        inflow = self._tensors.kv_inflow(self._engine, each * layer_bytes, len(pieces), ask, check_wanted)
        for piece in pieces:
            inflow.receive(piece, self._tensors.kv_tag(serial, piece.first_layer))
        try:
            await self._link.until(inflow.run(lambda: inflow.num_here == len(pieces)))
        finally:
            await inflow.release()
