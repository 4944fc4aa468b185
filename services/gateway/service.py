"""The gateway's async shell: what it receives from the bus, what it reports regularly, and the models that it knows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from services.gateway.admin_keys import AdminKeys
from services.gateway.api_keys import ApiKeys
from services.gateway.config import GatewayConfig
from services.gateway.core.capacity import WorkerSize
from services.gateway.core.latencies import LATENCY_REPORT_EVERY_S, LatencyReports
from services.gateway.core.queue_reports import LEAST_REPORT_S, QUEUE_REPORT_EVERY_S, QueueReports
from services.gateway.core.router import TICK_S
from services.gateway.core.routes import ModelRoutes, RouteDiff, RouteView
from services.gateway.dispatcher import Dispatcher
from services.gateway.memory import ByteBudget, ResponseMemory
from services.gateway.metrics import GatewayMetrics, LoadGauges, ModelGauges, model_gauges
from services.gateway.offload import Offload
from services.gateway.server import ConnectionLimits, Server
from services.gateway.tokenizer import TokenizerStore
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.ending import closed
from shared.errors import BlitzError, DuplicateId, ModelNotFound, Unavailable
from shared.identity import ASK_TIMEOUT_S, gives_way, hold, new_incarnation, refuse_if_held
from shared.load_feed import subscribe_load
from shared.messages.generation import GOODBYE_S, GatewayHeartbeat, TokenBatch
from shared.messages.identity import GetHolder, Holder
from shared.messages.load import LatencyReport, LoadReport, QueueReport
from shared.messages.registry import RouteChanges
from shared.outage import Outage
from shared.process import ProcessState
from shared.registry import RegistryReader, RegistryView
from shared.subjects import Process

log = logging.getLogger(__name__)

LEASE_S = 5.0
HEARTBEAT_EVERY_S = 1.0
REFRESH_EVERY_S = 3.0
SNAPSHOT_TIMEOUT_S = 2.0
CLOSE_CONNECTIONS_S = 1.0
"""Time for clients to read the end of their answers."""
CLOSE_PART_S = 0.5
WHOLE_RESPONSES = 4
"""An answer that is sent whole may occupy this share of the memory of all."""


class Gateway:
    """One gateway process behind its HTTP server. ``run`` serves the bus until cancelled."""

    def __init__(self, bus: Bus, config: GatewayConfig, *, incarnation: str = "") -> None:
        """``incarnation``: what the bus knows this process by, if it does."""
        self.bus = bus
        self.config = config
        self.routes = RouteView()
        self._registry = RegistryReader(bus)
        self.metrics = GatewayMetrics(self.routes)
        self.offload = Offload()
        self.tokenizers = TokenizerStore(max_bytes=config.tokenizer_memory_bytes, idle_s=config.tokenizer_idle_s)
        self.request_memory = ByteBudget(config.request_memory_bytes, "requests")
        self.response_memory = ResponseMemory(
            total_bytes=config.response_memory_bytes,
            slow_bytes=config.slow_reader_bytes,
            whole_bytes=config.response_memory_bytes // WHOLE_RESPONSES,
            on_cut=self.metrics.count_cut,
        )
        self.load_gauges = LoadGauges()
        self._incarnation = incarnation or new_incarnation()
        self.dispatcher = Dispatcher(bus, self.routes, self.metrics, config, incarnation=self._incarnation)
        self.seeds = random.Random()
        """Draws the seeds of requests without one. The system seeds it once, not per request."""
        self.draining = False
        self.at_drain: list[Callable[[], None]] = []
        """Called when shutdown begins, for those who wait for something else."""
        self._queue_reports = QueueReports(config.gateway_id, self.dispatcher.router, self.dispatcher.requests.arrivals)
        self._latency_reports = LatencyReports(config.gateway_id)
        self._stale = asyncio.Event()
        self.api_keys = ApiKeys(
            config.api_keys,
            config.keys_file,
            gateway_id=config.gateway_id,
            incarnation=self._incarnation,
            models=self.routes.models,
        )
        self.admin_keys = AdminKeys(config.admin_keys, config.admin_keys_file)
        self.metrics.sources += [self.api_keys.families, self._memory]
        self._outage = Outage(log, "the registry answers again")
        self._rival = ""
        self._rival_heard = asyncio.Event()
        self._warned = False
        self._held_since_s = time.monotonic()

    @property
    def incarnation(self) -> str:
        """Which start of a gateway this is."""
        return self._incarnation

    def gauges(self) -> tuple[ModelGauges, ...]:
        """Each model's requests here now. On the event loop, which owns what it is read from."""
        return tuple(model_gauges(self.routes, self.dispatcher.requests, self.dispatcher.router))

    def _memory(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "blitz_gateway_request_memory_bytes",
            "Bodies being read and prompts of open requests; at most BLITZ_GATEWAY_REQUEST_MEMORY_MIB.",
            self.request_memory.used_bytes,
        )
        yield GaugeMetricFamily(
            "blitz_gateway_response_memory_bytes",
            "What waits to be sent to clients; at most BLITZ_GATEWAY_RESPONSE_MEMORY_MIB.",
            self.response_memory.used_bytes,
        )
        yield GaugeMetricFamily(
            "blitz_gateway_tokenizer_memory_bytes",
            "Loaded tokenizers, by estimate; at most BLITZ_GATEWAY_TOKENIZER_MEMORY_MIB.",
            self.tokenizers.num_bytes,
        )

    def connection_limits(self, max_connections: int) -> ConnectionLimits:
        """What this gateway's HTTP server lets connections do."""
        return ConnectionLimits(
            max_connections=max_connections,
            read_timeout_s=self.config.read_timeout_s,
            send_timeout_s=self.config.send_timeout_s,
            on_cut=self.metrics.count_cut,
        )

    def refuse_while_draining(self) -> None:
        """Raises ``Unavailable`` once shutdown has begun."""
        if self.draining:
            raise Unavailable("the gateway is shutting down", retry_after_s=1.0)

    def find_model(self, name: str) -> ModelRoutes:
        """A registered model. Raises ``ModelNotFound``, or ``Unavailable`` before anything is known."""
        model = self.routes.models.get(name)
        if model is not None:
            return model
        if not self.routes.ready:
            raise Unavailable("the gateway does not know the models yet", retry_after_s=1.0)
        raise ModelNotFound(f"the model {name!r} does not exist", param="model")

    async def serve(self, server: Server, listener: socket.socket, process: ProcessState) -> None:
        """Serve bus and HTTP until the process must stop, then drain.

        Raises ``DuplicateId`` when another gateway that lives has this one's id.
        """
        try:
            await self._serve(server, listener, process)
        except BaseExceptionGroup as group:
            if group.subgroup(DuplicateId) is None:
                raise
            raise DuplicateId(
                f"gateway id {self.config.gateway_id!r} is held by another living process: set BLITZ_GATEWAY_ID"
            ) from group

    async def _serve(self, server: Server, listener: socket.socket, process: ProcessState) -> None:
        gateway_id = self.config.gateway_id
        await refuse_if_held(self.bus, subjects.gateway_holder(gateway_id), f"gateway id {gateway_id!r}")
        async with asyncio.TaskGroup() as tasks:
            bus_side = tasks.create_task(self.run())
            http_side = tasks.create_task(server.serve(sockets=[listener]))
            http_side.add_done_callback(lambda _: process.stopping.set())
            process.ready = True
            log.info("listening on %s:%d as %s", *listener.getsockname()[:2], self.config.gateway_id)
            await process.wait_stopping()
            await self.drain()
            server.stop()
            # The remaining requests have their errors by now; only clients that do not read are still waited for.
            await asyncio.wait({http_side}, timeout=CLOSE_CONNECTIONS_S)
            http_side.cancel()
            bus_side.cancel()

    async def run(self) -> None:
        """Subscribe, then keep everything going until cancelled."""
        bus, gateway_id = self.bus, self.config.gateway_id
        subscriptions: list[Subscription] = []
        try:
            self._held_since_s = time.monotonic()
            holders = subjects.gateway_holder(gateway_id), subjects.gateway_holder(gateway_id, self._incarnation)
            subscriptions += await hold(bus, self._incarnation, *holders)
            subscriptions.append(await bus.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, self._on_gateway))
            tokens = subjects.tokens(Process(gateway_id, self._incarnation))
            subscriptions.append(await bus.subscribe(tokens, TokenBatch, self.dispatcher.on_batch))
            subscriptions.append(await bus.subscribe(subjects.route_changes(), RouteChanges, self._on_route_changes))
            subscriptions += await subscribe_load(bus, self._on_load)
            subscriptions.append(await bus.watch_departures(self.dispatcher.on_departure))
            subscriptions.append(await bus.subscribe(subjects.queue(), QueueReport, self.dispatcher.on_queues))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._end_if_duplicated())
                tasks.create_task(self.api_keys.run(self.bus))
                tasks.create_task(self.admin_keys.run())
                tasks.create_task(self._refresh())
                tasks.create_task(self._heartbeat())
                tasks.create_task(self._report_queues())
                tasks.create_task(self._report_latencies())
                tasks.create_task(self._tick())
                tasks.create_task(self.dispatcher.outbox.run())
                tasks.create_task(self.tokenizers.run())
        finally:
            await closed("the goodbye", self._say(subjects.gateway_heartbeat(), self._alive(GOODBYE_S)), CLOSE_PART_S)
            await closed("the dispatcher", self.dispatcher.close(), CLOSE_PART_S)
            await closed("the tokenizers", self.tokenizers.close(), CLOSE_PART_S)
            self.offload.close()
            await closed("the subscriptions", asyncio.gather(*(s.close() for s in subscriptions)))

    async def drain(self) -> None:
        """Refuse new requests and wait for those in flight, up to the drain timeout."""
        self.draining = True
        for tell in self.at_drain:
            tell()
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self.dispatcher.requests.wait_idle()
        except TimeoutError:
            log.warning(
                "%d requests did not finish within %.0f s", self.dispatcher.num_active, self.config.drain_timeout_s
            )
            self.dispatcher.end_all()

    async def registry(self) -> RegistryView:
        """The pool's state. Raises ``BlitzError``."""
        return await self._registry.read(timeout_s=SNAPSHOT_TIMEOUT_S)

    async def refresh(self) -> None:
        """Read the registry now. Raises ``BlitzError``."""
        num_heard = self.routes.num_heard
        view = await self.registry()
        self._took(self.routes.apply_view(view, num_heard=num_heard))
        self.dispatcher.workers_changed(
            WorkerSize(record.worker.arena_bytes, record.worker.kv_bytes, record.worker.offered)
            for record in view.workers
        )

    def _on_route_changes(self, event: RouteChanges) -> None:
        self._took(self.routes.apply_changes(event))

    def _took(self, changes: RouteDiff) -> None:
        if changes.gap:
            self._stale.set()
        self._apply(changes)

    def _on_load(self, report: LoadReport) -> None:
        self.load_gauges.take(report, time.monotonic())
        self.dispatcher.on_load(report)

    def _on_gateway(self, heartbeat: GatewayHeartbeat) -> None:
        if heartbeat.gateway_id != self.config.gateway_id or heartbeat.incarnation == self._incarnation:
            return
        if not subjects.is_name(heartbeat.incarnation):
            return  # nobody could answer for it
        # Both started without an answer from the other, or were separated: one of them ends.
        self._rival = heartbeat.incarnation
        self._rival_heard.set()

    async def _end_if_duplicated(self) -> None:
        """Ends this process only for a living one: any process could have sent the message."""
        while True:
            await self._rival_heard.wait()
            self._rival_heard.clear()
            rival = await self._holder(self._rival)
            if rival is None:
                continue
            if gives_way(self._incarnation, time.monotonic() - self._held_since_s, rival):
                raise DuplicateId("another gateway with this id was heard")
            if not self._warned:
                self._warned = True
                log.warning("another gateway has the id %s; it will end (said once)", self.config.gateway_id)

    async def _holder(self, incarnation: str) -> Holder | None:
        """That other process, if it lives."""
        subject = subjects.gateway_holder(self.config.gateway_id, incarnation)
        try:
            return await self.bus.request(subject, GetHolder(), Holder, timeout_s=ASK_TIMEOUT_S)
        except BlitzError as error:
            log.debug("no answer about who holds the id of this gateway: %s", error)
            return None

    def _apply(self, changes: RouteDiff) -> None:
        if changes.models or changes.removed:
            self.tokenizers.follow(model.record for model in self.routes.models.values())
        for name in changes.removed:
            self.api_keys.forget_model(name)
        self.dispatcher.routes_changed(changes)

    async def _refresh(self) -> None:
        while True:
            self._stale.clear()
            try:
                await self.refresh()
            except BlitzError as error:
                self._outage.failed("no snapshot of the registry: %s", error)
                pause_s = 0.2 if not self.routes.ready else REFRESH_EVERY_S
            else:
                self._outage.worked()
                pause_s = REFRESH_EVERY_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._stale.wait()
            except TimeoutError:
                continue

    def _alive(self, lease_s: float) -> GatewayHeartbeat:
        return GatewayHeartbeat(gateway_id=self.config.gateway_id, lease_s=lease_s, incarnation=self._incarnation)

    async def _heartbeat(self) -> None:
        while True:
            await self._say(subjects.gateway_heartbeat(), self._alive(LEASE_S))
            await asyncio.sleep(HEARTBEAT_EVERY_S)

    async def _report_queues(self) -> None:
        while True:
            self.dispatcher.held.clear()
            await self._say(subjects.queue(), self._queue_report())
            await asyncio.sleep(LEAST_REPORT_S)
            with contextlib.suppress(TimeoutError):
                # A model that sleeps is woken by the first request for it, not by the next report.
                async with asyncio.timeout(QUEUE_REPORT_EVERY_S - LEAST_REPORT_S):
                    await self.dispatcher.held.wait()

    def _queue_report(self) -> QueueReport:
        inflight = self.dispatcher.requests.inflight_by_model()
        return self._queue_reports.report(self.routes.models, inflight=inflight)

    async def _report_latencies(self) -> None:
        while True:
            await asyncio.sleep(LATENCY_REPORT_EVERY_S)
            for report in self._latency_reports.reports(self.metrics.latencies(), self.dispatcher.move_counts.take()):
                await self._say(subjects.latencies(), report)

    async def _say(self, subject: str, message: GatewayHeartbeat | LatencyReport | QueueReport) -> None:
        try:
            await self.bus.publish(subject, message)
        except BlitzError as error:
            # The next one follows in a moment; receivers tolerate a lost one.
            log.debug("not published on %s: %s", subject, error)

    async def _tick(self) -> None:
        while True:
            self.dispatcher.tick()
            await asyncio.sleep(TICK_S)
