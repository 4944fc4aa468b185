"""Tells instances that go where their running requests may continue, by the registry and the load that was reported
last."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.planner.core.fleet.migration import Destinations, Goes, Stays
from services.planner.core.live.load import LoadView
from services.planner.core.operations.operations import Operations
from shared.errors import NotFound
from shared.messages.registry import InstanceInfo, ModelRecord, WorkerRecord
from shared.messages.scaling import Destination, DrainTarget, SendBack
from shared.messages.scaling import Destinations as DestinationsMessage
from shared.registry_view import RegistryView


class Migrations:
    """Event loop only."""

    def __init__(self, operations: Operations, load: LoadView, *, enabled: bool) -> None:
        """``enabled``: without it, instances that go finish their requests themselves."""
        self._operations = operations
        self._load = load
        self._enabled = enabled

    def drains(
        self, model: ModelRecord, records: Iterable[WorkerRecord], workers: Iterable[WorkerRecord], *, at_once: bool
    ) -> tuple[DrainTarget, ...]:
        """For instances that drain together. ``workers``: all that have an instance of the model. ``at_once``: their
        workers are taken for another model that has none."""
        going = [(record.worker.worker_id, record.instance) for record in records if record.instance is not None]
        gone = {instance.instance_id for _, instance in going}
        destinations = Destinations(self._staying(model, workers, gone))
        targets = []
        for worker_id, instance in going:
            named, send_back = self._moves(instance, destinations, at_once=at_once)
            targets.append(
                DrainTarget(
                    worker_id=worker_id, instance_id=instance.instance_id, destinations=named, send_back=send_back
                )
            )
        return tuple(targets)

    def of(self, instance_id: str, view: RegistryView) -> DestinationsMessage:
        """For an instance whose worker is being stopped. Raises ``NotFound`` for one that is not there."""
        holder = next((w for w in view.workers if w.instance and w.instance.instance_id == instance_id), None)
        instance = holder.instance if holder is not None else None
        model = view.models.get(instance.model) if instance is not None else None
        if instance is None or model is None:
            raise NotFound(f"instance {instance_id!r} is not registered", param="instance_id")
        staying = Destinations(self._staying(model, view.workers, {instance_id}))
        named, send_back = self._moves(instance, staying, at_once=False)
        return DestinationsMessage(destinations=named, send_back=send_back)

    def _moves(
        self, instance: InstanceInfo, destinations: Destinations, *, at_once: bool
    ) -> tuple[tuple[Destination, ...], SendBack]:
        if not self._enabled:
            return (), "none"
        used = self._load.used_kv_tokens(instance.instance_id)
        goes = Goes(instance.instance_id, instance.role, used, instance.context_tokens)
        return destinations.of(goes), destinations.send_back(goes, at_once=at_once)

    def _staying(self, model: ModelRecord, workers: Iterable[WorkerRecord], gone: Collection[str]) -> Iterable[Stays]:
        """Instances of these very weights that serve and are not to go."""
        leaving = self._operations.instances_to_drain()
        for record in workers:
            instance = record.instance
            if instance is None or record.state != "serving" or record.leaves:
                continue
            if (instance.model, instance.model_hash) != (model.name, model.model_hash):
                continue
            if instance.instance_id in gone or instance.instance_id in leaving:
                continue
            yield Stays(
                record.worker.worker_id,
                instance.instance_id,
                instance.role,
                self._load.free_kv_tokens(instance.instance_id),
                instance.max_running_requests - self._load.running_requests(instance.instance_id),
                instance.context_tokens,
            )
