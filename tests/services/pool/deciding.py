"""One whole look at a cluster that was just learnt, without bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Key
from services.pool.core.loads import LoadLimits
from services.pool.core.placement import Placer
from services.pool.core.steps import PlacementDecision
from shared.messages.registry import ModelRecord, WorkerHeartbeat

ANY_NUMBER = LoadLimits(total=1_000_000, per_host=1_000_000, per_nic=1_000_000)
LATE_S = 1e6
"""By now every copy that loads is overdue, if it was seen at zero."""


@dataclass(frozen=True)
class Outstanding:
    """What earlier decisions led to, as far as the reports do not show it yet."""

    holds: Mapping[Key, int] = field(default_factory=dict)
    drops: Collection[Key] = frozenset()
    avoided: Collection[Key] = frozenset()
    given_up: Collection[Key] = frozenset()
    overdue: bool = False
    """All copies that load."""
    leaving: Collection[str] = frozenset()


def cluster_of(
    models: Sequence[ModelRecord],
    reports: Sequence[WorkerHeartbeat],
    *,
    removed: Collection[str] = (),
    outstanding: Outstanding | None = None,
    limits: LoadLimits = ANY_NUMBER,
) -> ClusterView:
    """A cluster that was told all this."""
    cluster, out = ClusterView(removed, limits), outstanding or Outstanding()
    for record in models:
        cluster.copies.put_model(record)
    for report in reports:
        cluster.put_report(report, 0.0 if out.overdue else LATE_S)
    cluster.outstanding.expire(LATE_S)
    for key, num_bytes in out.holds.items():
        cluster.outstanding.hold_sent(key, num_bytes, LATE_S)
    for key in out.drops:
        cluster.outstanding.drop_sent(key, LATE_S)
    for key in out.avoided:
        cluster.outstanding.hold_failed(key, LATE_S)
    for key in out.given_up:
        cluster.outstanding.give_up(key, LATE_S)
    for worker_id in out.leaving:
        report = next(r for r in reports if r.worker.worker_id == worker_id)
        cluster.outstanding.leaves(worker_id, report.worker.incarnation, LATE_S)
    return cluster


def place(
    models: Sequence[ModelRecord],
    reports: Sequence[WorkerHeartbeat],
    *,
    removed: Collection[str] = (),
    outstanding: Outstanding | None = None,
    limits: LoadLimits = ANY_NUMBER,
) -> PlacementDecision:
    """The next steps."""
    cluster = cluster_of(models, reports, removed=removed, outstanding=outstanding, limits=limits)
    return Placer(cluster).look(LATE_S, visits=1_000_000_000)


def hopeless(
    models: Sequence[ModelRecord], reports: Sequence[WorkerHeartbeat], outstanding: Outstanding
) -> frozenset[str]:
    """Hashes of the models that no worker can hold as things are, not even once room is made."""
    placer = Placer(cluster_of(models, reports, outstanding=outstanding))
    return frozenset(m.model_hash for m in models if not placer.could_take(m.model_hash))
