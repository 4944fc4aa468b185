"""The worker's shell: what it listens to, and how it runs, drains and ends. Its parts are made in ``bootstrap``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry

from services.worker.bootstrap import Parts, worker_info
from services.worker.config import WorkerConfig
from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.instance.instance import Instance
from services.worker.instance.registration import wait_until_retired
from services.worker.node.facts import NodeFacts
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.ending import closed
from shared.errors import BlitzError, SentBack
from shared.identity import hold, new_incarnation, refuse_if_held
from shared.messages.common import ErrorInfo
from shared.messages.copies import CanRead, DropCopy, HoldCopy
from shared.messages.feeds import Feed, FeedEnded, FetchRange, GetChecksums, GetFeedState, StopFeed
from shared.messages.generation import AckTerminal, Cancel, GatewayHeartbeat, Resend, Submit
from shared.messages.traffic import GetTraffic
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
        device: Device = HOST,
        metrics: CollectorRegistry = REGISTRY,
        incarnation: str = "",
    ) -> None:
        """``fatal(why)`` must end the process soon: its memory can no longer be trusted. ``node``: where it runs.
        ``incarnation``: what the bus knows this process by, if it does, so that it can say whose connection ended."""
        self._bus = bus
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._fatal = fatal
        self._ending: asyncio.Task[None] | None = None
        self.info = worker_info(config, node, transport, pid=pid, incarnation=incarnation or new_incarnation())
        self.parts = Parts(
            bus,
            transport,
            config,
            self.info,
            node,
            device,
            metrics=metrics,
            on_engine_failure=self._on_engine_failure,
            fatal=fatal,
        )

    @property
    def registered(self) -> asyncio.Event:
        """Set once the pool knows this worker."""
        return self.parts.registration.registered

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``, then drain for at most the configured time.

        Raises ``DuplicateId`` when another process that lives has this worker's id.
        """
        parts = self.parts
        await parts.factory.prefault(stopping)
        await parts.factory.warm_up()
        me, inbox, sender = self.info.process, parts.inbox, parts.mover.sender
        # Before anything is listened to that another process of this id is meant by.
        await refuse_if_held(self._bus, subjects.worker_holder(me.id), f"worker id {me.id!r}")
        await parts.orders.subscribe()
        subscriptions: list[Subscription] = [
            *await hold(self._bus, self.info.incarnation, *self._holder_subjects()),
            await self._bus.respond(subjects.worker_submit(me), Submit, inbox.on_submit),
            await self._bus.respond(subjects.worker_resend(me), Resend, inbox.on_resend),
            await self._bus.respond(subjects.worker_feed(me), Feed, sender.on_feed),
            await self._bus.respond(subjects.worker_feed_state(me), GetFeedState, sender.on_feed_state),
            await self._bus.respond(subjects.worker_checksums(me), GetChecksums, sender.on_checksums),
            await self._bus.respond(subjects.worker_fetch(me), FetchRange, sender.on_fetch),
            await self._bus.subscribe(subjects.worker_stop_feed(me), StopFeed, sender.on_stop_feed),
            await self._bus.subscribe(subjects.worker_feed_ended(me), FeedEnded, parts.mover.on_feed_ended),
            await self._bus.respond(subjects.worker_hold_copy(me), HoldCopy, parts.host_copies.on_hold),
            await self._bus.respond(subjects.worker_drop_copy(me), DropCopy, parts.host_copies.on_drop),
            await self._bus.respond(subjects.worker_traffic(me), GetTraffic, parts.traffic.on_get),
            await self._bus.respond(subjects.worker_can_read(me), CanRead, parts.host_copies.on_can_read),
            await self._bus.subscribe(subjects.worker_cancel(me), Cancel, inbox.on_cancel),
            await self._bus.subscribe(subjects.worker_ack(me), AckTerminal, inbox.on_ack),
            await self._bus.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, inbox.on_gateway),
            parts.orders,
            *await parts.pair_roles.subscribe(),
            *await parts.kv_receiver.subscribe(),
        ]
        tasks = [
            asyncio.create_task(work)
            for work in (
                parts.registration.run(
                    parts.scaling.on_stop_instance,
                    parts.orders.planner_term,
                    parts.scaling.on_slo_tbt,
                    parts.scaling.on_prepare,
                ),
                parts.peers.run(),
                parts.host_copies.run(),
                inbox.publish_forever(),
                parts.load_reporter.run(),
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
        own = self.parts
        parts = (own.migrator, own.mutation, own.host_copies, own.pair_roles, own.departures, own.kv_receiver)
        await asyncio.gather(
            closed("the tasks", asyncio.wait(tasks), LISTENING_S),
            closed("the subscriptions", asyncio.gather(*(s.close() for s in subscriptions)), LISTENING_S),
        )
        await asyncio.gather(*(closed(type(part).__name__, part.close(), EACH_S) for part in parts))
        await closed("the instance", self.parts.scaling.close(), EACH_S)
        await closed("what waits for the next one", self.parts.factory.close(), EACH_S)
        await closed("the registration", self.parts.registration.leave(), FAREWELL_S)

    def _holder_subjects(self) -> tuple[str, str]:
        worker_id = self._config.worker_id
        return subjects.worker_holder(worker_id), subjects.worker_holder(worker_id, self.info.incarnation)

    async def _drain(self) -> None:
        """Take nothing new, finish what runs, and see the copies here taken over. From now on new requests are
        routed elsewhere, and new copies placed elsewhere."""
        self.parts.inbox.admitting = False
        self.parts.scaling.leaving = True
        self.parts.registration.stopping()
        instance = self.parts.slot.current()
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
            "not done after %.0f s: %d requests continue elsewhere; copies that no other worker took over are lost",
            self._config.drain_timeout_s,
            instance.num_requests if instance is not None else 0,
        )
        if instance is not None:
            await self._hand_back(instance)

    async def _until_drained(self, instance: Instance | None) -> None:
        if instance is not None:
            await self.parts.registration.confirmed(JOIN_TIMEOUT_S)
            self.parts.migrator.ask_and_leave(instance)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.parts.host_copies.let_all_go())
            if instance is not None:
                group.create_task(self._finish(instance))
                group.create_task(self._let_go(instance))

    async def _finish(self, instance: Instance) -> None:
        await instance.idle()
        await self.parts.inbox.flushed()

    async def _hand_back(self, instance: Instance) -> None:
        """Tell gateways of the requests that are left: their attempts end here, and it was no worker's death."""
        leaves = SentBack(f"worker {self._config.worker_id} leaves")

        with contextlib.suppress(BlitzError, TimeoutError):  # a gateway that is not told asks
            async with asyncio.timeout(HAND_BACK_S):
                await asyncio.wrap_future(instance.engine.hand_back(ErrorInfo.of(leaves)))
                await self.parts.inbox.flushed()

    async def _let_go(self, instance: Instance) -> None:
        """Others read the copy until the pool does not need it any more, and then to the end of what they began."""
        if instance.has_copy():
            await wait_until_retired(
                lambda: self.parts.registration.retire(instance.info(), leaving=True),
                f"the copy of {instance.record.name} in {instance.instance_id}",
            )
        self.parts.mover.withdraw(instance)
        await instance.idle()

    def _on_engine_failure(self, error: BlitzError) -> None:
        def end() -> None:
            self._ending = asyncio.create_task(self._end_broken(error))

        self._loop.call_soon_threadsafe(end)

    async def _end_broken(self, error: BlitzError) -> None:
        """The engine computes nothing any more. Gateways hear it of each request, and the pool of the instance, so
        that all of them go on elsewhere at once; then the process ends."""
        instance = self.parts.slot.current()
        try:
            if instance is not None and instance.state != "failed":
                instance.fail()
            with contextlib.suppress(BlitzError, TimeoutError):  # they find out by themselves
                async with asyncio.timeout(LAST_WORDS_S):
                    await self.parts.inbox.flushed()
                    await self.parts.registration.confirmed(LAST_WORDS_S)
                    await self._bus.flush()
        finally:  # in any case, a process without an engine must not stay
            self._fatal(f"the engine's thread ended: {error}")
