"""Decides on all requests of a round, each by what the ones before it have left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.planner.core.operations.decision import Decision, ScaleRequest
from services.planner.core.operations.shares import shares
from services.planner.core.placement.allocation import Want
from services.planner.core.rounds.advice import Adviser
from services.planner.core.rounds.decision_log import DecisionLog
from services.planner.core.rounds.fleet import About, Fleet
from services.planner.core.rounds.moment import Situation
from services.planner.core.rounds.round import Round
from services.planner.core.rounds.scaler import Scaler
from services.planner.core.rounds.step import NoSpareWorker
from services.planner.core.rounds.unplanned import UnplannedDemands
from services.planner.core.rounds.waiting import ROOM_WAIT_S, Waiting, WaitingRoom
from shared.errors import BlitzError, Internal
from shared.messages.registry import ModelRecord

MAX_ROUND_S = 0.05
"""Of planning: what is left waits for the next round, which begins at once."""
SHRINK_S = 0.02
"""A demand for fewer instances waits for so long for what could use them in another role."""


@dataclass(slots=True)
class _Deciding:
    """What one round is decided from, and what was decided so far."""

    round: Round
    at: Situation
    promised: frozenset[str]
    """Instances that make room for a model that still waits."""
    wanted: Mapping[About, int]
    """What is asked for."""
    wants: dict[About, Want] = field(default_factory=dict)
    """What no worker was left for; by hand and by load it is one thing."""
    without_worker: list[tuple[Waiting, BlitzError]] = field(default_factory=list)
    """Requests made by hand, each with why nothing comes of it without room."""
    shares: dict[Waiting, int] = field(default_factory=dict)
    """Spare workers that are left to a demand at first, where there are fewer than are lacking."""
    sharing: list[Waiting] = field(default_factory=list)
    """Demands that lack more than their share: they get what others could not use."""
    served: set[Waiting] = field(default_factory=set)
    """Requests of which something comes."""
    shrinking: list[Waiting] = field(default_factory=list)
    """Requests for fewer instances."""
    staying: set[str] = field(default_factory=set)
    """Instances (ids) with which something happens already."""


class Decider:
    """What is put off goes back to ``room``."""

    def __init__(
        self,
        room: WaitingRoom,
        unplanned: UnplannedDemands,
        scaler: Scaler,
        fleet: Fleet,
        adviser: Adviser,
        decisions: DecisionLog,
    ) -> None:
        self._room = room
        self._unplanned = unplanned
        self._scaler = scaler
        self._fleet = fleet
        self._adviser = adviser
        self._decisions = decisions

    def decide(self, deciding: Round, at: Situation, spent_s: Callable[[], float]) -> None:
        """Fill the round. ``spent_s``: how long it has taken; what does not fit into ``MAX_ROUND_S`` is put off."""
        waiting, steps, now_s = deciding.waiting, deciding.steps, at.moment.monotonic_s
        for one in waiting:
            one.request = self._adviser.allowed(one.request, at)
        wanted = {one.about: one.request.desired for one in waiting}
        now = _Deciding(deciding, at, self._fleet.promised(now_s), wanted)
        began_s, late = spent_s(), list[Waiting]()
        waiting.sort(key=lambda one: one.request.rank(self._fleet.standing(one.request, at)))
        now.shares = self._shares(waiting, now)
        # Again those that need fewer: what could go may have got another role by then.
        for requests, shrinks in ((waiting, False), (now.sharing, False), (now.shrinking, True)):
            for one in requests:
                if (steps or now.wants) and spent_s() - began_s > MAX_ROUND_S:
                    late.append(one)
                else:
                    self._plan(one, now, shrinks=shrinks)
        for one in late:
            self._room.put_back(one, now_s)
        self._make_room(now, spent_s)
        for one, error in now.without_worker:
            self._await_room(one, error, now)

    def _make_room(self, now: _Deciding, spent_s: Callable[[], float]) -> None:
        """Have instances go for whom no worker was left."""
        steps, at, began_s = now.round.steps, now.at, spent_s()
        drained = [record for _, step in steps for record in step.decision.drain]
        mutated = {record.worker.worker_id for _, step in steps for record in step.mutate}
        try:
            making_room = self._fleet.make_room([*now.wants.values()], at, drained, mutated)
        except Exception as error:  # noqa: BLE001 (what is planned already is carried out all the same)
            now.round.no_room = error
            return
        for request in making_room:
            if steps and spent_s() - began_s > MAX_ROUND_S:
                break  # those that wait say so again
            step = self._scaler.plan(request, at, mutating=now.staying)
            if step is not None:
                steps.append((Waiting(request, at.moment.monotonic_s), step))

    def _await_room(self, one: Waiting, error: BlitzError, now: _Deciding) -> None:
        """Until workers become spare, if instances of other models go for what was asked for by hand."""
        over = one.since_s + ROOM_WAIT_S <= now.at.moment.monotonic_s
        if over or not self._fleet.makes_room_for(one.request.model, one.request.role):
            self._refuse(one, error, now)
        else:
            self._room.awaits_room(one)

    def _shares(self, waiting: Iterable[Waiting], now: _Deciding) -> dict[Waiting, int]:
        """Of those that lack more than they are to have at first. What is asked for by hand is done at one go."""
        at = now.at
        if not at.clusters.num_spare:
            return {}
        lacking = [
            (one, self._fleet.lack(one.request, missing, at))
            for one in waiting
            if (missing := self._scaler.num_to_load(one.request, at, now.promised))
        ]
        if sum(lack.missing for _, lack in lacking) <= at.clusters.num_spare:
            return {}
        got = shares([lack for _, lack in lacking], at.clusters.num_spare)
        return {
            one: share
            for (one, lack), share in zip(lacking, got, strict=True)
            if share < lack.missing and not one.by_hand
        }

    def _plan(self, one: Waiting, now: _Deciding, *, shrinks: bool) -> None:
        """Decide on one request. One that takes instances away is put aside, unless it is its turn (``shrinks``)."""
        request, share = one.request, now.shares.pop(one, None)
        if share is not None:
            now.sharing.append(one)
        if share == 0:
            return
        try:
            steps = self._scaler.plan_with_roles(
                request, now.at, now.wanted, promised=now.promised, staying=now.staying, most=share
            )
        except BlitzError as error:
            if isinstance(error, NoSpareWorker):
                if share is not None:
                    return  # those that are spare are of no use to it
                self._want(request, error.missing, now)
                if one in now.served:
                    return
                if one.by_hand:
                    now.without_worker.append((one, error))
                    return
                self._room.lacks_workers(one)
            self._refuse(one, error, now)
            return
        except Exception as cause:  # noqa: BLE001 (the others are decided on all the same)
            failure = Internal("the planner failed; its log says more")
            failure.__cause__ = cause
            self._refuse(one, failure, now)
            return
        if not steps:
            self._unplanned.met(one.about)
            now.round.settled.append(one)
            model = now.at.view.models.get(request.model)
            if model is not None:
                floor, decision = now.at.view.floors.get(one.about), self._decision(request, model, now.at)
                self._decisions.kept(request, decision, model, floor, now.at.moment)
            return
        if steps[-1].decision.drain and not shrinks:
            now.shrinking.append(one)
            return
        shrink_at_s = one.since_s + SHRINK_S
        if steps[-1].decision.drain and not one.by_hand and now.at.moment.monotonic_s < shrink_at_s:
            self._room.put_back(one, shrink_at_s)
            return
        # Who asked hears of the last of what is done in the role itself.
        answer = next(step for step in reversed(steps) if step.request is request)
        now.served.add(one)
        for step in steps:
            now.staying.update(step.changes)
            if step.load is not None:
                self._fleet.got_workers(step.model.name, step.request.role)
            if step.missing and not one.by_hand and share is None:
                self._want(step.request, step.missing, now)
            asked = one if step is answer else Waiting(step.request, now.at.moment.monotonic_s, origin=one.origin)
            now.round.steps.append((asked, step))

    def _want(self, request: ScaleRequest, missing: int, now: _Deciding) -> None:
        now.wants.setdefault((request.model, request.role), self._fleet.want(request, missing, now.at))

    def _refuse(self, one: Waiting, error: BlitzError, now: _Deciding) -> None:
        request, view, moment = one.request, now.at.view, now.at.moment
        now.round.refused.append(self._unplanned.refuse(one, error, moment.monotonic_s, decided=True))
        model = view.models.get(request.model)
        decision = self._decision(request, model, now.at)
        self._decisions.refused(request, decision, model, view.floors.get(one.about), error, moment)

    def _decision(self, request: ScaleRequest, model: ModelRecord | None, at: Situation) -> Decision:
        """For the log, which never ends a round."""
        if model is not None:
            try:
                return self._scaler.decision(request, model, at)
            except Exception:  # noqa: BLE001 (where planning fails, this does as well: it has been told)
                pass
        return Decision(request.desired, 0, 0, (), ())
