"""The planner's shell: demand in, plans out, and the record of every scale operation.

Of several planners one leads and does all the work; the others wait. What a leader knows beyond the registry comes from
the plan stream: plans, and the records of operations that ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from services.planner.clock import now
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operation import Operation
from services.planner.core.planner import Planner
from services.planner.core.rounds.by_hand import asked_by_hand
from services.planner.core.rounds.settings import PlanSettings
from services.planner.leases import RPC_TIMEOUT_S, Leases
from services.planner.operation_tracker import CHECK_INTERVAL_S, OperationTracker
from services.planner.plan_stream import PlanStream
from services.planner.publisher import Publisher
from services.planner.round_runner import RoundRunner
from services.planner.splitter import Splitter
from services.planner.succession import Succession
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus, Subscription
from shared.errors import BadRequest, BlitzError, StaleTerm, Unavailable
from shared.leading import Leader
from shared.load_feed import subscribe_load
from shared.messages.codec import M, R
from shared.messages.common import Ack, Role
from shared.messages.decisions import MAX_DECISIONS, Decisions, ListDecisions
from shared.messages.destinations import Destinations, GetDestinations
from shared.messages.live import LiveReport, PlanSplit
from shared.messages.load import Demand, QueueReport
from shared.messages.operations import GetScaleRecord, ListScaleRecords, ScaleRecord, ScaleRecords, StartScale
from shared.messages.progress import ScaleProgress
from shared.messages.registry import MAX_HOLD_S, RouteChanges, SetFloor
from shared.profile_directory import ProfileDirectory
from shared.registry import RegistryReader
from shared.telemetry import tracer

log = logging.getLogger(__name__)

RECOVERY_WAIT_S = 4.0
"""How long a manual scale waits for a registry that just started."""
LOOK_EVERY_S = 1.0
"""How often to look whether instances of workers that are to be free can go, and whether requests should move so that
others can begin."""
STORE_EVERY_S = 60.0
"""Decisions are stored together: the stream keeps so many messages."""
LAST_STORE_S = 0.5
MAX_LISTED = 100
MAX_REFUSED_LISTED = 100


class PlannerService:
    """Decisions are made in rounds (``round_runner``); plans in flight do not block the next one."""

    def __init__(
        self,
        bus: Bus,
        settings: PlanSettings | None = None,
        *,
        profiles: Path | None = None,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        settings = settings or PlanSettings()
        self._bus = bus
        self.subscribed = asyncio.Event()
        """Set once demand and requests are heard, here or by a planner that leads."""
        self._leader = leader = Leader(bus, "planner")
        leads = Gauge("blitz_planner_leads", "1 while this process leads.", registry=metrics)
        leads.set_function(lambda: leader.leads)
        self._reader = RegistryReader(bus)
        self._profiles = ProfileDirectory(profiles)
        self._planner = Planner(settings, _new_id, self._profiles.find)
        self._operations = self._planner.operations
        self._leases = Leases(bus, settings.lease_ttl_s)
        self._stream = PlanStream(bus)
        self._publisher = Publisher(self._stream, self._leases, self._planner.writer, self._planner.pairs, metrics)
        self._splitter = Splitter(self._stream, self._planner.splits, metrics)
        self._round_runner = RoundRunner(self._planner, self._leases, self._reader, self._publisher, leader, metrics)
        self._tracker = OperationTracker(self._stream, leader, self._planner, self._leases, metrics)
        self._storing = OwnedTasks()
        self._store_at_s = 0.0
        self._moves = Counter(
            "blitz_planner_moves_total",
            "Orders to move requests so that one that waits for KV can begin.",
            registry=metrics,
        )
        self._succession = Succession(bus, leader, self._reader, self._planner, self._stream, self._tracker)

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead, or wait to, until ``stopping``."""
        following = asyncio.create_task(self._leader.follows.wait())
        following.add_done_callback(lambda task: None if task.cancelled() else self.subscribed.set())
        try:
            while await self._leader.win(stopping):
                await self._lead(stopping)
        finally:
            following.cancel()
            await self._leader.give_up()

    async def _lead(self, stopping: asyncio.Event) -> None:
        subscriptions: list[Subscription] = []
        deciding: asyncio.Task[None] | None = None
        try:
            await self._look_for_profiles()
            # First, so that nothing is missed while the past is read.
            subscriptions += [
                *await subscribe_load(self._bus, lambda report: self._planner.on_load(report, now())),
                await self._bus.subscribe(
                    subjects.queue(), QueueReport, lambda report: self._planner.on_queue(report, now())
                ),
                await self._bus.subscribe(subjects.live_reports(), LiveReport, self._tracker.on_live_report),
                await self._bus.subscribe(subjects.progress(), ScaleProgress, self._tracker.on_progress),
            ]
            await self._succession.recall()
            subscriptions += [
                await self._bus.subscribe(subjects.demand(), Demand, self._round_runner.on_demand),
                await self._bus.subscribe(subjects.route_changes(), RouteChanges, self._on_routes),
                await self._respond("split", PlanSplit, self._splitter.on_split),
                await self._respond("destinations", GetDestinations, self._on_get_destinations),
                await self._respond("scale", StartScale, self._on_start_scale),
                await self._respond("record", GetScaleRecord, self._tracker.on_get_record),
                await self._respond("records", ListScaleRecords, self._on_list_records),
                await self._respond("decisions", ListDecisions, self._on_list_decisions),
            ]
            self.subscribed.set()
            deciding = asyncio.create_task(self._round_runner.run())
            await self._hold(stopping, deciding)
        except BlitzError as error:
            log.warning("cannot lead: %s", error)
            await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            for subscription in subscriptions:
                await subscription.close()
            if deciding is not None:
                deciding.cancel()
                await asyncio.gather(deciding, return_exceptions=True)
            await self._round_runner.close()
            await self._splitter.close()
            await self._succession.finish()
            await self._tracker.finish()
            await self._store_last_decisions()

    async def _hold(self, stopping: asyncio.Event, deciding: asyncio.Task[None]) -> None:
        holding = asyncio.create_task(self._leader.hold(stopping))
        checking = asyncio.create_task(self._check_regularly())
        try:
            done, _ = await asyncio.wait({holding, checking, deciding}, return_when=asyncio.FIRST_COMPLETED)
            # A task that ends by itself is a bug: let it surface instead of limping on.
            for task in done:
                task.result()
        finally:
            for task in (holding, checking):
                task.cancel()
            await asyncio.gather(holding, checking, return_exceptions=True)

    async def _respond(self, operation: str, kind: type[M], handler: Callable[[M], Awaitable[R]]) -> Subscription:
        async def guarded(message: M) -> R:
            await self._leader.let_others()
            try:
                return await handler(message)
            except StaleTerm as error:
                # Whoever leads now may be asked, and does what is left to do.
                raise Unavailable(f"this planner leads no more: {error.message}", retry_after_s=0.5) from error

        # Another planner that led, and hangs, may still be there.
        return await self._bus.respond(subjects.planner(operation), kind, guarded)

    # --- regularly ---------------------------------------------------------------------------

    async def _check_regularly(self) -> None:
        look_at_s = time.monotonic()
        while True:
            await self._look_for_profiles()
            self._planner.forget(now())
            await self._leases.release(self._leader.term)
            if self._operations.running():
                try:
                    view = await self._reader.read(timeout_s=RPC_TIMEOUT_S)
                    self._planner.tracker.check(view, now())
                except BlitzError as error:
                    log.debug("no snapshot to check running operations with: %s", error)
            if (now_s := time.monotonic()) >= look_at_s:
                look_at_s = now_s + LOOK_EVERY_S
                try:
                    await self._evacuate()
                    await self._make_room()
                except BlitzError as error:
                    log.info("what could move is looked at later: %s", error)
            await self._tracker.tell_waiters()
            self._store_decisions()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _store_decisions(self) -> None:
        """Now and then, and as soon as a message is full."""
        num_untold, now_s = len(self._planner.decisions.untold()), time.monotonic()
        due = num_untold == MAX_DECISIONS or (num_untold > 0 and now_s >= self._store_at_s)
        if due and not len(self._storing):
            self._store_at_s = now_s + STORE_EVERY_S
            self._storing.start(self._stream.store_decisions(self._planner.decisions))

    async def _store_last_decisions(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_STORE_S):
                await self._storing.finish()
                await self._stream.store_decisions(self._planner.decisions)

    async def _evacuate(self) -> None:
        """Have instances go whose workers are to be free. Raises ``BlitzError``."""
        view, term = await self._reader.read(timeout_s=RPC_TIMEOUT_S), self._leader.term
        for step in self._planner.evacuations(view, now()):
            self._leader.check(term)
            span = tracer().start_span("planner.plan")
            begun = self._publisher.begin(step, None, term, span)
            await self._publisher.publish(begun, term, span)

    async def _make_room(self) -> None:
        """Have requests move where others wait for KV. Raises ``BlitzError``."""
        migrations = self._planner.migrations
        if not migrations.lacking(time.monotonic()):
            return
        view, term = await self._reader.read(timeout_s=RPC_TIMEOUT_S), self._leader.term
        self._leader.check(term)
        moment = now()
        for plan in migrations.make_room(view, moment, term):
            try:
                await self._stream.move(plan, moment.monotonic_s)
            except BlitzError as error:
                log.info("%s: it is decided again later: %s", plan.plan_id, error)
                continue
            self._moves.inc()
            log.info("%s: %s", plan.plan_id, plan.reason)

    async def _look_for_profiles(self) -> None:
        """Read those that are new."""
        await asyncio.to_thread(self._profiles.look)

    # --- requests ----------------------------------------------------------------------------

    def _on_routes(self, changes: RouteChanges) -> None:
        if changes.gone:
            self._round_runner.try_again()

    async def _on_get_destinations(self, request: GetDestinations) -> Destinations:
        return self._planner.migrations.of(request.instance_id, await self._reader.read(timeout_s=RPC_TIMEOUT_S))

    async def _on_start_scale(self, request: StartScale) -> ScaleRecord:
        role, triggered_s = request.role, time.monotonic()
        if request.instances < 0:
            raise BadRequest("instances must not be negative", param="instances")
        if not 0 <= request.hold_s <= MAX_HOLD_S:
            raise BadRequest(f"hold_s must be from 0 to {MAX_HOLD_S:g}, not {request.hold_s:g}", param="hold_s")
        view, read_s = await self._reader.read(timeout_s=RPC_TIMEOUT_S), time.monotonic()
        asked = asked_by_hand(request, view, triggered_s)
        # Set back if nothing comes of it.
        await self._set_floor(request.model, role, request.instances, request.hold_s)
        try:
            operation = await self._scale_patiently(asked)
        except BlitzError:
            before = view.floors.get((request.model, role))
            hold_s = max(0.0, before.left_s - (time.monotonic() - read_s)) if before else 0.0
            # Fails if another planner leads by now; the caller is told why nothing came of the request.
            with contextlib.suppress(BlitzError):
                await self._set_floor(request.model, role, before.instances if before else 0, hold_s)
            raise
        return (operation or self._planner.writer.nothing_to_do(asked, now())).record()

    async def _set_floor(self, model: str, role: Role, instances: int, hold_s: float) -> None:
        floor = SetFloor(model=model, instances=instances, hold_s=hold_s, role=role, term=self._leader.term)
        await self._bus.request(subjects.pool("set_floor"), floor, Ack, timeout_s=RPC_TIMEOUT_S)

    async def _scale_patiently(self, request: ScaleRequest) -> Operation | None:
        """A registry that recovers grants nothing for the time of a lease; the operator waits for this answer."""
        deadline_s = time.monotonic() + RECOVERY_WAIT_S
        while True:
            try:
                return await self._round_runner.scale(request)
            except Unavailable as error:
                if error.retry_after_s is None or time.monotonic() + error.retry_after_s > deadline_s:
                    raise
                await asyncio.sleep(error.retry_after_s + 0.05)

    # --- records -----------------------------------------------------------------------------

    async def _on_list_records(self, request: ListScaleRecords) -> ScaleRecords:
        models, at = frozenset(request.models), now()
        # Pairs without batches and timelines: a list of many would not fit a message.
        return ScaleRecords(
            records=tuple(self._operations.newest(min(request.limit, MAX_LISTED))),
            refused=self._planner.refusals.newest(at.monotonic_s, MAX_REFUSED_LISTED, models),
            unplanned=self._planner.rounds.unplanned(at, models),
            advice=self._planner.adviser.current(at.monotonic_s),
        )

    async def _on_list_decisions(self, request: ListDecisions) -> Decisions:
        found = self._planner.decisions.of(request.model, request.until_s, request.limit)
        return Decisions(decisions=found)


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(6)}"
