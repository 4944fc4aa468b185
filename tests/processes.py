"""Names of processes that tests make up."""

from __future__ import annotations

from shared.subjects import Process

INCARNATION = "1"


def process(worker_id: str) -> Process:
    """The one start of that worker or gateway."""
    return Process(worker_id, INCARNATION)
