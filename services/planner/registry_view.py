"""The pool's state as the planner reads it: one whole snapshot, paged in."""

from __future__ import annotations

from dataclasses import dataclass

from shared import subjects
from shared.bus.base import Bus
from shared.messages.common import Role
from shared.messages.registry import Floor, GetSnapshot, ModelRecord, Snapshot, WorkerRecord


@dataclass(frozen=True, slots=True)
class RegistryView:
    """Models by name, workers in the order of ids, floors by model and role."""

    models: dict[str, ModelRecord]
    workers: tuple[WorkerRecord, ...]
    floors: dict[tuple[str, Role], Floor]


async def read_registry(bus: Bus, *, timeout_s: float) -> RegistryView:
    """A fresh view. Raises what ``Bus.request`` raises."""
    workers: list[WorkerRecord] = []
    after = ""
    while True:
        request = GetSnapshot(after_worker_id=after)
        page = await bus.request(subjects.pool("snapshot"), request, Snapshot, timeout_s=timeout_s)
        workers.extend(page.workers)
        after = page.next_worker_id
        if not after:
            floors = {(f.model, f.role): f for f in page.floors}
            return RegistryView({m.name: m for m in page.models}, tuple(workers), floors)
