"""What the workers' reports say about copies: where complete ones are, and which worker has which host copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.failure_domains import FailureDomain, shared_domain
from shared.messages.registry import HostCopy, ModelRecord, WorkerHeartbeat, WorkerInfo

Key = tuple[str, str]
"""(worker id, model hash): a worker holds at most one host copy of a model."""


def complete_copies(report: WorkerHeartbeat) -> tuple[tuple[str, str, str, bool], ...]:
    """(model hash, copy id, serial, serves) of the report's complete copies. A copy id is unique in the cluster; a host
    copy that was freed or was to go, and is held again, has the same id and another serial. A GPU copy that ``serves``
    is to stay."""
    worker_id, found = report.worker.worker_id, []
    if (held := report.instance) is not None and held.is_source:
        serves = held.state == "serving" and held.copy == "there"
        found.append((held.model_hash, gpu_copy_id(worker_id, held.instance_id), "", serves))
    ready = (c for c in report.host_copies if c.state == "ready")
    found += [(c.model_hash, host_copy_id(worker_id), str(c.serial), False) for c in ready]
    return tuple(found)


def gpu_copy_id(worker_id: str, instance_id: str) -> str:
    return f"{worker_id}/gpu/{instance_id}"


def host_copy_id(worker_id: str) -> str:
    return f"{worker_id}/host"


@dataclass(frozen=True, slots=True)
class Held:
    """A host copy, and the worker that has it."""

    worker: WorkerInfo
    copy: HostCopy

    @property
    def key(self) -> Key:
        return self.worker.worker_id, self.copy.model_hash


@dataclass(slots=True)
class ModelCopies:
    """All copies of one model's weights, by worker id; follows the reports."""

    model_hash: str
    record: ModelRecord | None = None
    """None: not registered. Of several names with the same weights the first: a copy serves every one of them."""
    serving: dict[str, WorkerInfo] = field(default_factory=dict)
    """Those of instances that serve."""
    draining: dict[str, WorkerInfo] = field(default_factory=dict)
    """The same: complete copies, and about to go."""
    without_copy: dict[str, WorkerInfo] = field(default_factory=dict)
    """Instances that serve, and whose weights nobody else can read."""
    coming: set[str] = field(default_factory=set)
    """Workers whose instance has not all weights, or has failed."""
    instances: set[str] = field(default_factory=set)
    """Workers with an instance of it, in any state."""
    instances_at: Counter[str] = field(default_factory=Counter)
    """How many of them are on each host."""
    present: dict[str, Held] = field(default_factory=dict)
    """Every host copy, in any state and of any layout; those of the record's layout that are not retired are also in
    one of the next two."""
    placed: dict[str, Held] = field(default_factory=dict)
    """By the pool; loading or ready."""
    cached: dict[str, Held] = field(default_factory=dict)
    """By the workers themselves; loading or ready."""
    num_ready: int = 0
    """Of ``placed`` and ``cached``."""

    @property
    def num_complete(self) -> int:
        """Complete copies in the memory of GPUs and hosts."""
        return len(self.serving) + len(self.draining) + self.num_ready

    @property
    def all_serving(self) -> Mapping[str, WorkerInfo]:
        """Workers whose instance serves, with a copy or without."""
        return self.serving | self.without_copy

    @property
    def is_unknown(self) -> bool:
        """It is not registered, and no worker has it."""
        return self.record is None and not (self.instances or self.present)

    def domain_of(self, worker: WorkerInfo) -> FailureDomain:
        """What a copy on the worker has, or would have, in common with all instances that serve: the lower, the
        better a place it is."""
        return shared_domain(worker, self.all_serving.values())

    def put_instance(self, worker: WorkerInfo) -> None:
        """A worker has an instance of it."""
        if worker.worker_id not in self.instances:
            self.instances.add(worker.worker_id)
            self.instances_at[worker.host] += 1

    def take_out_instance(self, worker: WorkerInfo) -> None:
        """A worker no longer has one."""
        if worker.worker_id in self.instances:
            self.instances.discard(worker.worker_id)
            self.instances_at[worker.host] -= 1
            if not self.instances_at[worker.host]:
                del self.instances_at[worker.host]

    def register(self, record: ModelRecord | None) -> None:
        """It is registered with that record now, or (None) no longer registered."""
        self.record = record
        for held in list(self.present.values()):
            self.put(held)

    def put(self, held: Held) -> None:
        """A host copy is there, in place of what the same worker had of this model."""
        self.take_out(held.worker.worker_id)
        worker_id, copy = held.worker.worker_id, held.copy
        self.present[worker_id] = held
        if self.record is None or copy.layout_hash != self.record.layout_hash or copy.state == "retired":
            return
        (self.cached if copy.cached else self.placed)[worker_id] = held
        self.num_ready += copy.state == "ready"

    def take_out(self, worker_id: str) -> None:
        """The worker no longer has a host copy of this model."""
        self.present.pop(worker_id, None)
        held = self.placed.pop(worker_id, None) or self.cached.pop(worker_id, None)
        self.num_ready -= held is not None and held.copy.state == "ready"
