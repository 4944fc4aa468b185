"""What was seen of a BlitzScale cluster during a replay, and what that adds up to. Pure.

Times are seconds from the start of the replay. Between two looks, what the earlier one saw counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

from shared.messages.admin import PoolStatus, Status, TrafficStatus
from shared.messages.common import Role
from shared.messages.operations import ScaleRecord
from shared.messages.traffic import Purpose, Way

Instances = dict[str, int]
"""GPUs that hold an instance, by ``role/state``."""
MAX_SILENCE_S = 2.0
"""Longer between two looks, and the time between them counts as not observed."""


@dataclass(frozen=True, slots=True)
class InstancePoint:
    """From then on."""

    at_s: float
    instances: Instances


@dataclass(frozen=True, slots=True)
class BytesPoint:
    """As of then."""

    at_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CarriedPoint:
    """Sent since the first look, by purpose."""

    at_s: float
    network: dict[Purpose, int]
    host: dict[Purpose, int]
    """Between processes of one host, past the NIC."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A scale operation that began during the replay."""

    at_s: float
    plan_id: str
    direction: str
    role: Role
    desired: int
    reason: str
    status: str
    trigger_to_serving_ms: float | None
    num_bytes: int
    """Of weights, received by all targets."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster's side of a replay, of the replayed model."""

    begin_s: float
    """The first arrival."""
    end_s: float
    """GPU seconds are counted from the first arrival to here."""
    gpu_seconds: float
    gpu_seconds_by_role: dict[str, float]
    peak_gpus: int
    weights_bytes: int
    """Of one copy of the model."""
    host_cache_max_bytes: int | None
    """In the memory of all hosts, of all models. None: not told."""
    nic_bytes: dict[Purpose, int] | None
    """Sent over the network, by all workers. None: the workers do not count."""
    not_observed_s: float
    """Time in which nothing answered."""
    instances: tuple[InstancePoint, ...]
    """At every change."""
    host_cache: tuple[BytesPoint, ...]
    """At every change."""
    carried: tuple[CarriedPoint, ...]
    operations: tuple[Operation, ...]


def gpu_seconds_by_role(points: Sequence[InstancePoint], begin_s: float, end_s: float) -> dict[str, float]:
    """Of GPUs that held an instance in that time, in whatever state."""
    by_role: defaultdict[str, float] = defaultdict(float)
    for point, next_s in zip(points, [*(p.at_s for p in points[1:]), end_s], strict=True):
        held_s = max(0.0, min(next_s, end_s) - max(point.at_s, begin_s))
        for key, count in point.instances.items():
            by_role[key.partition("/")[0]] += count * held_s
    return by_role


@dataclass(slots=True)
class ClusterLog:
    """Grows while a replay runs."""

    model: str
    weights_bytes: int = 0
    looks_s: list[float] = field(default_factory=list)
    instances: list[InstancePoint] = field(default_factory=list)
    host_cache: list[BytesPoint] = field(default_factory=list)
    carried: list[CarriedPoint] = field(default_factory=list)
    _counters: dict[tuple[str, str, Purpose, Way], int] = field(default_factory=dict)
    """Of each process of a worker, the newest."""
    _first: Counter[tuple[Purpose, Way]] | None = None
    _operations: dict[str, ScaleRecord] = field(default_factory=dict)

    def saw_status(self, at_s: float, status: Status) -> None:
        """``/admin/status``."""
        self.looks_s.append(at_s)
        counts: Counter[str] = Counter()
        for instance in status.instances:
            if instance.model == self.model:
                counts[f"{instance.role}/{instance.state}"] += len(instance.workers)
        found = dict(sorted(counts.items()))
        if not self.instances or self.instances[-1].instances != found:
            self.instances.append(InstancePoint(at_s, found))
        for model in status.models:
            if model.name == self.model:
                self.weights_bytes = model.weights_bytes

    def saw_pool(self, at_s: float, pool: PoolStatus) -> None:
        """``/admin/pool``."""
        num_bytes = pool.totals.host_bytes
        if not self.host_cache or self.host_cache[-1].num_bytes != num_bytes:
            self.host_cache.append(BytesPoint(at_s, num_bytes))

    def saw_traffic(self, at_s: float, traffic: TrafficStatus) -> None:
        """``/admin/traffic``. What the workers carried before the first look does not count; a process that comes later
        begins with 0."""
        if not traffic.workers and not self.carried:
            return
        for worker in traffic.workers:
            for row in worker.carried:
                if row.direction == "sent":
                    self._counters[worker.worker_id, worker.incarnation, row.purpose, row.way] = row.num_bytes
        total: Counter[tuple[Purpose, Way]] = Counter()
        for (_, _, purpose, way), num_bytes in self._counters.items():
            total[purpose, way] += num_bytes
        if self._first is None:
            self._first = total
        since = total - self._first
        network, host = ({purpose: since[purpose, way] for purpose in get_args(Purpose)} for way in get_args(Way))
        self.carried.append(CarriedPoint(at_s, network, host))

    def saw_operations(self, records: Iterable[ScaleRecord]) -> None:
        """``/admin/scale``: again and again, as only the newest are told."""
        self._operations.update((r.plan_id, r) for r in records if r.model == self.model and not r.advice)

    def sum_up(self, begin_s: float, end_s: float, *, started_at_s: float) -> Cluster | None:
        """The figures from the first arrival to ``end_s``; None if nothing was seen. ``started_at_s``: Unix time at
        the start of the replay."""
        if not self.instances:
            return None
        looks_s = [*self.looks_s, max(end_s, self.looks_s[-1])]
        end_s = max(begin_s, min(end_s, self.looks_s[-1]))
        by_role = gpu_seconds_by_role(self.instances, begin_s, end_s)
        return Cluster(
            begin_s=begin_s,
            end_s=end_s,
            gpu_seconds=sum(by_role.values()),
            gpu_seconds_by_role=dict(sorted(by_role.items())),
            peak_gpus=max(sum(point.instances.values()) for point in self.instances),
            weights_bytes=self.weights_bytes,
            host_cache_max_bytes=max((point.num_bytes for point in self.host_cache), default=None),
            nic_bytes=self.carried[-1].network if self.carried else None,
            not_observed_s=sum(b - a for a, b in pairwise(looks_s) if b - a > MAX_SILENCE_S),
            instances=tuple(self.instances),
            host_cache=tuple(self.host_cache),
            carried=tuple(self.carried),
            operations=self._during(started_at_s),
        )

    def _during(self, started_at_s: float) -> tuple[Operation, ...]:
        records: Sequence[ScaleRecord] = sorted(self._operations.values(), key=lambda record: record.triggered_at_s)
        return tuple(
            Operation(
                at_s=record.triggered_at_s - started_at_s,
                plan_id=record.plan_id,
                direction=record.direction,
                role=record.role,
                desired=record.desired,
                reason=record.reason,
                status=record.status,
                trigger_to_serving_ms=record.trigger_to_serving_ms,
                num_bytes=record.bytes,
            )
            for record in records
            if record.triggered_at_s >= started_at_s
        )
