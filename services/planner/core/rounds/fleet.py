"""Makes room: whose instances go so that another model, for which no worker is spare, gets one."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from services.planner.core.operations.decision import ModelStanding, ScaleRequest, staying
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.refusals import WorkerRefusals
from services.planner.core.operations.shares import Lack
from services.planner.core.placement.allocation import QUANTUM_S, Holding, Room, Taking, Want, allocate
from services.planner.core.rounds.moment import Situation
from shared.messages.common import TAKES_PROMPTS, Role, is_scaled_by_load
from shared.messages.load import Demand
from shared.messages.registry import InstanceInfo, ModelRecord, WorkerInfo, WorkerRecord
from shared.registry_view import bounded, counted_as

SAID_S = 2.5
"""The monitor says what is idle each second; what it has not repeated for so long is not so any more."""
WAITS_S = 5.0
"""A model that has not said again for so long that it has no worker does not wait any more. The monitor says it each
second; some of that may be lost."""
MAX_MODELS = 20_000
"""Models and roles of which is remembered what the monitor said."""

About = tuple[str, Role]


@dataclass(frozen=True, slots=True)
class _Waits:
    """A model and role that waits for room, by the monotonic clock."""

    since_s: float
    last_s: float
    """When it was last said."""
    has_instances: bool
    in_turn: bool = False
    """Others have instances that they can be asked for, now or after a while."""


class Fleet:
    """Remembers what the monitor said of each model, and for whom instances go."""

    def __init__(
        self,
        operations: Operations,
        refusals: WorkerRefusals,
        at_work: Callable[[str], bool],
        advises: Callable[[ModelRecord], bool] = lambda model: model.advise,
        mutates: Callable[[ModelRecord], bool] = lambda _: False,
    ) -> None:
        """``at_work``: whether an instance has requests. ``advises``: whether the load takes nothing from a model.
        ``mutates``: whether a model's instances may get other roles."""
        self._mutates = mutates
        self._operations = operations
        self._refusals = refusals
        self._at_work = at_work
        self._advises = advises
        self._said: dict[About, tuple[float, Demand]] = {}
        self._promised: dict[str, About] = {}
        """For whom instances make room, by instance id."""
        self._waiting: dict[About, _Waits] = {}

    def on_demand(self, demand: Demand, now_s: float) -> bool:
        """The monitor says what a model could do without. Whether it could not before, as far as is known.
        ``now_s``: monotonic."""
        about = demand.model, demand.role
        before_s, before = self._said.get(about, (0.0, None))
        if not demand.idle and demand.desired >= demand.observed:
            self._said.pop(about, None)
        elif before is not None or len(self._said) < MAX_MODELS:
            self._said[about] = now_s, demand
        if before is None or now_s - before_s > SAID_S:
            return demand.idle > 0
        again = (demand.idle_for_s or 0.0) < (before.idle_for_s or 0.0)
        return demand.idle > before.idle or (demand.idle > 0 and again)

    def said(self, model: str, role: Role, now_s: float) -> Demand | None:
        """What the monitor says now of instances that a model could do without; None: it does not speak of any."""
        said_s, said = self._said.get((model, role), (0.0, None))
        if said is None or now_s - said_s > SAID_S:
            return None
        idle_for_s = (said.idle_for_s or 0.0) + now_s - said_s
        return msgspec.structs.replace(said, idle_for_s=idle_for_s)

    def forget(self, now_s: float) -> None:
        """Forget what the monitor no longer says, of models that were removed, too."""
        self._said = {about: said for about, said in self._said.items() if now_s - said[0] <= SAID_S}
        self._waiting = {about: waits for about, waits in self._waiting.items() if now_s - waits.last_s <= WAITS_S}

    def want(self, request: ScaleRequest, missing: int, at: Situation) -> Want:
        """What is missing of a request, for a model that is registered."""
        standing, model = self.standing(request, at), at.view.models[request.model]
        return Want(
            request.model,
            request.role,
            missing,
            standing.has_instances,
            model.weights_bytes,
            self._refusals.avoided(request.model, at.moment.monotonic_s),
            mutates=self._mutates(model),
            is_kept=request.by_hand or standing.below_least,
            engine=model.engine,
        )

    def standing(self, request: ScaleRequest, at: Situation) -> ModelStanding:
        """How the request's model stands, whether it is registered or not."""
        model = at.view.models.get(request.model)
        if model is None:
            return ModelStanding()
        about = request.model, request.role
        roles, waits = _roles(request.model, at), self._waiting.get(about)
        has_instances = _has_instances(request, roles)
        return ModelStanding(
            has_instances,
            roles[request.role] < bounded(0, model, at.view.floors.get(about), request.role),
            waits.since_s if waits is not None and not has_instances and not waits.has_instances else float("inf"),
            model.weight,
        )

    def lack(self, request: ScaleRequest, missing: int, at: Situation) -> Lack:
        """What is to be loaded for a request."""
        model, about = at.view.models[request.model], (request.model, request.role)
        there = _roles(request.model, at)[request.role]
        least = bounded(0, model, at.view.floors.get(about), request.role)
        return Lack(request, self.standing(request, at), there, least, missing)

    def promised(self, now_s: float) -> frozenset[str]:
        """Instances that make room for a model that still waits."""
        if not self._promised:
            return frozenset()
        leaving, oldest_s = self._operations.instances_to_drain(), now_s - WAITS_S
        self._promised = {i: about for i, about in self._promised.items() if i in leaving}
        waiting = {about for about, waits in self._waiting.items() if waits.last_s >= oldest_s}
        return frozenset([i for i, about in self._promised.items() if about in waiting])

    @property
    def has_room_coming(self) -> frozenset[About]:
        """For whom instances go, or will when it is their turn."""
        return frozenset([*self._promised.values(), *(about for about, w in self._waiting.items() if w.in_turn)])

    def makes_room_for(self, model: str, role: Role) -> bool:
        """Whether instances go for it, those among them that were chosen in this round."""
        return (model, role) in self._promised.values()

    def got_workers(self, model: str, role: Role) -> None:
        """It does not wait any more. If it does soon, it is behind those that have waited since."""
        self._waiting.pop((model, role), None)

    def _wait(self, wants: Iterable[Want], now_s: float) -> None:
        """These models wait for room."""
        known = {about: waits for about, waits in self._waiting.items() if now_s - waits.last_s <= WAITS_S}
        for want in wants:
            about = want.model, want.role
            before = known.get(about)
            since_s = before.since_s if before is not None and before.has_instances == want.has_instances else now_s
            known[about] = _Waits(since_s, now_s, want.has_instances)
        self._waiting = known

    def _take_turns(self, wants: Iterable[Want], could_go: Mapping[str, Iterable[tuple[int, str]]]) -> None:
        """``could_go``: by engine, memory of a worker that has it and becomes spare, or can, and the model that has it,
        if any."""
        most: dict[str, list[tuple[str, int]]] = {}
        for engine, rows in could_go.items():
            largest: dict[str, int] = {}
            for num_bytes, name in rows:
                largest[name] = max(largest.get(name, 0), num_bytes)
            most[engine] = heapq.nlargest(2, largest.items(), key=lambda row: row[1])
        for want in wants:
            about = want.model, want.role
            in_turn = any(
                num_bytes >= want.weights_bytes and name != want.model for name, num_bytes in most[want.engine]
            )
            self._waiting[about] = replace(self._waiting[about], in_turn=in_turn)

    def make_room(
        self,
        wants: Sequence[Want],
        at: Situation,
        drained: Collection[WorkerRecord],
        mutated: Collection[str] = (),
    ) -> list[ScaleRequest]:
        """Requests for fewer instances of other models; ``drained``: what this round takes away for other reasons, from
        models that lose nothing else by it; ``mutated``: worker ids whose instances it gives other roles."""
        self._wait(wants, at.moment.monotonic_s)
        if not wants:
            return []
        view, now_s = at.view, at.moment.monotonic_s
        leaving = self._operations.instances_to_drain()
        late = self._operations.instances_to_drain(now_s - QUANTUM_S)
        promised = {i: self._promised[i] for i in self.promised(at.moment.monotonic_s)}
        in_pairs = self._operations.instances_in_pairs()
        given = {record.worker.worker_id for record in drained}
        givers = {counted_as(record, view.models) for record in drained}
        counted: Counter[About] = Counter()
        up: Counter[About] = Counter()
        """Of those, the ones that serve."""
        serving: dict[About, list[tuple[WorkerRecord, InstanceInfo]]] = {}
        freeing: list[Room] = []
        arenas: dict[str, dict[About, int]] = {want.engine: {} for want in wants}
        """By engine the largest of each model's and role's workers that offer it."""
        for record in at.clusters.records:
            instance, worker = record.instance, record.worker
            if worker.worker_id in given or (instance is not None and instance.instance_id in leaving):
                instance_id = instance.instance_id if instance is not None else ""
                slow = instance_id in late and self._at_work(instance_id)
                if not record.leaves:
                    freeing.append(_room(worker, slow, promised.get(instance_id)))
                continue
            about = counted_as(record, view.models)
            if about is None or about in givers or not is_scaled_by_load(view.models[about[0]].serving, about[1]):
                continue
            counted[about] += 1
            for engine, largest in arenas.items():
                if worker.offers(engine):
                    largest[about] = max(largest.get(about, 0), worker.arena_bytes)
            up[about] += record.state == "serving"
            if worker.worker_id in mutated:
                continue
            if record.state == "serving" and instance is not None and instance.instance_id not in in_pairs:
                serving.setdefault(about, []).append((record, instance))
        beyond = {
            (name, role)
            for (name, role), number in counted.items()
            if not self._advises(view.models[name])
            and number > bounded(0, view.models[name], view.floors.get((name, role)), role)
        }
        could_go = {
            engine: [
                *((num_bytes, about[0]) for about, num_bytes in largest.items() if about in beyond),
                *((room.arena_bytes, "") for room in freeing if engine in room.engines),
            ]
            for engine, largest in arenas.items()
        }
        self._take_turns(wants, could_go)
        holdings = []
        for (name, role), found in serving.items():
            if self._advises(view.models[name]):
                continue
            # What still loads replaces nothing: as many as are to stay serve now.
            spendable = up[name, role] - bounded(0, view.models[name], view.floors.get((name, role)), role)
            if role in TAKES_PROMPTS and counted[name, "decode"]:
                # Not the last that takes prompts: what only decodes is of no use without it, and goes first.
                spendable = min(spendable, sum(up[name, takes] for takes in TAKES_PROMPTS) - 1)
            if spendable > 0:
                holding = self._holding(view.models[name], role, found, up[name, role], spendable, at)
                holdings.append(holding)
        taken: dict[About, list[Taking]] = {}
        for taking in allocate(wants, holdings, freeing, now_s):
            taken.setdefault((taking.model, taking.role), []).append(taking)
        instances = {record.worker.worker_id: instance for found in serving.values() for record, instance in found}
        requests = []
        for (name, role), takings in taken.items():
            going = frozenset([worker_id for t in takings for worker_id in t.workers])
            for taking in takings:
                for worker_id in taking.workers:
                    self._promised[instances[worker_id].instance_id] = (taking.for_model, taking.for_role)
            why = "; ".join(t.why for t in takings)
            fewer = counted[name, role] - len(going)
            requests.append(ScaleRequest(name, fewer, now_s, why, role=role, only=going, for_another=True))
        return requests

    def _holding(
        self,
        model: ModelRecord,
        role: Role,
        serving: Sequence[tuple[WorkerRecord, InstanceInfo]],
        up: int,
        spendable: int,
        at: Situation,
    ) -> Holding:
        """``up``: how many serve, of which those of ``serving`` could go."""
        spendable = min(spendable, len(serving))
        said = self.said(model.name, role, at.moment.monotonic_s)
        idle, idle_since_s = 0, 0.0
        if said is not None:
            # Of what was observed some may still load, and replaces nothing that is needed.
            needed = max(0, said.observed - said.idle)
            idle = max(0, min(said.idle, spendable, up - needed))
            idle_since_s = at.moment.monotonic_s - (said.idle_for_s or 0.0)
        copies_at = at.clusters.copies_at(model)
        return Holding(
            model.name,
            role,
            idle,
            idle_since_s,
            spendable,
            min(self._slice_ends_s(record, instance) for record, instance in serving),
            [
                _room(record.worker)
                for record, _ in sorted(serving, key=lambda one: staying(one[0], (), self._at_work, copies_at))
            ],
        )

    def _slice_ends_s(self, record: WorkerRecord, instance: InstanceInfo) -> float:
        """What began before this planner remembers has served for long."""
        operation = self._operations.get(instance.plan_id)
        since = operation.served_since(record.worker.worker_id) if operation is not None else None
        return since[0] + QUANTUM_S + since[1] if since is not None else 0.0


def _room(worker: WorkerInfo, late: bool = False, promised: About | None = None) -> Room:
    return Room(worker.worker_id, worker.arena_bytes, late, promised, worker.offered)


def _roles(name: str, at: Situation) -> Counter[Role]:
    """How many instances a model has in each role, now or soon."""
    counted = (counted_as(record, at.view.models) for record in at.clusters.of_model(name))
    return Counter(about[1] for about in counted if about is not None and about[0] == name)


def _has_instances(request: ScaleRequest, roles: Counter[Role]) -> bool:
    """Whether its model has instances that take prompts, or does not ask for one of these."""
    return request.role not in TAKES_PROMPTS or any(roles[role] for role in TAKES_PROMPTS)
