"""The target's line to the source: what the source is told, and whether it still lives."""

from __future__ import annotations

import asyncio
import logging
import time

from services.worker.live.pair import PairLife
from services.worker.live.tensors import Tensors
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.common import Ack
from shared.messages.live import PairEnded, Taken, ZigzagAssignment

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 1.0
RETRY_S = 0.05


class SourceLine:
    """One pair's. Event loop only."""

    def __init__(
        self, assignment: ZigzagAssignment, bus: Bus, tensors: Tensors, life: PairLife, *, silence_s: float
    ) -> None:
        """``life``: the pair's at the target. ``silence_s``: a source that says nothing for so long is gone."""
        self._pair_id = assignment.pair_id
        self._source_id = assignment.source.worker_id
        self._bus = bus
        self._tensors = tensors
        self._life = life
        self._silence_s = silence_s
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        """The source said something now."""
        self._heard_s = time.monotonic()

    def why_lost(self) -> str | None:
        """By what the source is known to be gone, if it is. Time in which our own bus is away does not count."""
        connected_since_s = self._bus.connected_since_s
        if connected_since_s is None:
            self.heard()
        elif self._tensors.peer_is_lost:
            return "the connection to the source is lost"
        elif time.monotonic() - max(self._heard_s, connected_since_s) > self._silence_s:
            return f"the source was silent for {self._silence_s:g} s"
        return None

    async def tell_taken(self, *batch_ids: str, loaded: bool) -> bool:
        """These batches are finished here. Whether the source knows; False if the pair has ended before."""
        message = Taken(pair_id=self._pair_id, batch_ids=batch_ids, loaded=loaded)
        subject = subjects.worker_live(self._source_id, "taken")
        while not self._life.ended:
            try:
                await self._bus.request(subject, message, Ack, timeout_s=RPC_TIMEOUT_S)
            except BlitzError as error:
                log.debug("the source did not hear that %s are taken: %s", batch_ids, error)
                await asyncio.sleep(RETRY_S)
                continue
            return True
        return False

    async def tell_ended(self, reason: str, finished: tuple[str, ...]) -> None:
        """The pair is over; the batches in ``finished`` are the target's. Said once: the source may be gone."""
        message = PairEnded(pair_id=self._pair_id, reason=reason, finished=finished)
        try:
            await self._bus.publish(subjects.worker_pair_ended(self._source_id), message)
        except BlitzError as error:
            log.debug("the source was not told: %s", error)
