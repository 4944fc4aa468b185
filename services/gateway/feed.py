"""The feed of the whole cluster, made while somebody looks: the registry, load, queues, and operations as they happen.

It holds names and numbers: no prompt, token, key or path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.core.feed import FeedEntities
from services.gateway.service import Gateway
from shared import subjects
from shared.bus.base import Subscription
from shared.errors import BlitzError, Overloaded, PayloadTooLarge
from shared.messages.load import LoadReport
from shared.messages.operations import ListScaleRecords, ScaleRecord, ScaleRecords, Unplanned
from shared.messages.progress import ScaleProgress
from shared.messages.registry import WorkerRecord
from shared.registry import RegistryView

log = logging.getLogger(__name__)

MAX_READERS = 32
FRAME_EVERY_S = 0.1
FRAME_OF_MANY_EVERY_S = 0.5
"""Of more than ``MAX_WORKERS``: with 10,000 workers and 1,000 models a frame takes 16 ms, with 200 workers 0.4 ms."""
REGISTRY_EVERY_S = 0.5
RECORDS_EVERY_S = 1.0
BUSY_RECORDS_EVERY_S = 0.3
RECORDS_TIMEOUT_S = 1.0
NUM_RECORDS = 30
"""Operations that readers see."""
MAX_LOADS = 400
"""Targets of which the progress is shown: those that were heard of last."""
MAX_WORKERS = 200
"""With more, workers and instances are counted, and shown one by one only where an operation is about them."""
AGAIN_S = 1.0
COMMENT_EVERY_S = 5.0
"""So that proxies and readers know that the feed lives."""
COMMENT = b": alive\n\n"
_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/\"\\:]+/)+")


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
        """Set, and replaced, with each frame."""
        self._view: RegistryView | None = None
        self._counted: _Counted | None = None
        self._records: tuple[ScaleRecord, ...] = ()
        self._shown: dict[str, msgspec.Raw] = {}
        """The records as readers get them, by plan id."""
        self._unplanned: tuple[Unplanned, ...] = ()
        self._loads: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._silent: set[str] = set()
        """Services that do not answer."""
        self._soon = asyncio.Event()
        """Something happened of which the registry and the planner know more."""
        gateway.at_drain.append(self._wake)

    def _wake(self) -> None:
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    async def read(self, last_event_id: str) -> AsyncGenerator[bytes, None]:
        """Events, until the gateway drains. ``last_event_id``: the reader's; empty: it is new. Raises ``Overloaded``
        for one too many, and ``Unavailable`` while it drains."""
        self._gateway.refuse_while_draining()
        if self._num_readers >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} readers look at this gateway's feed already", retry_after_s=5.0)
        self._num_readers += 1
        try:
            if self._work is None:
                self._work = asyncio.create_task(self._run(self._ending))
            sequence = self._state.last_seen(last_event_id)
            while not self._gateway.draining:
                fresh = self._fresh
                if not self._state.is_empty:
                    sequence, events = self._state.since(sequence)
                    for event in events:
                        yield event
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COMMENT_EVERY_S):
                        await fresh.wait()
                        continue
                yield COMMENT
        finally:
            self._num_readers -= 1
            if not self._num_readers and self._work is not None:
                self._work.cancel()
                self._ending, self._work = self._work, None

    # --- while somebody looks ----------------------------------------------------------------

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        """Until cancelled. Readers wait for as long as it cannot go on. ``before``: the last one, which may not have
        put everything away yet."""
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

    async def _follow(self) -> None:
        subscriptions: list[Subscription] = []
        try:
            subscriptions.append(
                await self._gateway.bus.subscribe(subjects.progress(), ScaleProgress, self._on_progress)
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_registry())
                tasks.create_task(self._read_records())
                tasks.create_task(self._make_frames())
        finally:
            for subscription in subscriptions:
                await subscription.close()
            self._state.clear()
            self._loads.clear()
            self._view, self._records, self._unplanned, self._shown, self._counted = None, (), (), {}, None

    def _on_progress(self, event: ScaleProgress) -> None:
        key = event.plan_id[:80], event.worker_id[:255]
        known = self._loads.pop(key, None) or {"plan": key[0], "worker": key[1], "layers": 0}
        self._loads[key] = known
        while len(self._loads) > MAX_LOADS:
            self._loads.popitem(last=False)
        known["event"] = event.event
        known["after_s"] = round(event.after_s, 4)
        known["bytes"] = max(event.received_bytes, known.get("bytes", 0))
        if event.event == "layer_ready":
            known["layers"] = max(known["layers"], event.layer + 1)
        if event.event == "failed":
            known["detail"] = without_paths(event.detail[:300])
        if event.event in ("accepted", "live", "loaded", "serving", "failed", "spare"):
            self._soon.set()

    async def _read_registry(self) -> None:
        while True:
            try:
                self._view = await self._gateway.registry()
                self._silent.discard("pool")
            except BlitzError:
                self._silent.add("pool")
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
                self._shown = await self._as_shown(found.records)
                self._records, self._unplanned = found.records, found.unplanned
                self._silent.discard("planner")
            except PayloadTooLarge:
                limit = max(1, limit // 2)  # operations of many targets: fewer of them fit one message
            except BlitzError:
                self._silent.add("planner")
            busy = any(record.status == "running" for record in self._records)
            await self._pause(BUSY_RECORDS_EVERY_S if busy else RECORDS_EVERY_S)

    async def _as_shown(self, records: Sequence[ScaleRecord]) -> dict[str, msgspec.Raw]:
        """Most have ended, and are as they were. One of a thousand targets takes 25 ms: one per turn of the loop."""
        before, shown_now = {record.plan_id: record for record in self._records}, dict[str, msgspec.Raw]()
        for record in records:
            if before.get(record.plan_id) == record:
                shown_now[record.plan_id] = self._shown[record.plan_id]
            else:
                shown_now[record.plan_id] = shown(record)
                await asyncio.sleep(0)
        return shown_now

    async def _pause(self, pause_s: float) -> None:
        """Less where something happened."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._soon.wait()
                await asyncio.sleep(FRAME_EVERY_S)
                self._soon.clear()

    async def _make_frames(self) -> None:
        while True:
            if self._view is None and "pool" in self._silent:
                nothing = {"workers": 0, "states": {}, "summarised": False, "silent": sorted(self._silent)}
                if self._state.put(time.time(), {"cluster/now": nothing}, kinds=["cluster"]):
                    self._wake()
            elif self._view is not None and self._state.put(time.time(), self._entities(self._view), kinds=KINDS):
                self._wake()
            many = self._view is not None and len(self._view.workers) > MAX_WORKERS
            await asyncio.sleep(FRAME_OF_MANY_EVERY_S if many else FRAME_EVERY_S)

    # --- entities ----------------------------------------------------------------------------

    def _entities(self, view: RegistryView) -> dict[str, Any]:
        reports = self._gateway.load_gauges.latest(time.monotonic())
        running = {t.worker_id for r in self._records if r.status == "running" for t in r.targets}
        running |= {h.source for r in self._records if r.status == "running" for h in r.hops}
        shown = [w for w in view.workers if len(view.workers) <= MAX_WORKERS or w.worker.worker_id in running]
        if self._counted is None or self._counted.view is not view:
            self._counted = _Counted.of(view)
        counted = self._counted
        found: dict[str, Any] = {
            "cluster/now": {
                "workers": len(view.workers),
                "states": counted.states,
                "summarised": len(view.workers) > MAX_WORKERS,
                "silent": sorted(self._silent),
            }
        }
        router = self._gateway.dispatcher.router
        for name, model in view.models.items():
            found[f"model/{name}"] = {
                "name": name,
                "hash": model.model_hash[:12],
                "layers": model.spec.num_layers,
                "bytes": model.weights_bytes,
                "served_as": model.serving,
                "min": model.min_instances,
                "max": model.max_instances,
                "queued": router.queued_anywhere(name),
                "states": counted.by_model.get(name, {}),
            }
        for worker in shown:
            found[f"worker/{worker.worker.worker_id}"] = _worker(worker, reports)
        for unplanned in self._unplanned:
            about = f"{unplanned.model}/{unplanned.role}"
            found[f"unplanned/{about}"] = {
                "model": unplanned.model, "role": unplanned.role, "wanted": unplanned.wanted,
                "why": without_paths(unplanned.why),
            }  # fmt: skip
        found |= {f"operation/{plan_id}": record for plan_id, record in self._shown.items()}
        plans = self._shown.keys()
        for (plan_id, worker_id), load in self._loads.items():
            if not plans or plan_id in plans:
                found[f"load/{plan_id}/{worker_id}"] = load
        return found


@dataclass(frozen=True, slots=True)
class _Counted:
    """What there is of each kind, counted once per view of the registry."""

    view: RegistryView
    states: dict[str, int]
    by_model: dict[str, dict[str, int]]

    @classmethod
    def of(cls, view: RegistryView) -> _Counted:
        states: Counter[str] = Counter()
        by_model: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for worker in view.workers:
            states[worker.state] += 1
            if worker.instance is not None:
                by_model[worker.instance.model][f"{worker.instance.role} {worker.state}"] += 1
        return cls(view, states, {name: dict(sorted(counts.items())) for name, counts in by_model.items()})


KINDS: Sequence[str] = ("cluster", "model", "worker", "unplanned", "operation", "load")


def without_paths(text: str) -> str:
    """Errors name files; readers of the feed need not know where they are."""
    return _PATH.sub("…/", text)


def shown(record: ScaleRecord) -> msgspec.Raw:
    """A record as JSON, without paths."""
    replace = msgspec.structs.replace
    without = replace(
        record,
        reason=without_paths(record.reason),
        explain=tuple(map(without_paths, record.explain)),
        left_out=tuple(map(without_paths, record.left_out)),
        targets=tuple(replace(t, failure=without_paths(t.failure)) if t.failure else t for t in record.targets),
        live=tuple(replace(p, why=without_paths(p.why), reason=without_paths(p.reason)) for p in record.live),
    )
    return msgspec.Raw(msgspec.json.encode(without))


def _worker(record: WorkerRecord, reports: dict[str, LoadReport]) -> dict[str, Any]:
    worker, instance = record.worker, record.instance
    found: dict[str, Any] = {
        "id": worker.worker_id,
        "host": worker.host,
        "leaf": worker.leaf,
        "state": "stopping" if record.stopping else record.state,
        "arena": worker.arena_bytes,
        "cordoned": record.cordoned,
        "copies": [
            {"hash": copy.model_hash[:12], "state": copy.state, "bytes": copy.num_bytes, "cached": copy.cached}
            for copy in record.host_copies
        ],
    }
    if instance is not None:
        found |= {
            "instance": instance.instance_id,
            "model": instance.model,
            "role": instance.role,
            "layers": instance.layers_ready,
            "plan": instance.plan_id,
        }
        report = reports.get(instance.instance_id)
        if report is not None:
            found |= {
                "running": report.running_requests,
                "queued": report.queued_requests,
                "queued_tokens": report.queued_tokens,
                "kv_used": report.kv_blocks_used,
                "kv_total": report.kv_blocks_total,
            }
    return found
