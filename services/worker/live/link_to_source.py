"""The target's link to the source: what the source is told, and whether it still lives."""

from __future__ import annotations

import itertools
import logging
import time

from services.worker.link import Link, LinkLost
from services.worker.live.pair import PairLife
from services.worker.live.tensors import Tensors
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.common import Ack
from shared.messages.live import PairEnded, Taken, ZigzagAssignment

log = logging.getLogger(__name__)

RETRY_S = 0.05


class LinkToSource(Link):
    """One pair's."""

    def __init__(
        self, assignment: ZigzagAssignment, bus: Bus, tensors: Tensors, life: PairLife, *, silence_s: float
    ) -> None:
        """``life``: the pair's at the target. ``silence_s``: a source that says nothing for so long is lost."""
        super().__init__(bus, "the source", silence_s=silence_s)
        self._pair_id = assignment.pair_id
        self._source_id = assignment.source.worker_id
        self._tensors = tensors
        self._life = life
        self._heard_s = time.monotonic()

    @property
    def is_cut(self) -> bool:
        return self._tensors.peer_is_lost

    def heard(self) -> None:
        """The source said something now."""
        self._heard_s = time.monotonic()

    def why_lost(self) -> str:
        """Why the source counts as lost; empty if it does not. Time in which our own bus is away does not count."""
        silent_s = self.silent_s(self._heard_s)
        if silent_s is None:
            return ""
        if self.is_cut:
            return "the connection to the source is lost"
        return f"the source was silent for {self._silence_s:g} s" if silent_s > self._silence_s else ""

    async def tell_taken(self, *batch_ids: str, loaded: bool) -> bool:
        """These batches are finished here. Whether the source knows; False if the pair has ended before."""
        try:
            await self.ask(
                subjects.worker_live(self._source_id, "taken"),
                Taken(pair_id=self._pair_id, batch_ids=batch_ids, loaded=loaded),
                Ack,
                not_now=(BlitzError,),
                pauses=itertools.repeat(RETRY_S),
                why_stop=lambda: "the pair has ended" if self._life.ended else "",
            )
        except LinkLost:
            return False
        return True

    async def tell_ended(self, reason: str, finished: tuple[str, ...]) -> None:
        """The pair is over; the batches in ``finished`` are the target's. Said once: the source may be gone."""
        message = PairEnded(pair_id=self._pair_id, reason=reason, finished=finished)
        try:
            await self._bus.publish(subjects.worker_pair_ended(self._source_id), message)
        except BlitzError as error:
            log.debug("the source was not told: %s", error)
