"""The feed of the whole cluster, made while somebody looks: what this gateway hears and asks for, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from services.gateway.core.feed import FeedEntities
from services.gateway.core.watched_cluster import KINDS, WatchedCluster, shown
from services.gateway.service import Gateway
from shared import subjects
from shared.bus.base import Subscription
from shared.errors import BlitzError, Overloaded, PayloadTooLarge
from shared.messages.live import LiveReport
from shared.messages.load import LatencyReport
from shared.messages.operations import ListScaleRecords, ScaleRecord, ScaleRecords
from shared.messages.progress import ScaleProgress
from shared.messages.registry import GetGpuTime, GpuTimeReport

log = logging.getLogger(__name__)

MAX_READERS = 32
FRAME_EVERY_S = 0.2
"""The page and `top` draw four times a second."""
CALM_FRAME_EVERY_S = 0.5
"""While nothing scales: figures that change all the time are not read faster."""
FRAME_OF_MANY_EVERY_S = 0.5
"""Of many workers: with 10,000 of them and 1,000 models a frame takes 16 ms, with 200 workers 0.4 ms."""
REGISTRY_EVERY_S = 0.5
RECORDS_EVERY_S = 1.0
GPU_TIME_EVERY_S = 5.0
BUSY_RECORDS_EVERY_S = 0.3
RECORDS_TIMEOUT_S = 1.0
NUM_RECORDS = 30
"""Operations that readers see."""
SETTLES_S = 0.1
"""What happens together is asked for once."""
AGAIN_S = 1.0
COMMENT_EVERY_S = 5.0
"""So that proxies and readers know that the feed lives."""
COMMENT = b": alive\n\n"


class ClusterFeed:
    """One per gateway. ``read`` is a reader's stream."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._state = FeedEntities(gateway.incarnation)
        self._num_readers = 0
        self._work: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        """Of those who looked before."""
        self._fresh = asyncio.Event()
        """Set, and replaced, with each frame, and now and then without one."""
        self._view = WatchedCluster()
        self._soon = asyncio.Event()
        """Something happened of which the registry and the planner know more."""
        gateway.at_drain.append(self._wake)

    def _wake(self) -> None:
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    async def read(self, last_event_id: str, may_read: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Events, until the gateway drains, or the reader's key is taken back. ``last_event_id``: the reader's; empty:
        it is new. Raises ``Overloaded`` for one too many, and ``Unavailable`` while it drains."""
        self._gateway.refuse_while_draining()
        if self._num_readers >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} readers look at this gateway's feed already", retry_after_s=5.0)
        self._num_readers += 1
        try:
            if self._work is None:
                self._work = asyncio.create_task(self._run(self._ending))
            sequence = self._state.last_seen(last_event_id)
            while not self._gateway.draining and may_read():
                fresh, events = self._fresh, list[bytes]()
                if not self._state.is_empty:
                    sequence, events = self._state.since(sequence)
                yield b"".join(events) or COMMENT
                await fresh.wait()
        finally:
            self._num_readers -= 1
            if not self._num_readers and self._work is not None:
                self._work.cancel()
                self._ending, self._work = self._work, None

    # --- while somebody looks ----------------------------------------------------------------

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        """Until cancelled. Readers wait for as long as it cannot go on. ``before``: the last one, which may not have
        put everything away yet."""
        beats = asyncio.create_task(self._beat())
        try:
            if before is not None:
                await asyncio.wait([before])
            while True:
                try:
                    await self._follow()
                except BlitzError as error:
                    log.warning("no feed for now: %s", error)
                except Exception:
                    log.exception("the feed failed, and begins anew")
                await asyncio.sleep(AGAIN_S)
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        """One clock for all readers: a deadline of each would cost more than what they are sent."""
        while True:
            await asyncio.sleep(COMMENT_EVERY_S)
            self._wake()

    async def _follow(self) -> None:
        subscriptions: list[Subscription] = []
        bus, view = self._gateway.bus, self._view
        try:
            subscriptions.append(await bus.subscribe(subjects.progress(), ScaleProgress, self._on_progress))
            subscriptions.append(await bus.subscribe(subjects.live_reports(), LiveReport, view.on_live_report))
            subscriptions.append(await bus.subscribe(subjects.latencies(), LatencyReport, self._on_latencies))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_registry())
                tasks.create_task(self._read_records())
                tasks.create_task(self._read_gpu_time())
                tasks.create_task(self._make_frames())
        finally:
            for subscription in subscriptions:
                await subscription.close()
            self._state.clear()
            self._view = WatchedCluster()

    def _on_progress(self, event: ScaleProgress) -> None:
        if self._view.on_progress(event):
            self._soon.set()

    def _on_latencies(self, report: LatencyReport) -> None:
        now_s = time.monotonic()
        self._view.latencies.take(report, now_s)
        self._view.moves.take(report, now_s)

    async def _read_registry(self) -> None:
        while True:
            try:
                self._view.registry = await self._gateway.registry()
                self._view.silent.discard("pool")
            except BlitzError:
                self._view.silent.add("pool")
            await self._pause(REGISTRY_EVERY_S)

    async def _read_records(self) -> None:
        limit = NUM_RECORDS
        while True:
            try:
                found = await self._gateway.bus.request(
                    subjects.planner("records"),
                    ListScaleRecords(limit=limit),
                    ScaleRecords,
                    timeout_s=RECORDS_TIMEOUT_S,
                )
                self._view.take_records(found.records, await self._as_shown(found.records), found.unplanned)
                self._view.silent.discard("planner")
            except PayloadTooLarge:
                limit = max(1, limit // 2)  # operations of many targets: fewer of them fit one message
            except BlitzError:
                self._view.silent.add("planner")
            await self._pause(BUSY_RECORDS_EVERY_S if self._view.is_scaling else RECORDS_EVERY_S)

    async def _read_gpu_time(self) -> None:
        """It grows all the time, and nobody waits for it."""
        while True:
            with contextlib.suppress(BlitzError):
                self._view.take_gpu_time(
                    await self._gateway.bus.request(
                        subjects.pool("gpu_time"), GetGpuTime(), GpuTimeReport, timeout_s=GPU_TIME_EVERY_S
                    )
                )
            await asyncio.sleep(GPU_TIME_EVERY_S)

    async def _as_shown(self, records: Sequence[ScaleRecord]) -> dict[str, msgspec.Raw]:
        """One of a thousand targets takes 25 ms: one per turn of the loop."""
        shown_now: dict[str, msgspec.Raw] = {}
        for record in records:
            before = self._view.as_before(record)
            if before is None:
                await asyncio.sleep(0)
            shown_now[record.plan_id] = before if before is not None else shown(record)
        return shown_now

    async def _pause(self, pause_s: float) -> None:
        """Less where something happened."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._soon.wait()
                await asyncio.sleep(SETTLES_S)
                self._soon.clear()

    async def _make_frames(self) -> None:
        gateway, view, last_s = self._gateway, self._view, -math.inf
        while True:
            now_s = time.monotonic()
            if view.is_scaling or view.has_many_workers or now_s - last_s >= CALM_FRAME_EVERY_S:
                entities = view.entities(gateway.load_gauges.latest(now_s), gateway.dispatcher.router, now_s)
                if entities and self._state.put(time.time(), entities, kinds=KINDS):
                    self._wake()
                last_s = now_s if entities else last_s
            await asyncio.sleep(FRAME_OF_MANY_EVERY_S if view.has_many_workers else FRAME_EVERY_S)
