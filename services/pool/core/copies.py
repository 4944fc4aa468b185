"""What the workers' reports say about copies: where complete ones are, and which host copies belong to whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shared.messages.registry import HostCopy, InstanceInfo, ModelRecord, WorkerHeartbeat, WorkerInfo

Key = tuple[str, str]
"""(worker id, model hash): a worker holds at most one host copy of a model."""


def instance_is_complete(instance: InstanceInfo) -> bool:
    """Whether an instance holds every layer."""
    return instance.state == "serving" or (instance.state == "draining" and instance.weights_digest != "")


def complete_copies(report: WorkerHeartbeat) -> tuple[tuple[str, str, str, bool], ...]:
    """(model hash, copy id, serial, serves) of the report's complete copies. A copy id is unique in the cluster; a host
    copy that was freed or was to go, and is held again, has the same id and another serial. A GPU copy that ``serves``
    does not want to go."""
    worker_id, found = report.worker.worker_id, []
    if (held := report.instance) is not None and instance_is_complete(held):
        serves = held.state == "serving"
        found.append((held.model_hash, gpu_copy_id(worker_id, held.instance_id), "", serves))
    ready = (c for c in report.host_copies if c.state == "ready")
    found += [(c.model_hash, host_copy_id(worker_id), str(c.serial), False) for c in ready]
    return tuple(found)


def gpu_copy_id(worker_id: str, instance_id: str) -> str:
    return f"{worker_id}/gpu/{instance_id}"


def host_copy_id(worker_id: str) -> str:
    return f"{worker_id}/host"


def by_hash(models: Sequence[ModelRecord]) -> dict[str, ModelRecord]:
    """The models by their hash, in the order of names. Of several names with the same weights the first stands for
    all: a copy serves every one of them."""
    found: dict[str, ModelRecord] = {}
    for record in sorted(models, key=lambda m: m.name):
        found.setdefault(record.model_hash, record)
    return found


def unknown_hashes(
    report: WorkerHeartbeat, names: Mapping[str, ModelRecord | None], removed: Collection[str]
) -> tuple[str, ...]:
    """Hashes of the report's host copies whose models the registry lost (rather than removed, or replaced).
    ``names``: what is registered under the copies' names."""
    return tuple(
        sorted({c.model_hash for c in report.host_copies if names.get(c.model) is None and c.model not in removed})
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A host copy, and who has it."""

    worker: WorkerInfo
    copy: HostCopy

    @property
    def key(self) -> Key:
        return self.worker.worker_id, self.copy.model_hash


@dataclass(frozen=True, slots=True)
class ModelCopies:
    """All copies of one registered model, in the order of worker ids."""

    record: ModelRecord
    serving: list[WorkerInfo] = field(default_factory=list)
    draining: list[WorkerInfo] = field(default_factory=list)
    """Complete, and about to go."""
    placed: list[Held] = field(default_factory=list)
    """By the pool; loading or ready."""
    cached: list[Held] = field(default_factory=list)
    """By the workers themselves; loading or ready."""

    @property
    def num_complete(self) -> int:
        """Complete copies in the memory of GPUs and hosts."""
        return len(self.serving) + len(self.draining) + sum(h.copy.state == "ready" for h in self.placed + self.cached)


def copies_by_hash(
    models: Sequence[ModelRecord], reports: Sequence[WorkerHeartbeat], *, leaving: Collection[str] = ()
) -> dict[str, ModelCopies]:
    """Every registered model with its copies (retired ones do not count), by hash, in the order of names.

    ``leaving``: workers that stop; what they serve drains, whatever their reports say yet.
    """
    found = {model_hash: ModelCopies(record) for model_hash, record in by_hash(models).items()}
    for report in sorted(reports, key=lambda r: r.worker.worker_id):
        instance = report.instance
        if instance is not None and (mine := found.get(instance.model_hash)) is not None:
            if instance.state == "serving" and report.worker.worker_id not in leaving:
                mine.serving.append(report.worker)
            elif instance_is_complete(instance):
                mine.draining.append(report.worker)
        for copy in report.host_copies:
            mine = found.get(copy.model_hash)
            if mine is None or copy.layout_hash != mine.record.layout_hash or copy.state == "retired":
                continue
            (mine.cached if copy.cached else mine.placed).append(Held(report.worker, copy))
    return found
