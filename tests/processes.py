"""Names of processes that tests make up."""

from __future__ import annotations

from shared.messages.common import AtWorker
from shared.subjects import Process

INCARNATION = "1"


def at(*worker_ids: str) -> tuple[AtWorker, ...]:
    """The one start of each of these workers, as messages name them."""
    return tuple([AtWorker(worker_id=worker_id, incarnation=INCARNATION) for worker_id in worker_ids])


def process(worker_id: str) -> Process:
    """The one start of that worker or gateway."""
    return Process(worker_id, INCARNATION)
