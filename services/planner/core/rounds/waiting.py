"""What waits for a round: what the load asks for, and what was asked for by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.rounds.fleet import About
from shared.messages.common import Role

MAX_WAITING = 20_000
"""Models and roles with an unmet demand."""
SHORT_S = 2.5
"""A demand for which no worker was spare is tried again when one may be, unless it is older than this: the monitor has
said it again by then if it still stands."""
ROOM_WAIT_S = 4.0
"""How long an operator waits for other models to make room."""


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that is to be decided on."""

    request: ScaleRequest
    since_s: float
    by_hand: bool = False
    """Whether somebody waits for its answer."""
    origin: Any = None
    """Whatever the caller gave with it, such as its trace."""
    tries: int = 0
    """How often its workers were taken by others first."""

    @property
    def about(self) -> About:
        return self.request.model, self.request.role


class WaitingRoom:
    """Requests of one model and role replace each other, but for those that were asked for by hand. Times are
    monotonic."""

    def __init__(self) -> None:
        self._demands: dict[About, Waiting] = {}
        self._by_hand: list[Waiting] = []
        self._short: dict[About, Waiting] = {}
        """Demands for which no worker was spare."""
        self._awaiting_room: list[Waiting] = []
        """Requests made by hand for which other models make room."""
        self._due_s = float("inf")
        """When those in the first two are to be decided on."""

    @property
    def due_s(self) -> float:
        """When the next round is to be; that may be in the past. ``inf``: nothing waits for one."""
        return min([self._due_s, *(one.since_s + ROOM_WAIT_S for one in self._awaiting_room)])

    def demand(self, request: ScaleRequest, now_s: float, origin: Any = None) -> None:
        """In place of what the same model and role wanted before."""
        about = (request.model, request.role)
        self._short.pop(about, None)
        if request.fewer:
            # What this role can do without may be what another one is short of.
            self._retry([(request.model, role) for role in get_args(Role)], now_s)
        if about in self._demands or len(self._demands) < MAX_WAITING:
            self._demands[about] = Waiting(request, now_s, origin=origin)
            self._due_s = min(self._due_s, now_s)

    def ask(self, request: ScaleRequest, now_s: float, origin: Any = None) -> Waiting:
        """By hand. What comes of it is said of the result."""
        about = (request.model, request.role)
        if about in self._short and self._short[about].request.desired > request.desired:
            # Its reason may have been an earlier number by hand. The load says it again if it is its own.
            del self._short[about]
        waiting = Waiting(request, now_s, by_hand=True, origin=origin)
        self._by_hand.append(waiting)
        self._due_s = min(self._due_s, now_s)
        return waiting

    def withdraw(self, one: Waiting) -> None:
        """Nobody waits for its answer any more."""
        for where in (self._by_hand, self._awaiting_room):
            if one in where:
                where.remove(one)

    def forget(self, model: str, role: Role) -> None:
        """What this model and role wanted before is not wanted any more."""
        self._demands.pop((model, role), None)
        self._short.pop((model, role), None)

    def try_again(self, now_s: float) -> None:
        """A worker may be spare, or can be made so: decide again on requests for which none was."""
        self._retry(list(self._short), now_s)

    def _retry(self, abouts: Iterable[About], now_s: float) -> None:
        for about in abouts:
            one = self._short.pop(about, None)
            if one is not None and one.since_s >= now_s - SHORT_S:
                self.put_back(one, now_s)
        awaiting, self._awaiting_room = self._awaiting_room, []
        for one in awaiting:
            self.put_back(one, now_s)

    def put_back(self, one: Waiting, due_s: float) -> None:
        """For a round at ``due_s``, or an earlier one; a demand only if there is no newer one."""
        if one.by_hand:
            self._by_hand.append(one)
        else:
            self._demands.setdefault(one.about, one)
        self._due_s = min(self._due_s, due_s)

    def lacks_workers(self, one: Waiting) -> None:
        """A demand waits until a worker may be spare."""
        self._short[one.about] = one

    def awaits_room(self, one: Waiting) -> None:
        """A request by hand waits until others have made room, for ``ROOM_WAIT_S`` at most."""
        self._awaiting_room.append(one)

    # --- for a round -------------------------------------------------------------------------

    def take_by_hand(self, now_s: float) -> list[Waiting]:
        """Those that are to be decided on now."""
        if any(one.since_s + ROOM_WAIT_S <= now_s for one in self._awaiting_room):
            self.try_again(now_s)
        waiting, self._by_hand = self._by_hand, []
        return waiting

    def take_demands(self) -> list[Waiting]:
        """All."""
        waiting, self._demands = [*self._demands.values()], {}
        # Somebody may have asked since the others were taken.
        self._due_s = min((one.since_s for one in self._by_hand), default=float("inf"))
        return waiting

    def clear(self) -> list[Waiting]:
        """Nothing waits any more. Whose answers somebody waits for."""
        asked = [*self._by_hand, *self._awaiting_room]
        for waiting in (self._demands, self._short, self._by_hand, self._awaiting_room):
            waiting.clear()
        self._due_s = float("inf")
        return asked
