"""The registry at one moment, as ``shared.registry`` reads it, and what follows from its records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.messages.common import SERVED_BY, InstanceState, Role
from shared.messages.registry import Floor, ModelRecord, Route, Unplaced, WorkerHeartbeat, WorkerRecord

ROUTABLE: frozenset[InstanceState] = frozenset({"live", "serving", "draining"})
"""States in which an instance may hold requests. Only ``serving`` takes new ones: ``live`` works for the instance that
it cooperates with, ``draining`` finishes what it has."""
COUNTED: frozenset[InstanceState] = frozenset({"loading", "live", "serving"})
"""States that count towards the wanted number of instances: what serves or is on its way to."""


@dataclass(frozen=True, slots=True)
class RegistryView:
    """The registry at one moment: models by name, workers in the order of ids, floors by model and role."""

    models: Mapping[str, ModelRecord]
    workers: tuple[WorkerRecord, ...]
    floors: Mapping[tuple[str, Role], Floor]
    unplaced: tuple[Unplaced, ...] = ()
    publisher: str = ""
    """With ``routes_sequence``: the last ``RouteChanges`` that this view includes."""
    routes_sequence: int = 0


def route_of(worker: WorkerRecord | WorkerHeartbeat, model: ModelRecord | None) -> Route | None:
    """The route to a worker's instance. None if it has none, it is not up yet, or it is of other weights than those
    that are registered under its model's name (``model``; None: nothing is)."""
    instance = worker.instance
    if instance is None or worker.state not in ROUTABLE:
        return None
    if model is None or model.model_hash != instance.model_hash:
        return None
    return Route(
        instance_id=instance.instance_id,
        worker_id=worker.worker.worker_id,
        incarnation=worker.worker.incarnation,
        state=worker.state,
        role=instance.role,
        max_running_requests=instance.max_running_requests,
        max_queued_tokens=instance.max_queued_tokens,
        context_tokens=instance.context_tokens,
        epoch=instance.epoch,
        stopping=worker.stopping,
    )


def counted_as(worker: WorkerRecord, models: Mapping[str, ModelRecord]) -> tuple[str, Role] | None:
    """The model and role towards whose number of instances a worker counts: its instance serves or is on its way to,
    and stays; or the worker was leased for one, and has not reported it yet.

    None if it counts nowhere. Instances of other weights than those registered under the name (``models``) do not.
    """
    instance = worker.instance
    if worker.leaves:
        return None
    if instance is None:
        return (worker.lease_model, worker.lease_role) if worker.lease_model in models else None
    model = models.get(instance.model)
    if worker.state not in COUNTED or model is None or model.model_hash != instance.model_hash:
        return None
    return model.name, instance.role


def bounded(desired: int, model: ModelRecord, floor: Floor | None, role: Role = "colocated") -> int:
    """The wanted number within the model's limits, and not below the role's manual floor.

    ``min_instances`` is of each role that the model is served by. ``max_instances`` is of all roles together: what
    others have has to be taken off by who knows it.
    """
    low = max(model.min_instances if role in SERVED_BY[model.serving] else 0, floor.instances if floor else 0)
    return min(max(desired, low), model.max_instances)
