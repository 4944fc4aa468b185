"""The latest load of every instance, for the gauges that operators watch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from services.gateway.core.routes import RouteView
from services.gateway.dispatcher import Dispatcher
from services.gateway.metrics import ModelGauges
from shared.messages.load import LoadReport

FRESH_S = 3.0
"""Older reports say nothing about now."""


class LoadGauges:
    """Load reports by instance."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, LoadReport]] = {}
        self._pruned_s = -math.inf

    def take(self, report: LoadReport, now_s: float) -> None:
        """Keep a report; ``now_s`` is monotonic. Instances that fell silent are forgotten, scraped or not."""
        self._reports[report.instance_id] = (now_s, report)
        if now_s - self._pruned_s > FRESH_S:
            self._prune(now_s)

    def __len__(self) -> int:
        """Reports held."""
        return len(self._reports)

    def latest(self, now_s: float) -> dict[str, LoadReport]:
        """The fresh reports by instance id; ``now_s`` is monotonic."""
        self._prune(now_s)
        return {instance_id: report for instance_id, (_, report) in self._reports.items()}

    def gauges(self, routes: RouteView, dispatcher: Dispatcher) -> Iterator[ModelGauges]:
        """One row per registered model, from fresh reports."""
        by_model: dict[str, list[LoadReport]] = {}
        for report in self.latest(time.monotonic()).values():
            by_model.setdefault(report.model, []).append(report)
        inflight = dispatcher.requests.inflight_by_model()
        for name in routes.models:
            mine = by_model.get(name, [])
            queued = dispatcher.router.queued(name)[0]
            blocks = sum(report.kv_blocks_total for report in mine)
            yield ModelGauges(
                model=name,
                running_requests=sum(report.running_requests for report in mine),
                waiting_requests=sum(report.queued_requests for report in mine) + queued,
                gateway_queued_requests=queued,
                gateway_inflight_requests=inflight.get(name, 0),
                kv_usage=sum(report.kv_blocks_used for report in mine) / blocks if blocks else 0.0,
            )

    def _prune(self, now_s: float) -> None:
        self._reports = {i: row for i, row in self._reports.items() if now_s - row[0] <= FRESH_S}
        self._pruned_s = now_s
