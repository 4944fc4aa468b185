"""A worker's reports on a plan, as it happens: to the planner, and into the current span."""

from __future__ import annotations

import logging
import time

from opentelemetry import trace

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.progress import ProgressEvent, ScaleProgress

log = logging.getLogger(__name__)

MAX_PLANS = 64
"""Whose beginnings are remembered: a worker is in few at a time."""


class ProgressReporter:
    """Publishes ``ScaleProgress``. A report that cannot be sent is logged: the planner's deadlines cover it."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._began: dict[str, float] = {}
        """When each of the newest plans was first reported on, monotonic."""

    async def tell(
        self,
        plan_id: str,
        instance_id: str,
        event: ProgressEvent,
        *,
        layer: int = -1,
        received_bytes: int = 0,
        detail: str = "",
    ) -> None:
        """Report an event of now."""
        now_s = time.monotonic()
        began_s = self._began.setdefault(plan_id, now_s)
        if len(self._began) > MAX_PLANS:
            del self._began[next(iter(self._began))]
        trace.get_current_span().add_event(event, {"layer": layer} if layer >= 0 else {})
        message = ScaleProgress(
            plan_id=plan_id,
            worker_id=self._worker_id,
            instance_id=instance_id,
            event=event,
            after_s=now_s - began_s,
            layer=layer,
            received_bytes=received_bytes,
            detail=detail,
        )
        try:
            await self._bus.publish(subjects.progress(), message)
        except BlitzError as error:
            log.warning("progress %s of %s not published: %s", event, plan_id, error)
