"""Puts the records of operations that ended into the stream, from which the next planner has them."""

from __future__ import annotations

import logging

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.scaling import ScaleRecord

log = logging.getLogger(__name__)


class RecordStore:
    """Each record is stored once, however often ``store`` is called, also at a time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._unheard: dict[str, ScaleRecord] = {}
        """Records that the stream has not taken yet."""
        self._storing = False

    def add(self, record: ScaleRecord) -> None:
        """To be stored."""
        self._unheard[record.plan_id] = record

    async def store(self) -> None:
        """Store what was added; what the stream does not take now is left for the next call."""
        if self._storing:
            return  # whoever does it goes on until nothing is left
        self._storing = True
        try:
            while self._unheard:
                plan_id, record = next(iter(self._unheard.items()))
                try:
                    await self._bus.publish_event(subjects.scale_records(), record, message_id=f"record-{plan_id}")
                except BlitzError as error:
                    log.info("the record of %s is stored later: %s", plan_id, error)
                    return
                self._unheard.pop(plan_id, None)
        finally:
            self._storing = False
