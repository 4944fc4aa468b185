"""Mutation in a round: which instances of a model get another of its roles, by what the monitor says of each.

``core/operations/mutation.py`` has the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from services.planner.core.operations.decision import ScaleRequest, lacking
from services.planner.core.operations.mutation import (
    Change,
    RoleSurplus,
    from_surplus,
    kept_s,
    made_up_for,
    surplus_of,
    with_roles,
)
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.refusals import WorkerRefusals
from services.planner.core.placement.allocation import IDLE_S
from services.planner.core.rounds.fleet import About, Fleet
from services.planner.core.rounds.moment import Moment, Situation
from services.planner.core.rounds.pair_planner import PairPlanner
from shared.messages.common import SERVED_BY, TAKES_PROMPTS, Role
from shared.messages.registry import ModelRecord, WorkerRecord
from shared.profile import MUTATION_S
from shared.registry_view import RegistryView, bounded, counted_as

SHOWN_S = 10.0
"""A registry that works shows by then which role an instance has."""
_SMOOTHING = 0.3


class Mutations:
    """Remembers which workers did not mutate, and how long those took that did."""

    def __init__(
        self,
        operations: Operations,
        fleet: Fleet,
        pairs: PairPlanner,
        allows: Callable[[ModelRecord], bool],
    ) -> None:
        """``allows``: whether a model's instances may get other roles."""
        self._operations = operations
        self._fleet = fleet
        self._pairs = pairs
        self._allows = allows
        self._refusals = WorkerRefusals()
        self._took_s = 0.0
        """From the decision to the word that the new role is known, lately; 0 before the first."""

    # --- what became of earlier ones ---------------------------------------------------------

    def failed(self, operation: Operation, worker_id: str, why: str, moment: Moment) -> None:
        """A worker did not give its instance the role: it is left alone for a while."""
        self._refusals.failed(worker_id, operation.model, why, moment.monotonic_s)

    def done(self, operation: Operation, worker_id: str, moment: Moment) -> None:
        """A worker says that its instance has the role, and the pool knows."""
        self._refusals.served(worker_id, operation.model)
        if not operation.recalled:
            took_s = max(0.0, moment.monotonic_s - operation.made_s)
            before_s = self._took_s or MUTATION_S
            self._took_s = before_s + _SMOOTHING * (took_s - before_s)

    def forget(self, now_s: float) -> None:
        """Forget failures that are long over."""
        self._refusals.forget(now_s)

    # --- in a round --------------------------------------------------------------------------

    def seen(self, view: RegistryView, moment: Moment) -> RegistryView:
        """The registry with the roles that instances were given and that it may not show yet."""
        return with_roles(view, self._operations.mutated(moment.monotonic_s, SHOWN_S))

    def from_surplus(
        self,
        request: ScaleRequest,
        at: Situation,
        wanted: Mapping[About, int],
        staying: Collection[str],
        promised: Collection[str],
    ) -> tuple[Change, ...]:
        """Instances of other roles that get the request's, as far as it lacks some. ``wanted``: what else is asked for
        in this round; ``staying``: instance ids that stay what they are; ``promised``: that make room for others."""
        model = at.view.models.get(request.model)
        if model is None or not self._allows(model):
            return ()
        asked = _Asked(request, model, at, wanted, self._by_role(model, at))
        missing = self._missing(request, model, at, promised)
        if not missing or not asked.by_role.keys() - {request.role}:
            return ()
        kept = self._operations.instances_in_pairs() | frozenset(staying)
        offers = [
            offer
            for role in sorted(asked.by_role)
            if role != request.role and (offer := self._offer(asked, role, kept)).surplus
        ]
        takers = sum(asked.serving(role) for role in TAKES_PROMPTS)
        return from_surplus(request.role, missing, offers, self._pairs.is_at_work, takers)

    def made_up_for(
        self,
        request: ScaleRequest,
        at: Situation,
        staying: Collection[str],
        promised: Collection[str],
    ) -> tuple[list[WorkerRecord], int]:
        """Prefill instances that could become the decode instances that the request lacks, if others load in their
        place; and how many prefill instances there are, on their way included."""
        model = at.view.models.get(request.model)
        if model is None or request.role != "decode" or not self._allows(model):
            return [], 0
        by_role = self._by_role(model, at)
        prefill = by_role.get("prefill", [])
        room = model.max_instances - sum(map(len, by_role.values()))
        missing = min(self._missing(request, model, at, promised), room)
        if request.urgent is not None:
            missing = min(missing, request.urgent - len(by_role.get("decode", [])))
        if "prefill" in self._lately_given(request, model, at):
            return [], 0
        kept = self._operations.instances_in_pairs() | frozenset(staying)
        movable = self._movable(prefill, kept, at.moment)
        num_serving = sum(record.state == "serving" for record in prefill)
        return made_up_for(missing, movable, self._pairs.is_at_work, num_serving), len(prefill)

    def takes_s(self, model: ModelRecord, record: WorkerRecord) -> float:
        """Seconds of a mutation of such an instance: as they took lately, else as its profile says, else assumed."""
        profile = self._pairs.profile_of(model, record)
        return self._took_s or (profile.mutation_s if profile is not None else MUTATION_S)

    def is_faster_than(self, load_s: float, model: ModelRecord, record: WorkerRecord) -> bool:
        """Whether a mutation of such an instance takes less than a load that should take ``load_s``; 0: as long as the
        model's last one, or as its profile says."""
        profile = self._pairs.profile_of(model, record)
        load_s = load_s or self._pairs.load_s(model.name) or (profile.load_s if profile is not None else 0.0)
        return not load_s or self.takes_s(model, record) < load_s

    def otherwise(self, model: str) -> str:
        """What would happen without a mutation, in words."""
        load_s = self._pairs.load_s(model)
        return f"the role would load on a spare worker, if there is one{f', in about {load_s:.2f} s' if load_s else ''}"

    def _missing(
        self,
        request: ScaleRequest,
        model: ModelRecord,
        at: Situation,
        promised: Collection[str],
    ) -> int:
        if request.fewer:
            return 0
        return lacking(
            model,
            at.clusters.of_model(model.name),
            request.desired,
            at.view.floors.get((request.model, request.role)),
            request.role,
            leaving=self._operations.instances_to_drain(),
            promised=() if request.by_hand else promised,
        )

    def _by_role(self, model: ModelRecord, at: Situation) -> dict[Role, list[WorkerRecord]]:
        """What counts towards the number of instances of each role."""
        leaving, registered = self._operations.instances_to_drain(), {model.name: model}
        found: dict[Role, list[WorkerRecord]] = defaultdict(list)
        for record in at.clusters.of_model(model.name):
            about = counted_as(record, registered)
            if about is not None and (record.instance is None or record.instance.instance_id not in leaving):
                found[about[1]].append(record)
        return dict(found)

    def _lately_given(self, request: ScaleRequest, model: ModelRecord, at: Situation) -> frozenset[Role]:
        """Roles that instances of the model have only just been given, and that give none for the load's sake."""
        if request.by_hand:
            return frozenset()
        return self._operations.roles_given(model.name, at.moment.monotonic_s, kept_s(self._pairs.load_s(model.name)))

    def _movable(self, records: Sequence[WorkerRecord], kept: Collection[str], moment: Moment) -> list[WorkerRecord]:
        return [
            record
            for record in records
            if record.state == "serving"
            and record.instance is not None
            and record.instance.instance_id not in kept
            and record.worker.worker_id not in self._refusals.avoided(record.instance.model, moment.monotonic_s)
        ]

    def _offer(self, asked: _Asked, role: Role, kept: Collection[str]) -> RoleSurplus:
        """What a role has beyond its need. ``kept``: instance ids that do not go."""
        request, model = asked.request, asked.model
        there, least, why = len(asked.by_role[role]), asked.least(role), ""
        said = self._fleet.said(model.name, role, asked.at.moment.monotonic_s)
        needed = [asked.kept_for_prompts()] if model.serving and role not in SERVED_BY[model.serving] else []
        if (wanted := asked.wanted.get((model.name, role))) is not None:
            needed.append(wanted)
        elif said is not None and said.desired < said.observed:
            needed.append(said.desired)
        if surplus_of(there, least, needed):
            why = f"{max(least, min(needed))} of {there} {role} instances are needed"
        if said is not None and said.idle and role not in self._lately_given(request, model, asked.at):
            idle_s = said.idle_for_s or 0.0
            spare = said.spare
            if request.by_hand or len(asked.by_role.get(request.role, ())) < asked.least(request.role):
                spare = said.idle
            elif idle_s < IDLE_S:
                spare = 0  # with steady traffic a role is idle between any two requests
            if spare:
                needed.append(said.observed - spare)
                why = why or f"{said.idle} of {there} {role} instances have been idle for {idle_s:.1f} s"
        # What still loads replaces nothing: as many as are to stay serve now.
        stay = max(least, min(needed, default=there))
        surplus = min(surplus_of(there, least, needed), max(0, asked.serving(role) - stay))
        return RoleSurplus(role, surplus, why, self._movable(asked.by_role[role], kept, asked.at.moment))


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request, and how its model stands in this round's eyes."""

    request: ScaleRequest
    model: ModelRecord
    at: Situation
    wanted: Mapping[About, int]
    by_role: Mapping[Role, Sequence[WorkerRecord]]

    def least(self, role: Role) -> int:
        """What limits and floors keep."""
        return bounded(0, self.model, self.at.view.floors.get((self.model.name, role)), role)

    def serving(self, role: Role) -> int:
        """Instances that serve."""
        return sum(record.state == "serving" for record in self.by_role.get(role, ()))

    def kept_for_prompts(self) -> int:
        """How many instances of roles that the model is not served by take prompts until those of others do. What
        mutates does at once."""
        if self.request.role in TAKES_PROMPTS:
            return 0
        ours = SERVED_BY[self.model.serving] & TAKES_PROMPTS
        wanted = {
            r: max(self.wanted.get((self.model.name, r), len(self.by_role.get(r, ()))), self.least(r)) for r in ours
        }
        return sum(max(0, wanted[role] - self.serving(role)) for role in ours)
