"""The planner without its shell: what it remembers, and what it decides from what it is told.

Whoever drives it (the service, or a simulation in virtual time) says when it is (``Moment``), makes ids, and carries
out what is decided. Unix times begin after 0, which says of many things that they have not happened.

1. Whatever is heard goes in as it comes: ``on_demand`` (the monitor), ``on_load`` and ``on_queue`` (instances and
   gateways), ``tracker.on_progress`` and ``tracker.on_live_report`` (workers), ``rounds.try_again`` when the registry
   says that instances are gone, ``rounds.ask`` for what is asked for by hand (``by_hand`` makes it a request).
2. Whenever ``rounds.due_s`` has come, and no other round runs, there is one:

       begun = rounds.begin(moment)
       rounds.decide(begun, view, moment)               with the registry's view, read after ``begin``
       verdicts = the pool's for begun.leases(lease_ttl_s, term), all at once; none if there are none
       granted, refused = rounds.granted(begun, verdicts, moment)
       for each of granted:
           told = writer.begin(its step, its grant, term, moment)
           publish told.plans in this order, then the assignment of each of told.operation.pairs
           told.operation.planned(the unix time by then), and rounds.settle(its one)

   ``begun.settled``, ``begun.refused`` and ``refused`` are answers for who asked by hand; demands are repeated. For a
   step whose plans cannot be published: ``told.operation.fail(why)``, ``rounds.refuse``, and its lease is given back;
   for a round that cannot be finished: ``rounds.fail``. The next round need not wait until everything is published.
3. Twice a second: ``forget``; ``tracker.check`` with the registry's view while any operation runs; and
   ``operations.just_finished()`` has the operations that ended. Once a second: the steps of ``evacuations``, begun as
   above without a lease, and ``migrations.make_room``, whose plans go to the workers that they name.
4. A pair asks for a split: ``splits.request``, then ``live.split.assign`` (a simulation bounds its solver by
   ``max_nodes`` and not by time, and says how long that takes), then ``splits.gates``, whose revision
   goes to both members. Meanwhile rounds go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.planner.core.multicast.overhead import Overheads
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.refusals import WorkerRefusals
from services.planner.core.placement.evacuation import evacuations
from services.planner.core.rounds.advice import Adviser
from services.planner.core.rounds.decision_log import DecisionLog
from services.planner.core.rounds.fleet import Fleet
from services.planner.core.rounds.migrations import Migrations
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.mutations import Mutations
from services.planner.core.rounds.pair_planner import FindProfile, PairPlanner
from services.planner.core.rounds.plan_writer import PlanWriter
from services.planner.core.rounds.rounds import Rounds
from services.planner.core.rounds.scaler import Scaler
from services.planner.core.rounds.settings import PlanSettings
from services.planner.core.rounds.splits import Splits
from services.planner.core.rounds.step import Step
from services.planner.core.rounds.tracker import Tracker
from shared.engines import traits_of
from shared.messages.load import Demand, LoadReport, QueueReport
from shared.messages.registry import ModelRecord
from shared.registry_view import RegistryView

MONITOR_TERM_S = 10.0
"""A monitor repeats its demands each second until they are met. Once no monitor has used a term for this long, an older
one is heard again."""


class Planner:
    """Everything that decides, and what it decides from. Nothing here waits, and nothing knows what time it is."""

    def __init__(self, settings: PlanSettings, new_id: Callable[[str], str], find_profile: FindProfile) -> None:
        """``new_id``: of a kind ("plan", "move", "advice"), which it begins with, and a dash."""
        self.operations = operations = Operations()
        self.refusals = WorkerRefusals()
        self.overheads = overheads = Overheads()
        self.pairs = PairPlanner(operations, settings.live, overheads, find_profile)
        self.adviser = Adviser(operations, new_id, everything=settings.advise)
        advises = self.adviser.advises

        def mutates(model: ModelRecord) -> bool:
            return settings.mutation and traits_of(model.engine).moves_kv and not advises(model)

        self.fleet = Fleet(operations, self.refusals, self.pairs.is_at_work, advises, mutates)
        self.mutations = Mutations(operations, self.fleet, self.pairs, mutates)
        self.migrations = Migrations(operations, self.pairs.load, advises, new_id, enabled=settings.migration)
        self.scaler = Scaler(operations, self.pairs, self.refusals, self.mutations, overheads, settings, new_id)
        self.writer = PlanWriter(operations, self.pairs, self.migrations, settings, new_id)
        self.decisions = DecisionLog()
        self.rounds = Rounds(operations, self.scaler, self.fleet, self.adviser, self.mutations, self.decisions)
        self.tracker = Tracker(operations, self.refusals, self.mutations, overheads)
        self.splits = Splits(operations)
        self._monitor_term = 0
        """The newest that was heard."""
        self._monitor_heard_s = float("-inf")
        """When the monitor of that term last said something."""

    def on_demand(self, demand: Demand, moment: Moment, origin: Any = None) -> None:
        """The monitor says how many instances a model needs in a role, or could do without."""
        now_s = moment.monotonic_s
        if demand.term < self._monitor_term and now_s - self._monitor_heard_s < MONITOR_TERM_S:
            return  # from a monitor that no longer leads
        self._monitor_term, self._monitor_heard_s = demand.term, now_s
        more_idle = self.fleet.on_demand(demand, now_s)
        # What is there is what is wanted: the monitor only says what it could do without, or no longer. Taken for a
        # demand, it would undo what was decided since the monitor looked.
        if demand.desired == demand.observed:
            self.rounds.forget(demand.model, demand.role)
        else:
            request = ScaleRequest(
                demand.model,
                demand.desired,
                now_s - demand.triggered_ago_s,
                demand.reason,
                role=demand.role,
                deficit=demand.deficit,
                urgent=demand.urgent,
                bound=demand.bound,
                fewer=demand.desired < demand.observed,
            )
            self.rounds.demand(request, moment, origin)
        if more_idle:
            self.rounds.try_again(moment)

    def on_load(self, report: LoadReport, moment: Moment) -> None:
        """An instance reports."""
        self.pairs.load.on_load(report, moment.monotonic_s)

    def on_queue(self, report: QueueReport, moment: Moment) -> None:
        """A gateway reports."""
        self.pairs.load.on_queue(report, moment.monotonic_s)

    def evacuations(self, view: RegistryView, moment: Moment) -> list[Step]:
        """Instances that go because their workers are to be free; nothing is leased for it."""
        found = evacuations(view, self.operations.instances_to_drain(), self.pairs.is_at_work)
        steps = [self.scaler.evacuation(going, view, moment) for going in found]
        for step in steps:
            self.decisions.took(step, view.floors.get((step.model.name, step.request.role)), moment, "drain")
        return steps

    def forget(self, moment: Moment) -> None:
        """Forget what has not been repeated, or is long over."""
        now_s = moment.monotonic_s
        self.pairs.load.forget(now_s)
        self.refusals.forget(now_s)
        self.fleet.forget(now_s)
        self.mutations.forget(now_s)
