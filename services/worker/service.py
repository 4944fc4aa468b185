"""The worker's shell: registration, plans, requests and reports around one instance slot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry

from services.worker.config import WorkerConfig
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.instance.host_group import HostGroup, group_name
from services.worker.instance.instance import Instance, InstanceFactory
from services.worker.instance.load_reporter import LoadReporter
from services.worker.instance.progress import ProgressReporter
from services.worker.instance.registration import Registration, Standing
from services.worker.instance.retirement import until_allowed
from services.worker.kv_transfer.receiver import KvReceiver
from services.worker.kv_transfer.sender import KvSender
from services.worker.live.pairing import Pairing
from services.worker.node.facts import NodeFacts
from services.worker.node.nic_meter import NicMeter
from services.worker.orders import Orders
from services.worker.requests.inbox import Serving
from services.worker.requests.witness import StepWitness
from services.worker.scaling import Scaling
from services.worker.weights.host_copies import HostCopies
from services.worker.weights.host_store import HostStore
from services.worker.weights.mover import WeightMover
from services.worker.weights.peers import Peers
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.ending import closed
from shared.errors import BlitzError, Unavailable
from shared.identity import hold, new_incarnation, refuse_if_held
from shared.messages.common import InstanceState
from shared.messages.copies import DropCopy, HoldCopy
from shared.messages.generation import AckTerminal, Cancel, GatewayHeartbeat, Resend, Submit
from shared.messages.registry import ModelRecord, WorkerInfo
from shared.messages.scaling import (
    Feed,
    FeedEnded,
    FetchRange,
    GetChecksums,
    GetFeedState,
    StopFeed,
)
from shared.transport.base import TensorTransport

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
LAST_WORDS_S = 2.0
"""For what others are told before the process ends."""
HAND_BACK_S = 1.0
"""The same, where the process has had its time to drain."""
LISTENING_S = 0.75
"""Until nothing that comes is begun any more: questions that are being answered may wait for a peer that is gone."""
EACH_S = 0.5
"""What a part that has begun something may take to end it."""
FAREWELL_S = 0.25
METER_INTERVAL_S = 0.1
"""Traffic is averaged over no less: reports may come in bursts."""


class WorkerService:
    """One process, one device, at most one instance."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        config: WorkerConfig,
        *,
        pid: int = 0,
        fatal: Callable[[str], None],
        node: NodeFacts,
        metrics: CollectorRegistry = REGISTRY,
        incarnation: str = "",
    ) -> None:
        """``fatal(why)`` must end the process soon: its memory can no longer be trusted. ``node``: where it runs.
        ``incarnation``: what the bus knows this process by, if it does, so that it can say whose connection ended."""
        self._bus = bus
        self._config = config
        self._meter = NicMeter(node.device)
        self._metered_at_s = float("-inf")
        self._nic_gbps = (0.0, 0.0)
        self.info = WorkerInfo(
            worker_id=config.worker_id,
            incarnation=incarnation or new_incarnation(),
            host=config.host,
            device=config.device,
            engine=config.engine,
            transport_address=transport.address,
            arena_bytes=config.arena_bytes,
            kv_bytes=config.kv_bytes,
            leaf=node.leaf,
            nic_gbps=node.nic_gbps,
            pid=pid,
            nic=node.nic,
            scale_up_domain=node.scale_up_domain,
            scale_up_gbps=node.scale_up_gbps,
            host_link_gbps=node.host_link_gbps,
            ssd_gbps=node.ssd_gbps,
            host_cache_bytes=config.host_cache_bytes,
        )
        self._serving = Serving(bus, config.worker_id, lambda: self._scaling.instance)
        factory = self._factory = InstanceFactory(config, self._serving.on_output, self._on_engine_failure)
        factory.witness = StepWitness(bus, self._serving)
        self._peers = Peers(bus, transport, self.info)
        progress = ProgressReporter(bus, config.worker_id)
        mover = WeightMover(bus, transport, self.info, self._peers, progress, stall_s=config.stall_s)
        self._mover = mover
        self._host_copies = HostCopies(
            config.worker_id,
            HostStore(config.host_cache_bytes, keep_alive_s=config.host_cache_keep_alive_s),
            mover,
            retire=lambda copy, leaving: self._registration.retire_host(copy, leaving=leaving),
            changed=self._report_state,
            fatal=fatal,
        )
        self._scaling = Scaling(
            config.worker_id,
            factory,
            mover,
            progress,
            retire=lambda instance, undo: self._registration.retire(instance.info(), undo),
            keep_on_host=self._host_copies.keep,
            changed=self._report_state,
            fatal=fatal,
        )
        self._pairing = Pairing(
            bus,
            transport,
            config.worker_id,
            self._peers,
            self._serving,
            progress,
            lambda: self._scaling.instance,
            self._report_state,
            silence_s=config.stall_s,
        )
        self._kv_receiver = KvReceiver(
            bus, transport, self.info, self._peers, self._serving, lambda: self._scaling.instance
        )
        self._kv_sender = factory.prefill_listener = KvSender(
            bus,
            self.info,
            self._peers,
            self._serving,
            lambda: self._scaling.instance,
            silence_s=config.stall_s,
            metrics=metrics,
        )
        self._serving.cooperations = (self._pairing, self._kv_sender, self._kv_receiver)
        self._scaling.on_loaded = self._pairing.loaded
        self._scaling.on_gone = self._instance_gone
        self._orders = Orders(
            bus,
            config.worker_id,
            self._scaling.on_scale_plan,
            self._scaling.on_drain_plan,
            self._pairing.on_assignment,
        )
        self._registration = Registration(
            bus,
            self.info,
            self._standing,
            self._record,
            self._scaling.on_stop_instance,
            self._orders.planner_term,
        )
        self._loop = asyncio.get_running_loop()
        self._fatal = fatal
        self._ending: asyncio.Task[None] | None = None
        self._load_reporter = LoadReporter(
            bus,
            config.worker_id,
            lambda: self._scaling.instance,
            self._expire,
            HostGroup(
                group_name(config.nats_url, config.host) if config.load_by_host else "",
                config.host,
                interval_s=config.report_interval_s,
            ),
            interval_s=config.report_interval_s,
            metrics=metrics,
        )

    @property
    def registered(self) -> asyncio.Event:
        """Set once the pool knows this worker."""
        return self._registration.registered

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``, then drain for at most the configured time.

        Raises ``DuplicateId`` when another process that lives has this worker's id.
        """
        await self._factory.prefault(stopping)
        await self._factory.warm_up()
        worker_id, serving, sender = self._config.worker_id, self._serving, self._mover.sender
        # Before anything is listened to that another process of this id is meant by.
        await refuse_if_held(self._bus, subjects.worker_holder(worker_id), f"worker id {worker_id!r}")
        await self._orders.subscribe()
        subscriptions: list[Subscription] = [
            *await hold(self._bus, self.info.incarnation, *self._holder_subjects()),
            await self._bus.respond(subjects.worker_submit(worker_id), Submit, serving.on_submit),
            await self._bus.respond(subjects.worker_resend(worker_id), Resend, serving.on_resend),
            await self._bus.respond(subjects.worker_feed(worker_id), Feed, sender.on_feed),
            await self._bus.respond(subjects.worker_feed_state(worker_id), GetFeedState, sender.on_feed_state),
            await self._bus.respond(subjects.worker_checksums(worker_id), GetChecksums, sender.on_checksums),
            await self._bus.respond(subjects.worker_fetch(worker_id), FetchRange, sender.on_fetch),
            await self._bus.subscribe(subjects.worker_stop_feed(worker_id), StopFeed, sender.on_stop_feed),
            await self._bus.subscribe(subjects.worker_feed_ended(worker_id), FeedEnded, self._mover.on_feed_ended),
            await self._bus.respond(subjects.worker_hold_copy(worker_id), HoldCopy, self._host_copies.on_hold),
            await self._bus.respond(subjects.worker_drop_copy(worker_id), DropCopy, self._host_copies.on_drop),
            await self._bus.subscribe(subjects.worker_cancel(worker_id), Cancel, serving.on_cancel),
            await self._bus.subscribe(subjects.worker_ack(worker_id), AckTerminal, serving.on_ack),
            await self._bus.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, serving.on_gateway),
            self._orders,
            *await self._pairing.subscribe(),
            *await self._kv_receiver.subscribe(),
        ]
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._registration.run(),
                self._peers.run(),
                self._host_copies.run(),
                serving.publish_forever(),
                self._load_reporter.run(),
            )
        ]
        stopped = asyncio.create_task(stopping.wait())
        try:
            # A task that ends is a bug of ours: let it surface instead of limping on.
            done, _ = await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
            await self._drain()
        finally:
            stopped.cancel()
            await self._close(tasks, subscriptions)

    async def _close(self, tasks: list[asyncio.Task[None]], subscriptions: list[Subscription]) -> None:
        """Each part in bounded time: a peer that was killed, a thread or a pool that does not answer hold up no more
        than that, and nothing of this process is used after it."""
        for task in tasks:
            task.cancel()
        parts = (self._host_copies, self._pairing, self._kv_sender, self._kv_receiver)
        await asyncio.gather(
            closed("the tasks", asyncio.wait(tasks), LISTENING_S),
            closed("the subscriptions", asyncio.gather(*(s.close() for s in subscriptions)), LISTENING_S),
        )
        await asyncio.gather(*(closed(type(part).__name__, part.close(), EACH_S) for part in parts))
        await closed("the instance", self._scaling.close(), EACH_S)
        await closed("the registration", self._registration.leave(), FAREWELL_S)

    def _holder_subjects(self) -> tuple[str, str]:
        worker_id = self._config.worker_id
        return subjects.worker_holder(worker_id), subjects.worker_holder(worker_id, self.info.incarnation)

    async def _drain(self) -> None:
        """Take nothing new, finish what runs, and see the copies here taken over. New requests are routed elsewhere
        meanwhile, and new copies placed elsewhere."""
        self._serving.admitting = False
        self._scaling.leaving = True
        self._registration.stopping()
        instance = self._scaling.instance
        if instance is not None and instance.state not in ("serving", "draining"):
            instance = None
        if instance is not None and instance.state == "serving":
            instance.drain()
        draining = asyncio.create_task(self._until_drained(instance))
        try:
            # Not a time-out around it: what swallows a cancellation must not make this wait for ever.
            await asyncio.wait({draining}, timeout=self._config.drain_timeout_s)
        finally:
            draining.cancel()
        if draining.done():
            draining.result()
            return
        log.warning(
            "not done after %.0f s: %d requests continue elsewhere; copies that nobody took over are lost",
            self._config.drain_timeout_s,
            instance.num_requests if instance is not None else 0,
        )
        if instance is not None:
            await self._hand_back(instance)

    async def _until_drained(self, instance: Instance | None) -> None:
        if instance is not None:
            await self._registration.confirmed(JOIN_TIMEOUT_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._host_copies.let_all_go())
            if instance is not None:
                group.create_task(self._finish(instance))
                group.create_task(self._let_go(instance))

    async def _finish(self, instance: Instance) -> None:
        await instance.idle()
        await self._serving.flushed()

    async def _hand_back(self, instance: Instance) -> None:
        """Tell gateways of the requests that are left: their attempts end here, and it was no worker's death."""
        leaves = Unavailable(f"worker {self._config.worker_id} leaves")

        def end(loop: EngineLoop) -> None:
            loop.abort_all(leaves)
            self._serving.on_output(StepOutput(tuple(loop.scheduler.take_ended())))

        with contextlib.suppress(BlitzError, TimeoutError):  # whoever is not told asks
            async with asyncio.timeout(HAND_BACK_S):
                await asyncio.wrap_future(instance.engine.call(end))
                await self._serving.flushed()

    async def _let_go(self, instance: Instance) -> None:
        """Others read the copy until the pool does not need it any more, and then to the end of what they began."""
        await until_allowed(
            lambda: self._registration.retire(instance.info(), False, leaving=True),
            f"the copy of {instance.record.name} in {instance.instance_id}",
        )
        self._mover.withdraw(instance)
        await instance.idle()

    async def _instance_gone(self, instance: Instance, reason: str) -> None:
        for part in (self._pairing, self._kv_sender, self._kv_receiver):
            await part.instance_gone(instance, reason)

    def _expire(self) -> None:
        self._serving.expire()
        self._kv_receiver.expire()

    def _report_state(self) -> None:
        self._registration.changed()
        self._peers.look_soon()

    def _standing(self) -> Standing:
        instance = self._scaling.instance
        state: InstanceState = "spare" if instance is None else instance.state
        info = None if instance is None else instance.info()
        return Standing(state, info, self._host_copies.report(), *self._nic_rates())

    def _nic_rates(self) -> tuple[float, float]:
        now_s = time.monotonic()
        if now_s - self._metered_at_s >= METER_INTERVAL_S:
            self._metered_at_s = now_s
            self._nic_gbps = self._meter.rates(now_s)
        return self._nic_gbps

    def _record(self, model_hash: str) -> ModelRecord | None:
        """The model of anything that is held here, if the registry lost it."""
        instance = self._scaling.instance
        if instance is not None and instance.record.model_hash == model_hash:
            return instance.record
        return self._host_copies.record(model_hash)

    def _on_engine_failure(self, error: BlitzError) -> None:
        def end() -> None:
            self._ending = asyncio.create_task(self._end_broken(error))

        self._loop.call_soon_threadsafe(end)

    async def _end_broken(self, error: BlitzError) -> None:
        """The engine computes nothing any more. Gateways hear it of each request, and the pool of the instance, so
        that all of them go on elsewhere at once; then the process ends."""
        instance = self._scaling.instance
        try:
            if instance is not None and instance.state != "failed":
                instance.fail()
            with contextlib.suppress(BlitzError, TimeoutError):  # they find out by themselves
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._serving.flushed()
                    await self._registration.confirmed(LAST_WORDS_S)
                    await self._bus.flush()
        finally:  # whatever breaks here, a process without an engine must not stay
            self._fatal(f"the engine's thread ended: {error}")
