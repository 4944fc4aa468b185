"""The monitor's shell: load reports in, demand out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from services.monitor.core.demand import ModelDemand, Verdict
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.roles import There, verdicts
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.leading import Leader
from shared.load_feed import subscribe_load
from shared.messages.common import TAKES_PROMPTS, Role, is_scaled_by_load
from shared.messages.load import Demand, LoadReport, QueueReport
from shared.messages.registry import ModelRecord, RouteChanges, RouteTable
from shared.outage import Outage
from shared.profile import Profile
from shared.profile_directory import ProfileDirectory
from shared.registry import RegistryReader
from shared.registry_view import RegistryView, counted_as
from shared.telemetry import tracer

log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 1.0
SNAPSHOT_TIMEOUT_S = 2.0

About = tuple[str, Role]
"""A model and a role."""


@dataclass(slots=True)
class _Group:
    """The instances of one model and role."""

    there: There = field(default_factory=There)
    """As of the last snapshot."""
    sent: int | None = None
    sent_at_s: float = field(default=float("-inf"))
    told: bool | None = None
    """Whether the log last said that more (True) or fewer are wanted: it gets one line per change of direction."""
    triggered_at_s: float = 0.0
    idle: int = 0
    """Instances that another model may have at once, and since when (unix time) so many."""
    idle_since_s: float = 0.0
    shown: tuple[int, float] | None = None
    """What the gauges show: desired and needed."""

    def set_idle(self, idle: int) -> bool:
        """Whether it is another number than before."""
        before, self.idle = self.idle, idle
        if idle > before:
            self.idle_since_s = time.time()
        return idle != before


@dataclass(slots=True)
class _Model:
    record: ModelRecord
    demand: ModelDemand
    groups: dict[Role, _Group] = field(default_factory=lambda: {role: _Group() for role in get_args(Role)})
    held_by: set[str] = field(default_factory=set)
    """Gateways that hold requests for which there is no instance, as of their last reports."""

    @property
    def has_instances(self) -> bool:
        """That take requests, now or soon."""
        return any(group.there.observed for role, group in self.groups.items() if role in TAKES_PROMPTS)


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
        self._policy = policy
        self._interval_s = interval_s
        self._repeat_s = repeat_s
        self.subscribed = asyncio.Event()
        """Set once load is heard."""
        self._leader = Leader(bus, "monitor")
        self._registry = RegistryReader(bus)
        self._models: dict[str, _Model] = {}
        self._roles: dict[str, Role] = {}
        """By instance id, as of the last snapshot."""
        self._publisher = f"monitor-{secrets.token_hex(4)}"
        self._sequence = 0
        self._refresh = asyncio.Event()
        self._urgent = asyncio.Event()
        of = ["model", "role"]
        self._desired_gauge = Gauge("blitz_monitor_desired_instances", "Verdict", of, registry=metrics)
        self._needed_gauge = Gauge("blitz_monitor_needed_instances", "Load in instances", of, registry=metrics)
        leads = Gauge("blitz_monitor_leads", "1 while this process leads", registry=metrics)
        leads.set_function(lambda: self._leader.leads)
        self._outage = Outage(log, "the pool answers again")

    async def run(self, stopping: asyncio.Event) -> None:
        """Watch until ``stopping``; publish demand while this process leads. A follower knows as much as the leader."""
        subscriptions = [
            *await subscribe_load(self._bus, self._on_load),
            await self._bus.subscribe(subjects.queue(), QueueReport, self._on_queue),
            await self._bus.subscribe(subjects.route_changes(), RouteChanges, self._on_routes),
            await self._bus.subscribe(subjects.routes(), RouteTable, self._on_routes),
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
        model = self._models.get(report.model)
        if model is not None:
            model.demand.on_load(report, time.monotonic())

    def _on_queue(self, report: QueueReport) -> None:
        now_s = time.monotonic()
        for queue in report.models:
            model = self._models.get(queue.model)
            if model is None:
                continue
            model.demand.on_queue(report.gateway_id, queue, now_s)
            if model.has_instances:
                model.held_by.clear()
            elif not queue.queued_requests:
                model.held_by.discard(report.gateway_id)
            elif report.gateway_id not in model.held_by:
                # Somebody waits for a model that sleeps.
                model.held_by.add(report.gateway_id)
                self._urgent.set()

    def _on_routes(self, _event: RouteChanges | RouteTable) -> None:
        # Instances came or went: look at the whole picture at the next turn.
        self._refresh.set()

    async def _take_snapshot(self) -> None:
        try:
            view = await self._registry.read(timeout_s=SNAPSHOT_TIMEOUT_S)
        except BlitzError as error:
            if self._models:
                self._outage.failed("no snapshot from the pool (%s): deciding on the last one", error)
            else:
                log.debug("no snapshot from the pool: %s", error)
            return
        self._outage.worked()
        await asyncio.to_thread(self._profiles.look)
        models = view.models
        for name in set(self._models) - set(models):
            self._forget(name)
        observed: Counter[About] = Counter()
        serving: Counter[About] = Counter()
        for worker in view.workers:
            about = counted_as(worker, models)
            if about is not None:
                observed[about] += 1
                serving[about] += worker.state == "serving"
        for name, record in models.items():
            known = self._models.get(name)
            if known is None or known.record.model_hash != record.model_hash:
                known = self._models[name] = _Model(record, ModelDemand(self._policy))
            known.record = record
            known.demand.profile = self._profile(record, view)
            for role, group in known.groups.items():
                about = name, role
                group.there = There(observed[about], serving[about], view.floors.get(about))
        self._hear_roles(view)

    def _hear_roles(self, view: RegistryView) -> None:
        """What an instance reported in a role that it has no longer does not count."""
        before, self._roles = self._roles, {w.instance.instance_id: w.instance.role for w in view.workers if w.instance}
        for worker in view.workers:
            instance = worker.instance
            if instance is None or before.get(instance.instance_id, instance.role) == instance.role:
                continue
            if (model := self._models.get(instance.model)) is not None:
                model.demand.on_role(instance.instance_id, instance.role)

    def _forget(self, name: str) -> None:
        for role, group in self._models.pop(name).groups.items():
            self._hide(name, role, group)

    def _profile(self, record: ModelRecord, view: RegistryView) -> Profile | None:
        """Of the model's instances, wherever they are. None, too, where workers differ: it is of one kind."""
        kinds = {(worker.worker.engine, worker.worker.device) for worker in view.workers}
        if len(kinds) != 1:
            return None
        ((engine, device),) = kinds
        return self._profiles.find(
            model_hash=record.model_hash, layout_hash=record.layout_hash, engine=engine, device=device
        )

    async def _evaluate(self, connected_since_s: float) -> None:
        now_s = time.monotonic()
        for name, model in sorted(self._models.items()):
            there = {role: group.there for role, group in model.groups.items()}
            found = verdicts(model.demand, model.record, there, now_s, connected_since_s=connected_since_s)
            for role, group in model.groups.items():
                verdict = found[role]
                desired, observed = verdict.desired, group.there.observed
                if is_scaled_by_load(model.record.serving, role):
                    self._show(name, role, group, verdict)
                else:
                    self._hide(name, role, group)
                changed = group.set_idle(verdict.idle)
                if not self._leader.leads or (desired == observed and not (group.idle or changed)):
                    group.sent = group.told = None
                    continue
                if desired != group.sent:
                    group.triggered_at_s = time.time()
                elif not changed and now_s - group.sent_at_s < self._repeat_s:
                    continue
                await self._send(name, role, group, verdict)
                group.sent, group.sent_at_s = desired, now_s

    def _show(self, name: str, role: Role, group: _Group, verdict: Verdict) -> None:
        if group.shown != (verdict.desired, verdict.needed):
            group.shown = verdict.desired, verdict.needed
            self._desired_gauge.labels(name, role).set(verdict.desired)
            self._needed_gauge.labels(name, role).set(verdict.needed)

    def _hide(self, name: str, role: Role, group: _Group) -> None:
        if group.shown is not None:
            group.shown = None
            self._desired_gauge.remove(name, role)
            self._needed_gauge.remove(name, role)

    async def _send(self, name: str, role: Role, group: _Group, verdict: Verdict) -> None:
        desired, observed = verdict.desired, group.there.observed
        self._sequence += 1
        attributes: dict[str, str | int] = {
            "blitz.model": name,
            "blitz.role": role,
            "blitz.desired": desired,
            "blitz.observed": observed,
        }
        with tracer().start_as_current_span("monitor.demand", attributes=attributes):
            demand = Demand(
                publisher=self._publisher,
                sequence=self._sequence,
                published_at_s=time.time(),
                model=name,
                role=role,
                desired=desired,
                observed=observed,
                triggered_at_s=group.triggered_at_s,
                reason=verdict.reason,
                term=self._leader.term,
                idle=group.idle,
                idle_since_s=group.idle_since_s,
                deficit=max(0.0, min(verdict.needed, desired) - observed) / max(observed, 1),
            )
            try:
                # Never sent later: the demand from before an outage says nothing about the demand after it.
                await self._bus.publish(subjects.demand(), demand, buffer=False)
            except BlitzError as error:
                log.warning("demand for %s not published: %s", name, error)
                return
        if desired == observed:
            group.told = None
            return
        direction = desired > observed
        if group.told != direction:
            group.told = direction
            what = "instances" if role == "colocated" else f"{role} instances"
            log.info("%s: %d %s wanted, %d there: %s", name, desired, what, observed, verdict.reason)
