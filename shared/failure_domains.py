"""What one failure takes at a time: a worker's process, or a host with all of its workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from shared.messages.registry import WorkerInfo


class FailureDomain(IntEnum):
    """What two things have in common that can fail: the lower, the safer."""

    NONE = 0
    HOST = 1
    WORKER = 2


def shared_domain(worker: WorkerInfo, others: Iterable[WorkerInfo]) -> FailureDomain:
    """The smallest domain whose failure takes the worker and all of ``others``: ``NONE`` if one of these is elsewhere,
    or there are none."""
    found = FailureDomain.NONE
    for other in others:
        if other.host != worker.host:
            return FailureDomain.NONE
        if other.worker_id != worker.worker_id:
            found = FailureDomain.HOST
        elif found is FailureDomain.NONE:
            found = FailureDomain.WORKER
    return found
