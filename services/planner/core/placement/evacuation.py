"""Which instances of workers that are to be free go now, and which wait for others to take their place. Pure.

Such an instance does not count any more: whatever the load, a minimum or a floor asks for is loaded elsewhere, as if it
were gone. It goes once enough others serve: those that limits and floors keep, and one at least while it has requests.
Its requests move to those (``migration``). Where nothing can take its place, it stays, and serves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from shared.messages.common import TAKES_PROMPTS, Role
from shared.messages.registry import ModelRecord, WorkerRecord
from shared.registry_view import RegistryView, bounded, counted_as

About = tuple[str, Role]


@dataclass(frozen=True, slots=True)
class Evacuation:
    """Instances of one model and role that go."""

    model: ModelRecord
    role: Role
    leave: tuple[WorkerRecord, ...]
    stay: int
    """Instances of the model and role that serve on."""


def evacuations(view: RegistryView, leaving: Collection[str], at_work: Callable[[str], bool]) -> tuple[Evacuation, ...]:
    """What goes now. ``leaving``: instance ids that were told to drain already."""
    waiting: dict[About, list[WorkerRecord]] = {}
    for record in view.workers:
        instance = record.instance
        if not record.cordoned or record.stopping or instance is None or record.state != "serving":
            continue
        if instance.instance_id not in leaving:
            waiting.setdefault((instance.model, instance.role), []).append(record)
    if not waiting:
        return ()
    serving: dict[About, int] = {}
    for record in view.workers:
        about = counted_as(record, view.models)
        if about is not None and record.state == "serving" and _id(record) not in leaving:
            serving[about] = serving.get(about, 0) + 1
    found = []
    for (name, role), records in sorted(waiting.items()):
        model, stay = view.models.get(name), serving.get((name, role), 0)
        if model is None:
            continue  # it was removed: its instances drain
        least = bounded(0, model, view.floors.get((name, role)), role)
        leave = tuple(r for r in records if stay >= max(least, _needed(r, serving, at_work)))
        if leave:
            found.append(Evacuation(model, role, leave, stay))
    return tuple(found)


def _needed(record: WorkerRecord, serving: dict[About, int], at_work: Callable[[str], bool]) -> int:
    """How many others have to serve at least, whatever limits and floors say: one that can take its place, as long as
    it has requests."""
    instance = record.instance
    if instance is None or not at_work(instance.instance_id):
        return 0
    takes_prompts = instance.role in TAKES_PROMPTS
    replaced = any(serving.get((instance.model, role), 0) for role in TAKES_PROMPTS) if takes_prompts else False
    return 0 if replaced else 1


def _id(record: WorkerRecord) -> str:
    return record.instance.instance_id if record.instance is not None else ""
