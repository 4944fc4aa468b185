"""What a worker says of its instance's load: reports to all who listen, and its gauges.

Workers of one host put their reports together (``host_group``), so that their readers get one message per host.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Gauge

from services.worker.core.load import load_report
from services.worker.instance.host_group import HostGroup
from services.worker.instance.instance import Instance
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.load import LoadReport
from shared.subjects import Process

log = logging.getLogger(__name__)

PREFIXES_EVERY = 10
"""Reports: one says what prompts begin with, which takes about as much as the rest of it."""


class LoadReporter:
    """Event loop only."""

    def __init__(
        self,
        bus: Bus,
        worker: Process,
        instance: Callable[[], Instance | None],
        group: HostGroup,
        *,
        at_intervals: Iterable[Callable[[], None]] = (),
        interval_s: float,
        metrics: CollectorRegistry,
    ) -> None:
        """``at_intervals``: each is called at every interval, for what is due now and then."""
        self._bus = bus
        self._worker = worker
        self._instance = instance
        self._at_intervals = tuple(at_intervals)
        self._group = group
        self._interval_s = interval_s
        self._num_reports = 0
        self._running_gauge = Gauge("blitz_worker_running_requests", "Running requests.", registry=metrics)
        self._queued_gauge = Gauge("blitz_worker_queued_requests", "Waiting requests.", registry=metrics)
        self._kv_gauge = Gauge("blitz_worker_kv_usage_ratio", "Used share of the KV blocks, 0 to 1.", registry=metrics)
        self._vllm_kv_gauge = Gauge(
            "vllm:kv_cache_usage_perc",
            "Used share of the KV blocks of this worker's instance, 0 to 1.",
            ["model_name"],
            registry=metrics,
        )

    async def run(self) -> None:
        """Report until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                for function in self._at_intervals:
                    function()
                report = self._report()
                if report is None:
                    self._show(None)
                    self._group.leave()
                    continue
                self._show(report)
                await self._say(report)
        finally:
            self._group.leave()

    async def report_now(self) -> None:
        """One report beside those at the intervals: what it says has just changed. Not by way of the host's others:
        they pass it on at their next interval."""
        report = self._report()
        if report is None or self._bus.connected_since_s is None:
            return
        try:
            await self._bus.publish(subjects.load(), report, buffer=False)
        except BlitzError as error:
            log.debug("load not published: %s", error)

    async def _say(self, report: LoadReport) -> None:
        if self._bus.connected_since_s is None:
            self._group.leave()  # others may be connected
            return
        try:
            for message in self._group.exchange(report, time.monotonic()):
                subject = subjects.load() if isinstance(message, LoadReport) else subjects.host_load()
                # Load is of now: none of an outage is told after it.
                await self._bus.publish(subject, message, buffer=False)
        except BlitzError as error:
            log.debug("load not published: %s", error)

    def _show(self, report: LoadReport | None) -> None:
        kv_usage = report.kv_blocks_used / report.kv_blocks_total if report is not None else 0.0
        self._running_gauge.set(report.running_requests if report is not None else 0)
        self._queued_gauge.set(report.queued_requests if report is not None else 0)
        self._kv_gauge.set(kv_usage)
        self._vllm_kv_gauge.clear()
        if report is not None:
            self._vllm_kv_gauge.labels(report.model).set(kv_usage)

    def _report(self) -> LoadReport | None:
        instance = self._instance()
        if instance is None or instance.state not in ("live", "serving", "draining"):
            return None
        stats = instance.engine.stats()
        self._num_reports += 1
        return load_report(
            stats.load,
            stats.speed,
            worker=self._worker,
            instance_id=instance.instance_id,
            model=instance.record.name,
            state=instance.state,
            role=instance.role,
            busy_s_total=stats.busy_s_total,
            load_s=instance.load_s,
            now_s=time.monotonic(),
            with_prefixes=self._num_reports % PREFIXES_EVERY == 0,
        )
