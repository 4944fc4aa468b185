"""Where running requests of instances may continue, by the registry and the load that was reported last: those of
instances that go, and those that make room for a prompt that waits for KV."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from services.planner.core.live.load import LoadView
from services.planner.core.operations.operations import Operations
from services.planner.core.placement.defragmentation import LACKS_S, REST_S, Relief, Serves, relief
from services.planner.core.placement.migration import DestinationPicker, Goes, Stays
from services.planner.core.rounds.moment import Moment
from shared.engines import traits_of
from shared.errors import NotFound
from shared.messages.common import MAX_COUNT
from shared.messages.destinations import Destination, Destinations, SendBack
from shared.messages.load import LoadReport
from shared.messages.plans import DrainTarget, MigratePlan
from shared.messages.registry import InstanceInfo, ModelRecord, WorkerRecord
from shared.registry_view import RegistryView
from shared.subjects import Process


class Migrations:
    """Remembers whose requests moved lately, and to whom."""

    def __init__(
        self,
        operations: Operations,
        load: LoadView,
        advises: Callable[[ModelRecord], bool],
        new_id: Callable[[str], str],
        *,
        enabled: bool,
    ) -> None:
        """``enabled``: without it, requests end where they are. ``advises``: whether a model is left alone.
        ``new_id``: of a kind."""
        self._new_id = new_id
        self._operations = operations
        self._load = load
        self._advises = advises
        self._enabled = enabled
        self._relieved: dict[str, float] = {}
        """When instances (ids) were last told to make room, by the monotonic clock; the next: to which."""
        self._taken: dict[str, float] = {}

    # --- instances that go ---------------------------------------------------------------------

    def drains(
        self, model: ModelRecord, records: Iterable[WorkerRecord], workers: Iterable[WorkerRecord], *, at_once: bool
    ) -> tuple[DrainTarget, ...]:
        """For instances that drain together. ``workers``: all that have an instance of the model. ``at_once``: their
        workers are taken for another model that has none."""
        going = [(record.worker, record.instance) for record in records if record.instance is not None]
        gone = {instance.instance_id for _, instance in going}
        destinations = DestinationPicker(self._stays(*serving) for serving in self._serving(model, workers, gone))
        targets = []
        for worker, instance in going:
            named, send_back = self._to_leave(model, instance, destinations, at_once=at_once)
            targets.append(
                DrainTarget(
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    instance_id=instance.instance_id,
                    destinations=named,
                    send_back=send_back,
                )
            )
        return tuple(targets)

    def of(self, instance_id: str, view: RegistryView) -> Destinations:
        """For an instance whose worker is being stopped. Raises ``NotFound`` for one that is not there."""
        holder = next((w for w in view.workers if w.instance and w.instance.instance_id == instance_id), None)
        instance = holder.instance if holder is not None else None
        model = view.models.get(instance.model) if instance is not None else None
        if instance is None or model is None:
            raise NotFound(f"instance {instance_id!r} is not registered", param="instance_id")
        staying = DestinationPicker(
            self._stays(*serving) for serving in self._serving(model, view.workers, {instance_id})
        )
        named, send_back = self._to_leave(model, instance, staying, at_once=False)
        return Destinations(destinations=named, send_back=send_back)

    def _to_leave(
        self, model: ModelRecord, instance: InstanceInfo, destinations: DestinationPicker, *, at_once: bool
    ) -> tuple[tuple[Destination, ...], SendBack]:
        if not self._enabled:
            return (), "none"
        used = self._load.used_kv_tokens(instance.instance_id)
        goes = Goes(instance.instance_id, instance.role, used, instance.context_tokens)
        if not traits_of(model.engine).moves_kv:
            return (), destinations.send_all_back(goes, at_once=at_once)
        return destinations.of(goes), destinations.send_back(goes, at_once=at_once)

    def _stays(self, worker: Process, instance: InstanceInfo) -> Stays:
        return Stays(
            worker,
            instance.instance_id,
            instance.role,
            self._load.free_kv_tokens(instance.instance_id),
            instance.max_running_requests - self._load.running_requests(instance.instance_id),
            instance.context_tokens,
        )

    # --- prompts that wait for KV --------------------------------------------------------------

    def lacking(self, now_s: float) -> dict[str, float]:
        """Instances (ids) that others might help, and for how many seconds a request has waited for KV there.
        ``now_s``: monotonic."""
        if not self._enabled:
            return {}
        return {i: seconds for i, seconds in self._load.lacking(now_s).items() if seconds >= LACKS_S}

    def make_room(self, view: RegistryView, moment: Moment, term: int) -> list[MigratePlan]:
        """Whose requests are to move: at most one move per model, to be asked once a second."""
        now_s = moment.monotonic_s
        lacking = self.lacking(now_s)
        if not lacking:
            return []
        self._relieved = {i: at_s for i, at_s in self._relieved.items() if now_s - at_s < REST_S}
        self._taken = {i: at_s for i, at_s in self._taken.items() if now_s - at_s < REST_S}
        workers: dict[str, list[WorkerRecord]] = {}
        for record in view.workers:
            if record.instance is not None:
                workers.setdefault(record.instance.model, []).append(record)
        in_pairs = self._operations.instances_in_pairs()
        plans = []
        for name, records in sorted(workers.items()):
            model = view.models.get(name)
            if model is None or self._advises(model) or not traits_of(model.engine).moves_kv:
                continue
            if any(record.instance is not None and record.instance.instance_id in lacking for record in records):
                serving = [
                    _serves(worker, instance, report, lacking.get(instance.instance_id, 0.0))
                    for worker, instance in self._serving(model, records, in_pairs)
                    if (report := self._load.latest(instance.instance_id)) is not None
                ]
                bytes_per_token = model.basics.kv_bytes_per_token
                found = relief(serving, bytes_per_token, relieved=self._relieved, taken=self._taken)
                if found is not None:
                    plans.append(self._move(name, found, moment, term))
        return plans

    def _move(self, model: str, found: Relief, moment: Moment, term: int) -> MigratePlan:
        self._relieved[found.source.instance_id] = moment.monotonic_s
        self._taken |= {destination.instance_id: moment.monotonic_s for destination in found.destinations}
        return MigratePlan(
            plan_id=self._new_id("move"),
            model=model,
            worker_id=found.source.worker.id,
            incarnation=found.source.worker.incarnation,
            instance_id=found.source.instance_id,
            destinations=found.destinations,
            valid_s=REST_S,
            reason=found.why,
            term=term,
            for_head=True,
        )

    # --- who serves on -------------------------------------------------------------------------

    def _serving(
        self, model: ModelRecord, workers: Iterable[WorkerRecord], others: Collection[str]
    ) -> Iterable[tuple[Process, InstanceInfo]]:
        """Instances of these very weights that serve and are not to go, with their workers, but for ``others``."""
        leaving = self._operations.instances_to_drain()
        for record in workers:
            instance = record.instance
            if instance is None or record.state != "serving" or record.leaves:
                continue
            if (instance.model, instance.model_hash) != (model.name, model.model_hash):
                continue
            if instance.instance_id not in others and instance.instance_id not in leaving:
                yield record.worker.process, instance


def _serves(worker: Process, instance: InstanceInfo, report: LoadReport, lacked_s: float) -> Serves:
    block_tokens = report.kv_block_tokens
    return Serves(
        worker,
        instance.instance_id,
        instance.role,
        instance.context_tokens,
        free_slots=instance.max_running_requests - report.running_requests,
        decoding=report.running_requests - report.prefilling_requests,
        kv=report.kv_blocks_total * block_tokens,
        # Others are told of it, and the product may be more than is counted at all.
        free_kv=min(max(0, report.kv_blocks_total - report.kv_blocks_used) * block_tokens, MAX_COUNT),
        queued_kv=report.queued_tokens,
        head_kv=report.head_blocks * block_tokens,
        lacked_s=lacked_s,
    )
