"""From a wanted number of instances to a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from services.planner.core.live.pairs import num_sources
from services.planner.core.multicast.baselines import plan_by
from services.planner.core.multicast.chains import left_out_of
from services.planner.core.multicast.cluster import Clusters
from services.planner.core.multicast.explain import instances_of, names
from services.planner.core.multicast.overhead import Overheads
from services.planner.core.multicast.topology import Topologies
from services.planner.core.operations.decision import Decision, ScaleRequest, decide
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.refusals import WorkerRefusals
from services.planner.core.placement.evacuation import Evacuation
from services.planner.core.rounds.fleet import About
from services.planner.core.rounds.moment import Moment, Situation
from services.planner.core.rounds.mutations import Mutations
from services.planner.core.rounds.pair_planner import PairPlanner
from services.planner.core.rounds.settings import PlanSettings
from services.planner.core.rounds.step import Load, NoSpareWorker, Step
from shared.errors import Conflict, ModelNotFound
from shared.messages.registry import ModelRecord, WorkerRecord
from shared.registry_view import RegistryView, counted_as


class Scaler:
    """Plans what one request comes to, against what a round sees."""

    def __init__(
        self,
        operations: Operations,
        pairs: PairPlanner,
        refusals: WorkerRefusals,
        mutations: Mutations,
        overheads: Overheads,
        settings: PlanSettings,
        new_id: Callable[[str], str],
    ) -> None:
        self._operations = operations
        self._pairs = pairs
        self._refusals = refusals
        self._mutations = mutations
        self._overheads = overheads
        self._settings = settings
        self._new_id = new_id
        self._topologies = Topologies()

    def situation(self, view: RegistryView, moment: Moment) -> Situation:
        """What a round's plans are made from."""
        transfers = self._operations.transfers(moment.monotonic_s) if self._settings.knows_flows else None
        clusters = Clusters(
            view.workers,
            transfers=transfers,
            busy_nic_share=self._settings.busy_nic_share,
            topologies=self._topologies,
        )
        return Situation(moment, view, clusters)

    def plan_with_roles(
        self,
        request: ScaleRequest,
        at: Situation,
        wanted: Mapping[About, int],
        *,
        promised: Collection[str] = (),
        staying: Collection[str] = (),
        most: int | None = None,
    ) -> list[Step]:
        """What to do about a request, where instances of other roles may get its role: what does not mutate is planned
        last. Raises as ``plan`` if nothing is done. ``wanted``: what else is asked for in this round; ``staying``:
        instance ids that keep their roles, and do not go. Workers that are to load are taken, ``most`` at most."""
        steps: list[Step] = []
        changes = self._mutations.from_surplus(request, at, wanted, staying, promised)
        if changes:
            instead = self._mutations.otherwise(request.model)
            explain = tuple(
                f"mutate: {c.record.worker.worker_id} from {c.was} to {request.role}: {c.why}; otherwise {instead}"
                for c in changes
            )
            steps.append(self._change_roles(request, at, [c.record for c in changes], explain))
        staying = frozenset(staying) | {c.record.instance.instance_id for c in changes if c.record.instance is not None}
        making_up = self._make_up(request, at, staying, promised, most)
        steps += making_up
        if most is not None:
            most -= sum(len(step.load.chains.targets) for step in making_up if step.load is not None)
        try:
            rest = self.plan(request, at, promised, staying, most)
        except (NoSpareWorker, Conflict) as error:
            if not steps:
                raise
            # What can be had at once is had; the rest is asked for again.
            missing = error.missing if isinstance(error, NoSpareWorker) else 0
            steps[0] = dataclasses.replace(steps[0], left_out=(error.message,), short=missing)
            return steps
        if rest is not None:
            _take(rest, at)
            steps.append(rest)
        return steps

    def _change_roles(
        self,
        request: ScaleRequest,
        at: Situation,
        records: Sequence[WorkerRecord],
        explain: tuple[str, ...],
    ) -> Step:
        """These instances have the request's role from here on, in this round's eyes."""
        model = at.view.models[request.model]
        at.clusters.give_roles(model.name, {r.instance.instance_id: request.role for r in records if r.instance})
        workers, registered = at.clusters.of_model(model.name), {model.name: model}
        there = sum(counted_as(worker, registered) == (model.name, request.role) for worker in workers)
        decision = Decision(there, there - len(records), 0, (), ())
        return Step(request, self._new_id("plan"), model, decision, workers, mutate=records, explain=explain)

    def _make_up(
        self,
        request: ScaleRequest,
        at: Situation,
        staying: Collection[str],
        promised: Collection[str],
        most: int | None,
    ) -> list[Step]:
        """Prefill instances become decode instances, and others load in their place, if that is faster than to load
        decode instances; nothing where no worker is spare."""
        records, num_prefill = self._mutations.made_up_for(request, at, staying, promised)
        try:
            instead = self.plan(request, at, most=most) if records else None
        except NoSpareWorker:
            return []
        if instead is None or instead.load is None:
            return []
        predicted_s = instead.load.chains.predicted_s.values()
        load_s = max(predicted_s, default=0.0) if all(predicted_s) else 0.0
        model = at.view.models[request.model]
        if not self._mutations.is_faster_than(load_s, model, records[0]):
            return []
        records = records[: len(instead.load.chains.targets)]
        gained = f"otherwise a decode instance would load{f', in about {load_s:.2f} s' if load_s else ''}"
        took = f"in about {self._mutations.takes_s(model, records[0]):.2f} s, and a prefill instance loads in its place"
        explain = tuple(f"mutate: {r.worker.worker_id} from prefill to decode, {took}; {gained}" for r in records)
        mutation = self._change_roles(request, at, records, explain)
        gone = names([record.worker.worker_id for record in records])
        why = f"in place of {gone}, which decode from now on: {request.reason}"
        made_up = ScaleRequest(request.model, num_prefill, request.triggered_s, why, request.live, "prefill")
        load = self.plan(made_up, at)
        if load is None:
            at.clusters.give_roles(request.model, {r.instance.instance_id: "prefill" for r in records if r.instance})
            return []
        if load.load is not None:
            mutation = dataclasses.replace(mutation, needs=load.plan_id)
        _take(load, at)
        return [mutation, load]

    def plan(
        self,
        request: ScaleRequest,
        at: Situation,
        promised: Collection[str] = (),
        mutating: Collection[str] = (),
        most: int | None = None,
    ) -> Step | None:
        """What to do about a request; None when nothing is. Raises ``ModelNotFound``, ``NoSpareWorker``. ``promised``:
        instances that go for another model, which load does not take back. ``mutating``: as in ``decide``. ``most``:
        spare workers that are left to it; None: all.

        What was asked for by hand is tried even on workers that failed a short while ago, if no others are left.
        """
        model = at.view.models.get(request.model)
        if model is None:
            raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
        workers = at.clusters.of_model(model.name)
        decision = self._decide(request, model, workers, at, promised, mutating)
        if request.fewer and not decision.drain:
            return None
        if decision.nothing:
            if request.by_hand and decision.desired < request.desired:
                wanted = instances_of(request.desired, request.role)
                raise Conflict(
                    f"{wanted} and those of other roles are more than the model's max_instances {model.max_instances}"
                )
            return None
        plan_id = self._new_id("plan")
        if not decision.load:
            return Step(request, plan_id, model, decision, workers)
        num_targets = decision.load if most is None else min(decision.load, most)
        cluster = at.clusters.of(
            model,
            remaining_s=self._operations.remaining_s(at.moment.monotonic_s),
            avoided=self._refusals.avoided(model.name, at.moment.monotonic_s),
            at_least=decision.load if request.by_hand else 0,
            num_wanted=num_targets,
        )
        if not cluster.spare or num_targets <= 0:
            if decision.revive:
                # What can be had at once is had; the rest is asked for again.
                decision = dataclasses.replace(decision, load=0)
                return Step(request, plan_id, model, decision, workers)
            raise NoSpareWorker("; ".join(left_out_of(cluster, 0, decision.load)), decision.load)
        choice = self._pairs.choice(model, request.live, request.role)
        candidates = self._pairs.candidates(model, workers, request.role, at.moment.monotonic_s)
        # Every pair needs a tail of its own.
        tails = max(1, min(num_targets, num_sources(candidates, choice)))
        planned = plan_by(self._settings.strategy, cluster, num_targets, model.weights_bytes, tails=tails)
        planned = self._overheads.added_to(planned, model.model_hash)
        selection = self._pairs.select(model, candidates, planned, request.live, request.role)
        planned = dataclasses.replace(planned, explain=planned.explain + selection.explain)
        return Step(request, plan_id, model, decision, workers, Load(cluster, planned, selection))

    def num_to_load(self, request: ScaleRequest, at: Situation, promised: Collection[str]) -> int:
        """Instances for which workers are to be found, unless others get their role."""
        model = at.view.models.get(request.model)
        if model is None or request.fewer:
            return 0
        return self._decide(request, model, at.clusters.of_model(model.name), at, promised).load

    def decision(self, request: ScaleRequest, model: ModelRecord, at: Situation) -> Decision:
        """How many instances a request comes to within limits, and how many there are."""
        return self._decide(request, model, at.clusters.of_model(model.name), at, ())

    def _decide(
        self,
        request: ScaleRequest,
        model: ModelRecord,
        workers: Sequence[WorkerRecord],
        at: Situation,
        promised: Collection[str],
        mutating: Collection[str] = (),
    ) -> Decision:
        return decide(
            model,
            workers,
            request.desired,
            at.view.floors.get((request.model, request.role)),
            self._operations.instances_in_pairs(),
            role=request.role,
            leaving=self._operations.instances_to_drain(),
            at_work=self._pairs.is_at_work,
            promised=() if request.by_hand else promised,
            only=request.only,
            mutating=mutating,
            # What was asked for by hand is not asked for again later, and another model does not wait for a load.
            until_up=not (request.by_hand or request.for_another),
            copies_at=at.clusters.copies_at(model),
        )

    def evacuation(self, going: Evacuation, view: RegistryView, moment: Moment) -> Step:
        """Instances of workers that are to be free."""
        workers = [w for w in view.workers if w.instance is not None and w.instance.model == going.model.name]
        names = ", ".join(record.worker.worker_id for record in going.leave)
        why = f"{names} drained by hand; {instances_of(going.stay, going.role)} of {going.model.name} left"
        request = ScaleRequest(going.model.name, going.stay, moment.monotonic_s, why, role=going.role)
        decision = Decision(going.stay, going.stay, 0, (), going.leave)
        return Step(request, self._new_id("plan"), going.model, decision, workers)


def _take(step: Step, at: Situation) -> None:
    if step.load is not None:
        at.clusters.take(step.load.chains.targets, step.plan_id, step.model.name, step.request.role)
