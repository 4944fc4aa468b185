"""The monitor's shell: load reports in, demand out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from services.monitor.core.policy import DemandPolicy
from services.monitor.core.watch import SNAPSHOT_INTERVAL_S, About, Figures, Watch, Wish
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.leading import Leader
from shared.load_feed import subscribe_load
from shared.messages.decisions import GetVerdicts, Verdicts
from shared.messages.load import Demand, LoadReport, QueueReport
from shared.messages.registry import ModelRecord, RouteChanges, WorkerInfo
from shared.outage import Outage
from shared.profile import Profile
from shared.profile_directory import ProfileDirectory
from shared.registry import RegistryReader
from shared.telemetry import tracer

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 2.0


class MonitorService:
    """Watches every registered model; tells the planner what each needs when it has something else, and which
    instances it could do without.

    How a model is served says on which roles its load decides. Of others there are as many as an operator asked for.
    """

    def __init__(
        self,
        bus: Bus,
        policy: DemandPolicy,
        *,
        interval_s: float = 0.1,
        repeat_s: float = 1.0,
        profiles: Path | None = None,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        """``repeat_s``: an unmet demand is repeated this often, so a lost message or a failed plan heals. ``profiles``:
        a directory of them, or one."""
        self._profiles = ProfileDirectory(profiles)
        self._bus = bus
        self._watch = Watch(policy, repeat_s=repeat_s)
        self._interval_s = interval_s
        self.subscribed = asyncio.Event()
        """Set once load is heard."""
        self._leader = Leader(bus, "monitor")
        self._registry = RegistryReader(bus)
        self._publisher = f"monitor-{secrets.token_hex(4)}"
        self._sequence = 0
        self._refresh = asyncio.Event()
        self._urgent = asyncio.Event()
        self._shown: dict[About, Figures] = {}
        """By the gauges."""
        self._desired_gauge = Gauge(
            "blitz_monitor_desired_instances",
            "The verdict, of the roles that load decides on.",
            ["model", "role"],
            registry=metrics,
        )
        self._needed_gauge = Gauge(
            "blitz_monitor_needed_instances", "Load in instances, before rounding.", ["model", "role"], registry=metrics
        )
        leads = Gauge("blitz_monitor_leads", "1 while this process leads.", registry=metrics)
        leads.set_function(lambda: self._leader.leads)
        self._outage = Outage(log, "the pool answers again")

    async def run(self, stopping: asyncio.Event) -> None:
        """Watch until ``stopping``; publish demand while this process leads. A follower knows as much as the leader."""
        subscriptions = [
            *await subscribe_load(self._bus, self._on_load),
            await self._bus.subscribe(subjects.queue(), QueueReport, self._on_queue),
            await self._bus.subscribe(subjects.route_changes(), RouteChanges, self._on_routes),
            await self._bus.respond(subjects.verdicts(), GetVerdicts, self._on_get_verdicts),
        ]
        self.subscribed.set()
        self._refresh.set()
        leading = asyncio.create_task(self._lead(stopping))
        leading.add_done_callback(lambda _: self._urgent.set())  # it ends when this process is to stop
        next_snapshot_s = 0.0
        try:
            while not stopping.is_set():
                if leading.done():
                    leading.result()  # a bug: it must not go on as a follower for ever
                # While cut off from the bus, the monitor knows nothing of the load, and no planner hears it.
                connected = self._bus.connected_since_s is not None
                if connected and (self._refresh.is_set() or time.monotonic() >= next_snapshot_s):
                    self._refresh.clear()
                    next_snapshot_s = time.monotonic() + SNAPSHOT_INTERVAL_S
                    await self._take_snapshot()
                self._urgent.clear()
                if self._bus.connected_since_s is not None:
                    await self._evaluate(self._bus.connected_since_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._urgent.wait()
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
            await self._leader.give_up()
            for subscription in subscriptions:
                await subscription.close()

    async def _lead(self, stopping: asyncio.Event) -> None:
        while await self._leader.win(stopping):
            await self._leader.hold(stopping)

    def _on_load(self, report: LoadReport) -> None:
        self._watch.on_load(report, time.monotonic())

    def _on_queue(self, report: QueueReport) -> None:
        if self._watch.on_queue(report, time.monotonic()):
            self._urgent.set()

    def _on_routes(self, event: RouteChanges) -> None:
        # Instances came or went: look at the whole picture at the next turn, which is now if a model lost its last.
        self._refresh.set()
        if self._watch.on_gone(gone.model for gone in event.gone):
            self._urgent.set()

    async def _on_get_verdicts(self, request: GetVerdicts) -> Verdicts:
        await self._leader.let_others()
        return Verdicts(roles=self._watch.verdicts(request.model))

    async def _take_snapshot(self) -> None:
        try:
            view = await self._registry.read(timeout_s=SNAPSHOT_TIMEOUT_S)
        except BlitzError as error:
            if self._watch.knows_models:
                self._outage.failed("no snapshot from the pool (%s): deciding on the last one", error)
            else:
                log.debug("no snapshot from the pool: %s", error)
            return
        self._outage.worked()
        await asyncio.to_thread(self._profiles.look)
        self._watch.on_snapshot(view, self._profile)
        self._show()

    def _profile(self, record: ModelRecord, worker: WorkerInfo) -> Profile | None:
        return self._profiles.find(
            model_hash=record.model_hash,
            layout_hash=record.layout_hash,
            engine=worker.engine_of(record),
            device=worker.device,
            gpu_name=worker.gpu_name,
        )

    async def _evaluate(self, connected_since_s: float) -> None:
        wishes = self._watch.evaluate(time.monotonic(), connected_since_s=connected_since_s, leads=self._leader.leads)
        self._show()
        for wish in wishes:
            if self._leader.leads:
                await self._send(wish)

    def _show(self) -> None:
        figures = self._watch.figures
        for about in self._shown.keys() - figures.keys():
            del self._shown[about]
            self._desired_gauge.remove(*about)
            self._needed_gauge.remove(*about)
        for about, found in figures.items():
            if self._shown.get(about) != found:
                self._shown[about] = found
                self._desired_gauge.labels(*about).set(found.desired)
                self._needed_gauge.labels(*about).set(found.needed)

    async def _send(self, wish: Wish) -> None:
        self._sequence += 1
        attributes: dict[str, str | int] = {
            "blitz.model": wish.model,
            "blitz.role": wish.role,
            "blitz.desired": wish.desired,
            "blitz.observed": wish.observed,
        }
        with tracer().start_as_current_span("monitor.demand", attributes=attributes):
            demand = Demand(
                publisher=self._publisher,
                sequence=self._sequence,
                model=wish.model,
                role=wish.role,
                desired=wish.desired,
                observed=wish.observed,
                triggered_ago_s=wish.triggered_ago_s,
                reason=wish.reason,
                bound=wish.bound,
                term=self._leader.term,
                idle=wish.idle,
                idle_for_s=wish.idle_for_s,
                deficit=wish.deficit,
                spare=wish.spare,
                urgent=wish.urgent,
            )
            try:
                # Never sent later: the demand from before an outage says nothing about the demand after it.
                await self._bus.publish(subjects.demand(), demand, buffer=False)
            except BlitzError as error:
                log.warning("demand for %s not published: %s", wish.model, error)
                return
        self._watch.published(wish)
        if wish.turns:
            what = "instances" if wish.role == "colocated" else f"{wish.role} instances"
            log.info("%s: %d %s wanted, %d there: %s", wish.model, wish.desired, what, wish.observed, wish.reason)
