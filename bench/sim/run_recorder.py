"""What is seen of a run: instances, copies in host memory, bytes sent, and what became of requests."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np

from bench.replay.observations import BytesPoint, CarriedPoint, Cluster, ClusterLog, InstancePoint
from bench.replay.record import Failure, RequestRecord
from bench.sim.clock import Clock
from bench.sim.fabric import Fabric
from bench.sim.flows import Network
from bench.sim.models import SimModel
from bench.sim.requests import Served
from shared.messages.common import Role
from shared.messages.operations import ScaleRecord
from shared.messages.registry import WorkerHeartbeat
from shared.messages.traffic import Purpose


class RunRecorder:
    """Of one run."""

    def __init__(self, clock: Clock, network: Network, fabric: Fabric, model: SimModel) -> None:
        self._clock = clock
        self._network = network
        self._fabric = fabric
        self._degree = model.degree
        self._log = ClusterLog(model.name, weights_bytes=model.record.weights_bytes)
        self._held: Counter[str] = Counter()
        """GPUs by role and state."""
        self._held_as: dict[str, str] = {}
        """By worker."""
        self.served: list[Served] = []

    def holds(self, worker_id: str) -> bool:
        """Whether the worker has an instance, as the pool knows."""
        return worker_id in self._held_as

    def num_serving(self, role: Role) -> int:
        """Instances."""
        return self._held[f"{role}/serving"] // self._degree

    def report(self, heartbeat: WorkerHeartbeat, host_bytes: int) -> None:
        """A worker says how it is. ``host_bytes``: of all copies in host memory now."""
        instance = heartbeat.instance
        self._count(heartbeat.worker.worker_id, f"{instance.role}/{heartbeat.state}" if instance is not None else None)
        self._host_bytes(host_bytes)

    def gone(self, worker_id: str, host_bytes: int) -> None:
        """The pool forgets a worker."""
        self._count(worker_id, None)
        self._host_bytes(host_bytes)

    def _count(self, worker_id: str, now: str | None) -> None:
        before = self._held_as.pop(worker_id, None)
        if now is not None:
            self._held_as[worker_id] = now
        if before == now:
            return
        if before is not None:
            self._held[before] -= self._degree
        if now is not None:
            self._held[now] += self._degree
        found = {key: count for key, count in sorted(self._held.items()) if count}
        if self._log.instances and self._log.instances[-1].at_s == self._clock.now_s:
            self._log.instances.pop()
        self._log.instances.append(InstancePoint(self._clock.now_s, found))

    def _host_bytes(self, num_bytes: int) -> None:
        if not self._log.host_cache or self._log.host_cache[-1].num_bytes != num_bytes:
            self._log.host_cache.append(BytesPoint(self._clock.now_s, num_bytes))

    # --- all in all --------------------------------------------------------------------------

    def cluster(self, begin_s: float, until_s: float, operations: list[ScaleRecord]) -> Cluster:
        """From then until then; call it at the end. Raises ``RuntimeError`` if there was never an instance."""
        end_s = self._clock.now_s
        self._log.looks_s += [0.0, end_s]
        self._log.saw_operations(operations)
        self._log.carried.append(CarriedPoint(end_s, self._carried(over_nic=True), self._carried(over_nic=False)))
        cluster = self._log.sum_up(begin_s, max(until_s, begin_s + 1e-9), started_at_s=0.0)
        if cluster is None:
            raise RuntimeError("no instance was ever there")
        return replace(cluster, not_observed_s=0.0)

    def records(self) -> tuple[RequestRecord, ...]:
        """In the order of the trace. Times of tokens go as gaps between them come: of long traces, they fill memory."""
        self.served.sort(key=lambda served: served.request.index, reverse=True)
        records = []
        while self.served:
            served = self.served.pop()
            if served.request.index >= 0:
                records.append(_record_of(served))
        return tuple(records)

    def _carried(self, *, over_nic: bool) -> dict[Purpose, int]:
        """What has been sent: over NICs, or within hosts. Reads from disk are neither."""
        nics = {link.out.name for link in self._fabric.nic_links.values()}
        disks = {disk.name for disk in self._fabric.ssds.values()}
        sent: dict[Purpose, int] = dict.fromkeys(get_args(Purpose), 0)
        for (purpose, first), num_bytes in self._network.carried.items():
            if purpose in sent and first.name not in disks and (first.name in nics) is over_nic:
                sent[purpose] += num_bytes
        return sent


def _record_of(served: Served) -> RequestRecord:
    request, failure = served.request, served.failure
    return RequestRecord(
        index=request.index,
        due_s=request.at_s,
        lag_s=0.0,
        input_tokens=request.prompt_tokens,
        output_tokens=len(served.times_s),
        ttft_s=served.ttft_s,
        gaps_s=array("d", np.diff(np.array(served.times_s)).tobytes()),
        e2e_s=served.e2e_s,
        failure=Failure(failure, "") if failure is not None else None,
    )
