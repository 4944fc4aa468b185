"""Copies in the memory of hosts: the pool's rules decide (``services.pool.core.copies_policy``), workers load, keep and
drop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from bench.sim.clock import Clock
from bench.sim.fabric import Fabric, Path
from bench.sim.flows import Flow, Network
from bench.sim.latencies import Latencies
from services.pool.core.cluster import ClusterView
from services.pool.core.copies_policy import CopiesPolicy, copy_rules
from services.pool.core.loads import LoadLimits
from services.pool.core.steps import Ask, Drop, Hold
from shared.messages.copies import CopySource
from shared.messages.registry import HostCopy, ModelRecord, WorkerHeartbeat

LOOK_S = 0.5
"""As ``services.pool.copy_placer``."""


@dataclass(slots=True)
class _Coming:
    """A copy on its way."""

    flow: Flow
    sources: list[CopySource]
    """The first is read, the others would be; the disk if there are none."""


class HostCopies:
    """All hosts' memories. ``on_change`` is told of workers whose copies changed."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        fabric: Fabric,
        latencies: Latencies,
        gpu_of: Callable[[str], str],
        *,
        policy: CopiesPolicy,
        keep_copies_s: float,
    ) -> None:
        """``gpu_of``: the GPU of a worker."""
        self._clock = clock
        self._network = network
        self._fabric = fabric
        self._latencies = latencies
        self._gpu_of = gpu_of
        self._held: dict[str, dict[str, HostCopy]] = {}
        """By worker and the hash of the model."""
        self._coming: dict[tuple[str, str], _Coming] = {}
        """The same, of those that load."""
        self._down: set[str] = set()
        """Workers that have died and are not back."""
        self._cluster = ClusterView((), LoadLimits())
        self._rules = copy_rules(policy, self._cluster, keep_copies_s)
        self._serial = 0
        self.on_change: Callable[[str], None] = lambda _worker_id: None
        self.num_bytes = 0
        """In all memories now."""
        clock.after(LOOK_S, self._look)

    def of(self, worker_id: str) -> tuple[HostCopy, ...]:
        """A worker's copies, as it reports them."""
        held = self._held.get(worker_id)
        return tuple([held[model_hash] for model_hash in sorted(held)]) if held else ()

    # --- what the pool hears -----------------------------------------------------------------

    def put_model(self, record: ModelRecord) -> None:
        """A model is registered."""
        self._cluster.copies.put_model(record)

    def put_report(self, report: WorkerHeartbeat) -> None:
        """A worker says how it is."""
        self._cluster.put_report(report, self._clock.now_s)

    def forget(self, worker_id: str) -> None:
        """A worker's lease has run out."""
        self._cluster.forget(worker_id)

    def may_drop_gpu(self, worker_id: str, model: ModelRecord) -> bool:
        """Whether the pool lets an instance's copy go: there is another, or it stays on disk, and no host takes one."""
        self._cluster.refresh()
        copies = self._cluster.copies.by_hash.get(model.model_hash)
        if copies is None or any(other != worker_id for other in (*copies.serving, *copies.draining)):
            return True
        if any(held.copy.state == "ready" for held in (*copies.placed.values(), *copies.cached.values())):
            return True
        self._rules.may_stay_on_disk((worker_id, model.model_hash))
        return self._cluster.is_readable(model.model_hash) is True and not self._rules.could_take(model.model_hash)

    def _look(self) -> None:
        now_s = self._clock.now_s
        self._clock.after(LOOK_S, self._look)
        self._cluster.refresh()
        self._cluster.outstanding.expire(now_s)
        placement = self._rules.look(now_s)
        for step in placement.steps:
            if isinstance(step, Hold):
                self._clock.after(self._latencies.heartbeat_s, self._hold, step)
            else:
                self._clock.after(self._latencies.heartbeat_s, self._drop, step)
        for ask in placement.asks:
            self._clock.after(self._latencies.heartbeat_s, self._answer, ask)

    def _answer(self, ask: Ask) -> None:
        """Every worker can read every model."""
        self._cluster.disk_answered(ask.record.model_hash, self._clock.now_s, readable=True)

    # --- workers -----------------------------------------------------------------------------

    def put(self, worker_id: str, model: ModelRecord, *, cached: bool) -> None:
        """A whole copy is there, now, if the worker has memory for it."""
        report = self._cluster.copies.report(worker_id)
        taken_bytes = sum([copy.num_bytes for copy in self.of(worker_id)])
        if report is not None and taken_bytes + model.weights_bytes <= report.worker.host_cache_bytes:
            self._set(worker_id, self._copy(model, "ready", cached=cached))

    def keep(self, worker_id: str, model: ModelRecord) -> None:
        """A load leaves a copy with its worker, unless there is one, or no memory for one."""
        if model.model_hash not in self._held.get(worker_id, {}):
            self.put(worker_id, model, cached=True)
            self.on_change(worker_id)

    def has(self, worker_id: str, model_hash: str) -> bool:
        """Whether a whole copy can be read there."""
        copy = self._held.get(worker_id, {}).get(model_hash)
        return copy is not None and copy.state == "ready"

    def die(self, worker_id: str) -> None:
        """With all copies that the worker has. Who reads one, or its GPU, goes on elsewhere once that is noticed."""
        self._down.add(worker_id)
        self.num_bytes -= sum([copy.num_bytes for copy in self._held.pop(worker_id, {}).values()])
        for (receiver, model_hash), coming in list(self._coming.items()):
            if receiver == worker_id:
                self._network.abort(coming.flow)
                del self._coming[receiver, model_hash]
            elif coming.sources and coming.sources[0].worker_id == worker_id:
                self._network.limit(coming.flow, 0.0)
                self._clock.after(self._latencies.silent_s, self._read_elsewhere, receiver, coming)

    def come_back(self, worker_id: str) -> None:
        """The worker is there again, without copies."""
        self._down.discard(worker_id)

    def _read_elsewhere(self, receiver: str, coming: _Coming) -> None:
        if coming.flow.state != "running":
            return
        coming.sources = [source for source in coming.sources[1:] if source.worker_id not in self._down]
        self._network.reroute(coming.flow, self._path(receiver, coming.sources[0] if coming.sources else None))
        self._network.limit(coming.flow, math.inf)

    def _copy(
        self, model: ModelRecord, state: Literal["loading", "ready"], *, cached: bool = False, source: str = ""
    ) -> HostCopy:
        self._serial += 1
        return HostCopy(
            model=model.name,
            model_hash=model.model_hash,
            layout_hash=model.layout_hash,
            num_bytes=model.weights_bytes,
            state=state,
            cached=cached,
            serial=self._serial,
            source=source,
        )

    def _hold(self, step: Hold) -> None:
        model, worker_id = step.record, step.worker.id
        if worker_id in self._down:
            return
        known = self._held.get(worker_id, {}).get(model.model_hash)
        if known is not None:
            self._set(worker_id, msgspec.structs.replace(known, cached=False))
            self.on_change(worker_id)
            return
        sources = [source for source in step.sources if source.worker_id not in self._down]
        first = sources[0] if sources else None
        away = first is not None and first.worker_id != worker_id
        copy = self._copy(model, "loading", source=first.worker_id if first is not None and away else "")
        self._set(worker_id, copy)
        self.on_change(worker_id)
        flow = self._network.start(
            self._path(worker_id, first),
            model.weights_bytes,
            cap_gbps=step.cap_gbps or math.inf,
            on_end=lambda _flow: self._arrived(worker_id, copy),
            purpose="weights",
        )
        self._coming[worker_id, model.model_hash] = _Coming(flow, sources)

    def _path(self, worker_id: str, source: CopySource | None) -> Path:
        fabric, gpu = self._fabric, self._gpu_of(worker_id)
        host = fabric.gpus[gpu].host
        if source is None:
            return fabric.ssd_to_host(gpu)
        theirs = self._gpu_of(source.worker_id)
        if source.kind == "gpu":
            return fabric.gpu_to_host(theirs, host)
        other = fabric.gpus[theirs].host
        # Within a host memory is copied; nothing here is as slow as that is fast but the way to a GPU.
        return fabric.host_to_host(other, host) if other != host else (fabric.host_links[gpu].out,)

    def _arrived(self, worker_id: str, copy: HostCopy) -> None:
        del self._coming[worker_id, copy.model_hash]
        held = self._held.get(worker_id, {}).get(copy.model_hash)
        if held is not None and held.serial == copy.serial:
            self._set(worker_id, msgspec.structs.replace(held, state="ready", source=""))
            self.on_change(worker_id)

    def _drop(self, step: Drop) -> None:
        copy = self._held.get(step.worker.id, {}).pop(step.model_hash, None)
        if copy is not None:
            self.num_bytes -= copy.num_bytes
            self.on_change(step.worker.id)

    def _set(self, worker_id: str, copy: HostCopy) -> None:
        held = self._held.setdefault(worker_id, {})
        if copy.model_hash not in held:
            self.num_bytes += copy.num_bytes
        held[copy.model_hash] = copy
