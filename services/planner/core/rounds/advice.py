"""Models, or a whole stack, that the load does nothing to: what it asks for is recorded and shown instead."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from dataclasses import dataclass

from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.operations import Operations
from services.planner.core.rounds.moment import Moment, Situation
from shared.messages.common import Role
from shared.messages.operations import Advice
from shared.messages.registry import ModelRecord
from shared.registry_view import bounded, counted_as

CURRENT_S = 5.0
"""The monitor asks again each second; what it has not asked for so long is not asked for any more."""
MAX_ADVICE = 20_000
"""Models and roles."""
MAX_LISTED = 100
MAX_WHY_CHARS = 500


@dataclass(frozen=True, slots=True)
class _Given:
    now: int
    wanted: int
    why: str
    since_s: float
    said_s: float


class Adviser:
    """Remembers what it advised."""

    def __init__(self, operations: Operations, new_id: Callable[[str], str], *, everything: bool) -> None:
        """``new_id``: of a kind. ``everything``: not only models that say so."""
        self._operations = operations
        self._new_id = new_id
        self._everything = everything
        self._given: dict[tuple[str, Role], _Given] = {}

    def advises(self, model: ModelRecord) -> bool:
        """Whether the load decides nothing about it."""
        return self._everything or model.advise

    def allowed(self, request: ScaleRequest, at: Situation) -> ScaleRequest:
        """What is carried out of a request: of what the load asks for only what a minimum, or a number that was asked
        for by hand, asks for as well."""
        about, model = (request.model, request.role), at.view.models.get(request.model)
        if request.by_hand or model is None:
            return request
        if not self.advises(model):
            self._given.pop(about, None)
            return request
        registered = {model.name: model}
        now = sum(counted_as(worker, registered) == about for worker in at.clusters.of_model(model.name))
        floor = at.view.floors.get(about)
        wanted = bounded(request.desired, model, floor, request.role)
        least = max(now, bounded(0, model, floor, request.role))
        if wanted == least:
            self._given.pop(about, None)
            return request
        self._advise(request, now, wanted, at.moment)
        bound = f"{wanted} would be wanted, and the model is only to be advised on"
        return dataclasses.replace(request, desired=least, bound=bound)

    def _advise(self, request: ScaleRequest, now: int, wanted: int, moment: Moment) -> None:
        now_s = moment.monotonic_s
        about = (request.model, request.role)
        before = self._given.get(about)
        current = before is not None and now_s - before.said_s <= CURRENT_S
        if before is None and len(self._given) >= MAX_ADVICE:
            return
        since_s = before.since_s if before is not None and current else now_s
        self._given[about] = _Given(now, wanted, request.reason[:MAX_WHY_CHARS], since_s, now_s)
        if before is None or not current or (before.now, before.wanted) != (now, wanted):
            # Once for each number, not each time that the monitor repeats it.
            self._record(request, now, wanted, moment)

    def _record(self, request: ScaleRequest, now: int, wanted: int, moment: Moment) -> None:
        operation = Operation(
            plan_id=self._new_id("advice"),
            model=request.model,
            direction="out" if wanted > now else "in",
            desired=wanted,
            reason=f"{request.reason}; not carried out, as the model is only to be advised on: {now} stay",
            triggered_s=request.triggered_s,
            triggered_at_s=moment.unix_of(request.triggered_s),
            targets=(),
            role=request.role,
            advice=True,
        )
        self._operations.add(operation)

    def current(self, now_s: float) -> tuple[Advice, ...]:
        """What the load asks for now, and for longest first. ``now_s``: monotonic."""
        self._given = {about: given for about, given in self._given.items() if now_s - given.said_s <= CURRENT_S}
        oldest = heapq.nsmallest(MAX_LISTED, self._given.items(), key=lambda item: (item[1].since_s, item[0]))
        return tuple(
            Advice(model=model, role=role, now=g.now, wanted=g.wanted, why=g.why, for_s=round(now_s - g.since_s, 3))
            for (model, role), g in oldest
        )
