"""Keeps the host copies that there are to be: has workers hold and drop them, and says which copies may go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from redis.exceptions import RedisError

from services.pool.config import PoolSettings
from services.pool.core.cluster import ClusterView
from services.pool.core.copies import gpu_copy_id, host_copy_id
from services.pool.core.copies_policy import copy_rules
from services.pool.core.outstanding import LEAVING_S
from services.pool.core.registry import Registry
from services.pool.core.steps import Ask, Drop, Hold, PlacementDecision
from services.pool.store import Store
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, DeadlineExceeded, NoResponder, SentBack
from shared.messages.common import Ack
from shared.messages.copies import CanRead, DropCopy, HoldCopy, RetireCopy
from shared.messages.registry import Unplaced, WorkerHeartbeat

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
PAUSE_S = 0.05
"""Between two looks, if the first had too much to do."""
AT_ONCE = 50
"""Workers whose reports are read without a pause: about a millisecond."""
RPC_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
"""For a worker to look at a checkpoint, which may lie on a file system far away."""


class PlacementMetrics:
    """The metrics of placement, which a pool process shows whether it leads or not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.host_bytes = Gauge(
            "blitz_pool_host_copy_bytes", "Host memory that copies occupy.", ["host"], registry=registry
        )
        self.no_copy = Gauge(
            "blitz_pool_models_without_copy",
            "Models without a complete copy in any memory that no worker can read from disk either; should be 0.",
            registry=registry,
        )
        self.on_disk = Gauge(
            "blitz_pool_models_on_disk",
            "Models without a copy in any memory that a worker can read from disk.",
            registry=registry,
        )
        self.no_host_copy = Gauge(
            "blitz_pool_models_without_host_copy", "Models without a complete placed host copy.", registry=registry
        )
        self.loading = Gauge(
            "blitz_pool_loading_copies", "Host copies that load now; at most BLITZ_POOL_LOADS.", registry=registry
        )
        self.steps = Counter(
            "blitz_pool_placement_steps_total",
            "Orders to workers to hold a host copy, and to drop one.",
            ["step"],
            registry=registry,
        )
        self.seconds = Histogram(
            "blitz_pool_placement_seconds",
            "How long one round of placement keeps the process busy; twice a second, or more often.",
            buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
            registry=registry,
        )


class CopyPlacer:
    """Decides (``core.copies_policy``) from what changes in the registry, and carries the steps out.

    It runs in the registry's event loop, a millisecond or two at a time: a thread would hold the interpreter as long.

    Only this object knows what it sent and no report shows yet. After a restart the reports are enough, because it does
    nothing before every worker has had the time to report.
    """

    def __init__(
        self, bus: Bus, store: Store, registry: Registry, metrics: PlacementMetrics, settings: PoolSettings
    ) -> None:
        self._bus = bus
        self._store = store
        self._registry = registry
        self._metrics = metrics
        self._settings = settings
        self._next_s = 0.0
        self._unplaced: tuple[Unplaced, ...] = ()
        self._hosts: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._tasks = OwnedTasks()
        self._begin()

    def _begin(self) -> None:
        """Start without any knowledge."""
        settings = self._settings
        self._cluster = ClusterView(self._registry.models.removed(), settings.loads)
        self._rules = copy_rules(settings.copies, self._cluster, settings.keep_copies_s)
        self._seen = 0
        """The registry's version up to which its changes are known, except for those in ``_unread``."""
        self._unread: deque[WorkerHeartbeat] = deque()
        self._cordoned: dict[str, float] = {}
        """Workers that are to be free, and when to say again that they are."""
        self._shown = -1

    async def close(self) -> None:
        """Cancel what runs; a worker that already has its request continues by itself."""
        await self._tasks.close()

    def look(self, now_s: float, *, may_act: bool) -> None:
        """Begin a look at the registry, and take the next steps if ``may_act``; often called, and does something every
        ``INTERVAL_S``."""
        if now_s < self._next_s or (self._looking is not None and not self._looking.done()):
            return
        self._next_s = now_s + INTERVAL_S
        self._looking = self._tasks.start(self._look(now_s, may_act=may_act))

    async def _look(self, now_s: float, *, may_act: bool) -> None:
        try:
            while await self._look_and_act(may_act=may_act) and time.monotonic() < now_s + INTERVAL_S:
                await asyncio.sleep(PAUSE_S)
        except (RedisError, BlitzError) as error:
            log.warning("placement: this look failed: %s", error)
        except Exception:
            # Whatever broke, the registry continues. What was known may be wrong now: the placer learns it anew, once
            # workers have answered what they were asked and their reports show it.
            log.exception("placement: this look failed")
            self._begin()
            self._next_s = time.monotonic() + RPC_TIMEOUT_S

    async def _look_and_act(self, *, may_act: bool) -> bool:
        """Whether there is more to do at once."""
        took_s = 0.0
        while True:
            began_s = time.perf_counter()
            done = self._read(AT_ONCE)
            if done:
                break
            took_s += time.perf_counter() - began_s
            await asyncio.sleep(0)
        decided = self._decide() if may_act else None
        self._show()
        self._metrics.seconds.observe(took_s + time.perf_counter() - began_s)
        if decided is None:
            return False
        await self._act(decided.steps)
        for ask in decided.asks:
            self._tasks.start(self._ask_for_disk(ask))
        await self._tell(decided)
        return decided.unfinished

    def _decide(self) -> PlacementDecision:
        now_s = time.monotonic()
        self._free_cordoned(now_s)
        for failure in self._cluster.outstanding.expire(now_s):
            log.warning("placement: %s", failure)
        return self._rules.look(now_s)

    def _free_cordoned(self, now_s: float) -> None:
        """Copies on workers that are to be free move away like those of workers that stop."""
        out, cordons = self._cluster.outstanding, self._registry.cordons
        for worker_id in cordons.last_alive():
            report = self._registry.report(worker_id)
            if report is not None and now_s >= self._cordoned.get(worker_id, 0.0):
                self._cordoned[worker_id] = now_s + LEAVING_S / 2
                out.leaves(worker_id, report.worker.incarnation, now_s)
        for worker_id in [w for w in self._cordoned if w not in cordons]:
            del self._cordoned[worker_id]
            out.stays(worker_id)

    def _read(self, most: int) -> bool:
        """Learn what changed in the registry, of ``most`` workers at most; whether that is all."""
        now_s = time.monotonic()
        if not self._unread and self._seen != self._registry.version.number:
            changes = self._registry.changes(self._seen)
            self._seen = changes.version
            index = self._cluster.copies
            gone_models, gone_workers = set(changes.gone_models), set(changes.gone_workers)
            if changes.whole:
                gone_models = set(index.names()) - {record.name for record in changes.models}
                gone_workers = set(index.workers()) - {report.worker.worker_id for report in changes.reports}
            for name in sorted(gone_models):
                index.remove_model(name)
            for worker_id in sorted(gone_workers):
                self._cluster.forget(worker_id)
            for record in changes.models:
                index.put_model(record)
            self._unread.extend(changes.reports)
        for _ in range(min(most, len(self._unread))):
            for failure in self._cluster.put_report(self._unread.popleft(), now_s):
                log.warning("placement: %s", failure)
        self._cluster.refresh()
        return not self._unread

    async def _act(self, steps: Sequence[Hold | Drop]) -> None:
        for index, step in enumerate(steps):
            try:
                await self._send(step)
            except (RedisError, BlitzError):
                out = self._cluster.outstanding
                for unsent in steps[index:]:
                    (out.hold_not_sent if isinstance(unsent, Hold) else out.drop_over)(unsent.key)
                raise

    async def _tell(self, decided: PlacementDecision) -> None:
        """Say which models have no host copy, and why."""
        if decided.unplaced == self._unplaced:
            return
        known = {entry.model: entry for entry in self._unplaced}
        level = logging.WARNING if self._cluster.memory.workers else logging.INFO
        for entry in decided.unplaced:
            if known.get(entry.model) != entry:
                in_turn = entry.model in decided.waiting
                now = logging.DEBUG if in_turn else logging.INFO if entry.on_disk else level
                what = "on disk, no host copy" if entry.on_disk else "no host copy"
                log.log(now, "placement: %s, %s: %s", entry.model, what, entry.reason)
        self._registry.models.set_unplaced(decided.unplaced)
        await self._store.set_unplaced(decided.unplaced)
        self._unplaced = decided.unplaced

    async def _send(self, step: Hold | Drop) -> None:
        if isinstance(step, Hold):
            await self._send_hold(step)
            return
        log.info("placement: worker %s is to drop its host copy of %s: %s", step.worker, step.model, step.reason)
        self._metrics.steps.labels("drop").inc()
        self._tasks.start(self._ask_to_drop(step))

    async def _send_hold(self, step: Hold) -> None:
        first = step.sources[0] if step.sources else None
        log.info(
            "placement: worker %s is to hold a host copy of %s (%d bytes) from %s: %s",
            step.worker,
            step.record.name,
            step.record.weights_bytes,
            f"{first.kind} memory of {first.worker_id}" if first else "disk",
            step.reason,
        )
        epoch = await self._store.next_epoch()
        request = HoldCopy(model=step.record, epoch=epoch, sources=step.sources, cap_gbps=step.cap_gbps)
        self._metrics.steps.labels("hold").inc()
        self._tasks.start(self._ask_to_hold(step, request))

    async def _ask_to_hold(self, step: Hold, request: HoldCopy) -> None:
        subject = subjects.worker_hold_copy(step.worker)
        try:
            await self._bus.request(subject, request, Ack, timeout_s=RPC_TIMEOUT_S)
        except DeadlineExceeded as error:
            # It may have accepted: its reports will tell.
            log.warning(
                "placement: worker %s did not say whether it holds %s: %s", step.worker, step.record.name, error
            )
        except SentBack as error:
            log.info("placement: worker %s does not hold %s: %s", step.worker, step.record.name, error)
            self._cluster.outstanding.hold_not_sent(step.key)
            self._cluster.outstanding.leaves(step.worker.id, step.worker.incarnation, time.monotonic())
        except BlitzError as error:
            # Nobody listens where a process is ending: nothing is wrong with that.
            level = logging.INFO if isinstance(error, NoResponder) else logging.WARNING
            log.log(level, "placement: worker %s does not hold %s: %s", step.worker, step.record.name, error)
            if self._cluster.copies.report(step.worker.id) is not None:
                self._cluster.outstanding.hold_failed(step.key, time.monotonic())

    async def _ask_to_drop(self, step: Drop) -> None:
        subject = subjects.worker_drop_copy(step.worker)
        try:
            await self._bus.request(subject, DropCopy(model_hash=step.model_hash), Ack, timeout_s=RPC_TIMEOUT_S)
        except BlitzError as error:
            # The drop stays marked until it times out, so that a worker in trouble is not asked twice a second.
            log.warning("placement: worker %s does not drop %s: %s", step.worker, step.model, error)

    async def _ask_for_disk(self, ask: Ask) -> None:
        readable = False
        for worker in ask.workers:
            try:
                question = CanRead(model=ask.record)
                await self._bus.request(subjects.worker_can_read(worker), question, Ack, timeout_s=READ_TIMEOUT_S)
            except BlitzError as error:
                log.info("placement: worker %s cannot read %s from disk: %s", worker, ask.record.name, error)
            else:
                readable = True
                break
        self._cluster.disk_answered(ask.record.model_hash, time.monotonic(), readable=readable)
        self._next_s = 0.0

    async def retire(self, request: RetireCopy, now_s: float) -> None:
        """Let a copy go, or count it again. Raises ``Conflict`` if it is its model's last."""
        on_host = request.kind == "host"
        worker_id, key = request.worker_id, (request.worker_id, request.model_hash)
        copy_id = host_copy_id(worker_id) if on_host else gpu_copy_id(worker_id, request.instance_id)
        if request.undo:
            await self._store.unretire(request.model_hash, copy_id)
            if on_host:
                self._cluster.outstanding.take_back(key)
            return
        while not self._read(AT_ONCE):
            await asyncio.sleep(0)
        known = self._cluster.copies.report(worker_id)
        if request.leaving and known is not None:
            self._cluster.outstanding.leaves(worker_id, known.worker.incarnation, now_s)
        needed = request.stays or self._needed(request)
        if await self._retired(request, copy_id, needed=needed):
            log.info("placement: the %s copy of %s on worker %s may go", request.kind, request.model, worker_id)
            return
        if self._may_stay_on_disk(request) and await self._retired(request, copy_id, needed=False):
            log.info("placement: %s, whose last copy on worker %s goes, stays on disk", request.model, worker_id)
            return
        if request.leaving and not self._rules.could_take(request.model_hash):
            await self._retired(request, copy_id, needed=False)
            log.info(
                "placement: the last copy of %s in any memory goes with worker %s: no other worker takes it",
                request.model,
                worker_id,
            )
            return
        # A worker that was not told to drop its copy has its own reasons.
        held = self._cluster.copies.host_copy(key) is not None
        if on_host and not self._cluster.outstanding.drop_over(key) and held:
            self._cluster.outstanding.give_up(key, now_s)
        self._next_s = 0.0
        raise Conflict(f"the {request.kind} copy of {request.model} on worker {worker_id} is the last: it must stay")

    async def _retired(self, request: RetireCopy, copy_id: str, *, needed: bool) -> bool:
        agreed = await self._store.retire(request.model_hash, copy_id, needed=needed, sequence=request.sequence)
        if agreed:
            self._registry.retired(request.worker_id, copy_id)
        return agreed

    def _may_stay_on_disk(self, request: RetireCopy) -> bool:
        """Whether a model's last copy in any memory may go: it can be read from disk, and nobody uses it (a host copy
        that was told to go) or no host has room for it (that of an instance that goes, not of one that serves on)."""
        if request.stays:
            return False
        cluster, model_hash = self._cluster, request.model_hash
        to_disk = self._rules.may_stay_on_disk((request.worker_id, model_hash))
        if cluster.is_readable(model_hash) is not True:
            return False
        if request.kind == "gpu":
            return not self._rules.could_take(model_hash)
        copies = cluster.copies.by_hash.get(model_hash)
        wakes = any(lease.model == request.model for lease in self._registry.leases.values())
        in_use = wakes or (copies is not None and bool(copies.instances))
        return to_disk and not in_use

    def _needed(self, request: RetireCopy) -> bool:
        """Whether the model is registered, or lost rather than removed.

        A GPU copy is not if no worker's host memory could ever hold the model: scaling to zero would hang.
        """
        record = self._cluster.record(request.model_hash)
        if request.kind == "gpu":
            num_bytes = record.weights_bytes if record is not None else 1
            most = self._cluster.copies.capacities.last()
            if most is None or most[0] < num_bytes:
                return False
        if record is not None:
            return True
        replaced = self._registry.models.get(request.model) is not None
        return not replaced and not self._registry.models.was_removed(request.model)

    def _show(self) -> None:
        self._metrics.loading.set(len(self._cluster.loads))
        if self._shown == self._cluster.version:
            return
        self._shown = self._cluster.version
        index = self._cluster.copies
        for host in self._hosts - index.host_bytes.keys():
            self._metrics.host_bytes.remove(host)
        self._hosts = set(index.host_bytes)
        for host, num_bytes in index.host_bytes.items():
            self._metrics.host_bytes.labels(host).set(num_bytes)
        on_disk = {h for h in self._cluster.without_copy if self._cluster.is_readable(h) is True}
        self._metrics.on_disk.set(sum(len(index.names_of(h)) for h in on_disk))
        self._metrics.no_copy.set(sum(len(index.names_of(h)) for h in self._cluster.without_copy - on_disk))
        self._metrics.no_host_copy.set(sum(len(index.names_of(h)) for h in self._cluster.without_host_copy))
