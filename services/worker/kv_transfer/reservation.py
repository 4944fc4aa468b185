"""What the instance that is to decode a request keeps for it, and the KV that comes in: from the instance that computes
its prompt, or from the two of a pair, each of which brings the layers that it ran."""

from __future__ import annotations

import asyncio
import contextlib
import time

from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.incoming import IncomingKv
from shared.messages.disaggregated import ReserveDecode


class DecodeReservation:
    """Event loop only. Its sequence has its slot and blocks; the instance is pinned until ``unpin``."""

    def __init__(self, sequence: ActiveSequence, instance: Instance, kv: IncomingKv) -> None:
        self.sequence = sequence
        self.instance = instance
        self.kv = [kv]
        """One per sender, in the order of their layers."""
        self.renewed_at_s = time.monotonic()
        self._pin = contextlib.ExitStack()
        self._pin.enter_context(instance.pinned())

    @property
    def message(self) -> ReserveDecode:
        """Of whom it is for now: the sender that runs the last layers begins the request, or gives it up."""
        return self.kv[-1].message

    @property
    def is_whole(self) -> bool:
        """All KV is here."""
        return all(kv.is_whole for kv in self.kv)

    @property
    def layers_here(self) -> int:
        """Counted over the chunks."""
        return sum(kv.layers_here for kv in self.kv)

    def under(self, ticket: int) -> IncomingKv | None:
        """What comes under a ticket."""
        return next((kv for kv in self.kv if kv.ticket == ticket), None)

    def unpin(self) -> None:
        """The instance is idle as far as this one is concerned."""
        self._pin.close()

    async def stop(self) -> None:
        """Receive no more. When this returns nothing is written into the blocks any more."""
        await asyncio.gather(*(kv.stop() for kv in self.kv))
