"""Makes room: whose instances go so that another model, for which no worker is spare, gets one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from services.planner.core.fleet.allocation import QUANTUM_S, Holding, Want, allocate
from services.planner.core.multicast.cluster import Clusters
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.refusals import Refusals
from shared.messages.common import SCALED_BY_LOAD, TAKES_PROMPTS, Role
from shared.messages.load import Demand
from shared.messages.registry import ModelRecord, WorkerRecord
from shared.registry_view import RegistryView, bounded, counted_as

SAID_S = 2.5
"""The monitor says what is idle each second; what it has not repeated for so long is not so any more."""
MAX_MODELS = 20_000
"""Models and roles of which is remembered what the monitor said."""

About = tuple[str, Role]


class Fleet:
    """Remembers what the monitor said of each model. Event loop only."""

    def __init__(self, operations: Operations, refusals: Refusals) -> None:
        self._operations = operations
        self._refusals = refusals
        self._said: dict[About, tuple[float, Demand]] = {}

    def on_demand(self, demand: Demand) -> None:
        """The monitor says what a model could do without."""
        about = demand.model, demand.role
        if not demand.idle:
            self._said.pop(about, None)
        elif about in self._said or len(self._said) < MAX_MODELS:
            self._said[about] = time.monotonic(), demand

    def want(self, request: ScaleRequest, missing: int, view: RegistryView, clusters: Clusters) -> Want:
        """What is missing of a request, for a model that is registered."""
        taking = [counted_as(record, view.models) for record in clusters.of_model(request.model)]
        has_instances = any(about is not None and about[1] in TAKES_PROMPTS for about in taking)
        return Want(
            request.model,
            request.role,
            missing,
            has_instances,
            view.models[request.model].weights_bytes,
            self._refusals.avoided(request.model, time.monotonic()),
        )

    def make_room(
        self, wants: Sequence[Want], view: RegistryView, clusters: Clusters, drained: Mapping[About, int]
    ) -> list[ScaleRequest]:
        """Requests for fewer instances of other models; ``drained``: of how many this round takes an instance away for
        other reasons."""
        if not wants:
            return []
        now_s = time.time()
        leaving = self._operations.instances_to_drain()
        counted: Counter[About] = Counter()
        serving: dict[About, list[WorkerRecord]] = {}
        for record in clusters.records:
            about = counted_as(record, view.models)
            if about is None or about[1] not in SCALED_BY_LOAD or about in drained:
                continue
            if record.instance is not None and record.instance.instance_id in leaving:
                continue
            counted[about] += 1
            if record.state == "serving":
                serving.setdefault(about, []).append(record)
        holdings = []
        for (name, role), records in serving.items():
            spendable = counted[name, role] - bounded(0, view.models[name], view.floors.get((name, role)), role)
            holdings.append(self._holding(view.models[name], role, records, spendable))
        freeing = len(leaving) + sum(drained.values())
        return [
            ScaleRequest(t.model, counted[t.model, t.role] - t.instances, now_s, t.why, role=t.role)
            for t in allocate(wants, holdings, freeing, now_s)
        ]

    def _holding(self, model: ModelRecord, role: Role, serving: Sequence[WorkerRecord], spendable: int) -> Holding:
        in_pairs = self._operations.instances_in_pairs()
        free = [r for r in serving if r.instance is not None and r.instance.instance_id not in in_pairs]
        spendable = max(0, min(spendable, len(free)))
        said_s, said = self._said.get((model.name, role), (0.0, None))
        if said is None or time.monotonic() - said_s > SAID_S:
            idle, idle_since_s = 0, 0.0
        else:
            idle, idle_since_s = min(said.idle, spendable), said.idle_since_s
        return Holding(
            model.name,
            role,
            idle,
            idle_since_s,
            spendable,
            min((self._slice_ends_s(r) for r in free), default=float("inf")),
            {r.worker.worker_id: r.worker.arena_bytes for r in free},
        )

    def _slice_ends_s(self, record: WorkerRecord) -> float:
        """What began before this planner remembers has served for long."""
        operation = self._operations.get(record.instance.plan_id) if record.instance is not None else None
        since = operation.served_since(record.worker.worker_id) if operation is not None else None
        return since[0] + QUANTUM_S + since[1] if since is not None else 0.0
