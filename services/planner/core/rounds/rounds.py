"""Rounds: everything that is wanted at one moment is decided from one snapshot, and leased in one call.

Demand is level-triggered: the monitor repeats what is not met, so a demand that a round refuses is dropped. An operator
waits for the answer to a request made by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operations import Operations
from services.planner.core.rounds.advice import Adviser
from services.planner.core.rounds.decider import Decider
from services.planner.core.rounds.decision_log import DecisionLog
from services.planner.core.rounds.fleet import About, Fleet
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.mutations import Mutations
from services.planner.core.rounds.round import Granted, Round
from services.planner.core.rounds.scaler import Scaler
from services.planner.core.rounds.unplanned import Refused, UnplannedDemands
from services.planner.core.rounds.waiting import Waiting, WaitingRoom
from shared.errors import BlitzError, Conflict
from shared.messages.common import Role
from shared.messages.operations import Unplanned
from shared.messages.registry import LeaseVerdict
from shared.registry_view import RegistryView

LEASE_TRIES = 3
"""How often a request is planned when its workers are taken by others first."""


class Rounds:
    """A round is begun, decided and granted. One at a time: what it grants counts in the next one."""

    def __init__(
        self,
        operations: Operations,
        scaler: Scaler,
        fleet: Fleet,
        adviser: Adviser,
        mutations: Mutations,
        decisions: DecisionLog,
    ) -> None:
        self._operations = operations
        self._scaler = scaler
        self._fleet = fleet
        self._mutations = mutations
        self._room = WaitingRoom()
        self._unplanned = UnplannedDemands()
        self._decisions = decisions
        self._decider = Decider(self._room, self._unplanned, scaler, fleet, adviser, decisions)
        self._leasing: frozenset[About] = frozenset()
        """Of what the round brings instances that has its leases asked for."""

    # --- what waits --------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        """When the next round is to be, by the monotonic clock; that may be in the past. ``inf``: nothing waits."""
        return self._room.due_s

    def demand(self, request: ScaleRequest, moment: Moment, origin: Any = None) -> None:
        """In place of what the load asked for of the same model and role before."""
        self._room.demand(request, moment.monotonic_s, origin)

    def forget(self, model: str, role: Role) -> None:
        """What this model and role wanted before is not wanted any more."""
        self._room.forget(model, role)
        self._unplanned.met((model, role))

    def ask(self, request: ScaleRequest, moment: Moment, origin: Any = None) -> Waiting:
        """Decide on this, which was asked for by hand, in the next round. What comes of it is said of the result."""
        return self._room.ask(request, moment.monotonic_s, origin)

    def withdraw(self, one: Waiting) -> None:
        """Nobody waits for its answer any more."""
        self._room.withdraw(one)

    def try_again(self, moment: Moment) -> None:
        """A worker may be spare, or can be made so: decide again on requests for which none was."""
        self._room.try_again(moment.monotonic_s)

    # --- a round -----------------------------------------------------------------------------

    def begin(self, moment: Moment) -> Round:
        """What was asked for by hand so far: the snapshot that is to be taken now knows the numbers that were set."""
        return Round(self._room.take_by_hand(moment.monotonic_s))

    def decide(
        self, begun: Round, view: RegistryView, moment: Moment, spent_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Decide on it, and on all that the load asks for. ``spent_s``: how long that has taken, by any clock; a
        simulation may say nothing."""
        # Demands are of now, and those of one model's roles come one after the other: the later they are taken, the
        # fewer are decided on without the others.
        begun.waiting += self._room.take_demands()
        with self._operations.at_rest():
            at = self._scaler.situation(self._mutations.seen(view, moment), moment)
            begun.floors = at.view.floors
            self._decider.decide(begun, at, spent_s)
        self._leasing = frozenset([one.about for one, step in begun.steps if not step.decision.drain])

    def granted(
        self, decided: Round, verdicts: Iterable[LeaseVerdict], moment: Moment
    ) -> tuple[list[Granted], list[Refused]]:
        """What is to be carried out now, in this order. What got no lease is planned again, or refused."""
        self._leasing = frozenset()
        by_plan = {verdict.plan_id: verdict for verdict in verdicts}
        granted: list[Granted] = []
        refused: list[Refused] = []
        for one, step in decided.steps:
            verdict = by_plan.get(step.needs or step.plan_id)
            if verdict is None or verdict.grant is not None:
                granted.append(Granted(one, step, verdict.grant if verdict is not None else None))
                self._decisions.took(step, decided.floors.get((step.model.name, step.request.role)), moment)
                continue
            # Another plan took a worker since the snapshot; the next snapshot shows it.
            error = verdict.error.as_error() if verdict.error is not None else Conflict("no lease")
            one.tries += 1
            if isinstance(error, Conflict) and one.tries < LEASE_TRIES:
                self._room.put_back(one, moment.monotonic_s)
            else:
                refused.append(self.refuse(one, error, moment))
        return granted, refused

    def fail(self, round_: Round, error: BlitzError, moment: Moment) -> list[Refused]:
        """Nothing comes of a round, nor of what has been asked since."""
        self._leasing = frozenset()
        now_s = moment.monotonic_s
        waiting = (*round_.waiting, *self._room.take_by_hand(now_s), *self._room.take_demands())
        return [self._unplanned.refuse(one, error, now_s) for one in waiting]

    def close(self, error: BlitzError, moment: Moment) -> list[Refused]:
        """Nothing waits any more."""
        self._leasing = frozenset()
        return [self._unplanned.refuse(one, error, moment.monotonic_s) for one in self._room.clear()]

    # --- what came of it ---------------------------------------------------------------------

    def settle(self, one: Waiting) -> None:
        """What was granted for it has been published."""
        self._unplanned.met(one.about)

    def refuse(self, one: Waiting, error: BlitzError, moment: Moment) -> Refused:
        """What was granted for it could not be published."""
        return self._unplanned.refuse(one, error, moment.monotonic_s)

    def unplanned(self, moment: Moment, models: Collection[str] = ()) -> tuple[Unplanned, ...]:
        """What is asked for and cannot be planned, those that wait the longest first. ``models``: of these only."""
        begun = {(o.model, o.role) for o in self._operations.running() if o.direction != "in"}
        return self._unplanned.current(moment.monotonic_s, begun | self._leasing | self._fleet.has_room_coming, models)
