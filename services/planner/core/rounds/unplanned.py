"""Refusals: the answers to requests of which nothing comes, and the demands that are repeated all the same."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from services.planner.core.rounds.fleet import About
from services.planner.core.rounds.waiting import MAX_WAITING, Waiting
from shared.errors import BlitzError
from shared.messages.common import Role
from shared.messages.operations import Unplanned

UNPLANNED_S = 2.5
"""The monitor repeats each second what is not met; what it has not repeated for so long is not wanted any more."""
MAX_UNPLANNED_LISTED = 100
MAX_WHY_CHARS = 500


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing comes of a request."""

    one: Waiting
    error: BlitzError
    """Caused by another one, if the planner itself failed."""
    repeated: bool = False
    """A demand that was refused for the same reason before."""


@dataclass(slots=True)
class _Refusal:
    """The last answer to a demand that is repeated."""

    code: str
    wanted: int
    why: str
    since_s: float
    said_s: float
    decided: bool


class UnplannedDemands:
    """The last refusal of each model and role. Times are monotonic."""

    def __init__(self) -> None:
        self._last: dict[About, _Refusal] = {}

    def refuse(self, one: Waiting, error: BlitzError, now_s: float, *, decided: bool = False) -> Refused:
        """Who asked by hand is told; the monitor repeats itself while the number is wrong, so nothing is lost.
        ``decided``: by what the cluster has, and not because the round failed or could not be carried out."""
        if one.by_hand:
            return Refused(one, error)
        about, before = one.about, self._last.get(one.about)
        if before is not None or len(self._last) < MAX_WAITING:
            fresh = before is None or now_s - before.said_s > UNPLANNED_S
            since_s = now_s if fresh or before is None else before.since_s
            why = error.message[:MAX_WHY_CHARS]
            self._last[about] = _Refusal(error.code, one.request.desired, why, since_s, now_s, decided)
        return Refused(one, error, before is not None and before.code == error.code)

    def met(self, about: About) -> None:
        """Something came of it, or nothing is to do."""
        self._last.pop(about, None)

    def current(
        self, now_s: float, coming: Collection[About] = (), models: Collection[str] = ()
    ) -> tuple[Unplanned, ...]:
        """What is asked for and cannot be planned, those that wait the longest first. ``coming``: that get an instance
        all the same. ``models``: of these only."""
        known = self._last
        abouts = [(m, role) for m in models for role in get_args(Role) if (m, role) in known] if models else known
        current = [(r.since_s, a, r) for a in abouts if now_s - (r := known[a]).said_s <= UNPLANNED_S]
        return tuple(
            Unplanned(
                model=model,
                role=role,
                wanted=r.wanted,
                why=r.why,
                for_s=round(now_s - since_s, 3),
                coming=(model, role) in coming,
                undecided=not r.decided,
            )
            for since_s, (model, role), r in heapq.nsmallest(MAX_UNPLANNED_LISTED, current, key=lambda row: row[:2])
        )
