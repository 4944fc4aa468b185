"""Builders of host copies and of reports that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from shared.messages.common import InstanceState
from shared.messages.registry import HostCopy, ModelRecord, WorkerHeartbeat
from tests.records import instance, worker

State = Literal["loading", "ready", "retired"]


def copy_of(record: ModelRecord, state: State = "ready", *, cached: bool = False, serial: int = 1) -> HostCopy:
    """A host copy as its worker reports it."""
    return HostCopy(
        model=record.name,
        model_hash=record.model_hash,
        layout_hash=record.layout_hash,
        num_bytes=record.weights_bytes,
        state=state,
        cached=cached,
        serial=serial,
    )


def holding(
    worker_id: str,
    copies: Iterable[HostCopy] = (),
    *,
    serves: ModelRecord | None = None,
    state: InstanceState = "serving",
    host: str = "",
    capacity: int = 1000,
    sequence: int = 1,
    leaving: bool = False,
) -> WorkerHeartbeat:
    """The report of a worker on a host of its own (``host-`` and its id) that offers ``capacity`` bytes."""
    return WorkerHeartbeat(
        worker=worker(worker_id, host=host or f"host-{worker_id}", host_cache_bytes=capacity),
        state=state if serves is not None else "spare",
        instance=instance(serves, worker_id, state) if serves is not None else None,
        sequence=sequence,
        leaving=leaving,
        host_copies=tuple(copies),
    )
