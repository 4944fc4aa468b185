"""The copies that this worker can send from: its instance's, and those in its host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from services.worker.memory.weight_copy import WeightCopy
from shared.aio import Wakeup
from shared.errors import NotFound

CopyKind = Literal["gpu", "host"]

ARRIVAL_WAIT_S = 2.0
"""A plan reaches its members within milliseconds of each other; a receiver may ask its source before that one knows."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A copy that others may read, complete or still filling."""

    kind: CopyKind
    model_hash: str
    copy: WeightCopy
    pinned: Callable[[], AbstractContextManager[None]]
    """While the context is open, the copy stays."""
    instance_id: str = ""
    """Of a GPU copy."""


class Copies:
    """All methods on the event loop. At most one GPU copy; host copies by model hash."""

    def __init__(self) -> None:
        self._offers: dict[tuple[CopyKind, str], Offer] = {}
        self._changed = Wakeup()
        self.given_up = ""
        """The instance that serves here without a copy, or was the last to do so."""

    def offer(self, offer: Offer) -> None:
        """Others may read this copy from now on."""
        self._offers[offer.kind, offer.model_hash] = offer
        self._changed.fire()

    def withdraw(self, kind: CopyKind, copy: WeightCopy) -> None:
        """No new reader gets this copy. Those that have it keep their pins."""
        self._offers = {k: o for k, o in self._offers.items() if not (o.kind == kind and o.copy is copy)}

    def find(self, kind: CopyKind, model_hash: str, layout_hash: str) -> Offer | None:
        """A copy of exactly this model and layout."""
        offer = self._offers.get((kind, model_hash))
        return offer if offer is not None and offer.copy.layout.hash == layout_hash else None

    async def wanted(self, kind: CopyKind, model_hash: str, layout_hash: str, instance_id: str = "") -> Offer:
        """The copy that a receiver asks for. A worker without any GPU copy may be about to get it, and is waited for.

        ``instance_id``: whose GPU copy; empty: whichever is there. The copy of a later instance is not what was
        planned with: it may itself be waiting for the receiver. Raises ``NotFound``.
        """
        if kind == "gpu":
            if instance_id and instance_id == self.given_up:
                raise NotFound(f"{instance_id} has no copy any more that others can read")
            try:
                async with asyncio.timeout(ARRIVAL_WAIT_S):
                    await self._changed.until(lambda: any(k == "gpu" for k, _ in self._offers))
            except TimeoutError:
                raise NotFound(f"this worker holds no GPU copy, {ARRIVAL_WAIT_S:g} s after it was asked") from None
        offer = self.find(kind, model_hash, layout_hash)
        if offer is None:
            raise NotFound(
                f"this worker holds no {kind} copy of model {model_hash[:12]} with layout {layout_hash[:12]}"
            )
        if instance_id and offer.instance_id not in ("", instance_id):
            raise NotFound(f"this worker holds the copy of {offer.instance_id}, and that of {instance_id} no more")
        return offer
