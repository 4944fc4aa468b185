"""A living worker as the registry knows it: its newest report, the plan that it was promised to, its record and route.

Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.messages.common import Role
from shared.messages.registry import ModelRoute, WorkerHeartbeat, WorkerRecord

NIC_STEP = 0.02
"""A share of the NIC's bandwidth: a smaller change of traffic does not count as one."""
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker promised to a plan that it has not reported on yet."""

    worker_id: str
    plan_id: str
    model: str
    role: Role
    epoch: int
    until_s: float


@dataclass(slots=True)
class WorkerEntry:
    """A living worker."""

    report: WorkerHeartbeat
    record: WorkerRecord
    num_bytes: int
    """Of the record on the wire."""
    until_s: float
    stored: bool = False
    """Redis holds what this report says."""
    route: ModelRoute | None = None


def num_bytes_of(record: WorkerRecord) -> int:
    """On the wire."""
    return len(_encoder.encode(record))


def durable(report: WorkerHeartbeat) -> tuple[object, ...]:
    """What Redis keeps of a report, which is everything but the traffic at that moment."""
    return report.worker, report.state, report.instance, report.host_copies, report.stopping


def record_of(
    report: WorkerHeartbeat, lease: Lease | None, before: WorkerRecord | None, *, cordoned: bool = False
) -> WorkerRecord:
    egress, ingress = report.nic_egress_gbps, report.nic_ingress_gbps
    if before is not None:
        step = NIC_STEP * report.worker.nic_gbps
        changes = abs(before.nic_egress_gbps - egress), abs(before.nic_ingress_gbps - ingress)
        if max(changes) < step:
            egress, ingress = before.nic_egress_gbps, before.nic_ingress_gbps
    return WorkerRecord(
        worker=report.worker,
        state=report.state,
        instance=report.instance,
        lease_plan_id=lease.plan_id if lease else "",
        lease_model=lease.model if lease else "",
        lease_role=lease.role if lease else "colocated",
        host_copies=report.host_copies,
        nic_egress_gbps=egress,
        nic_ingress_gbps=ingress,
        stopping=report.stopping,
        clock_ahead_s=report.clock_ahead_s,
        cordoned=cordoned,
        warm=report.warm,
    )


def model_of(entry: WorkerEntry | None) -> str | None:
    instance = entry.report.instance if entry is not None else None
    return instance.model if instance is not None else None
