"""Ends requests that waited for an instance until their deadline, or in vain, and tells them why none took them."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.active_requests import ActiveRequest, ActiveRequests
from services.gateway.core.capacity import Capacity
from services.gateway.core.lateness import Known, is_hopeless, no_room_timeout_s, why_late
from services.gateway.core.routes import RouteView
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.errors import BlitzError, NoCapacity, Unavailable
from shared.messages.operations import ListScaleRecords, ScaleRecords

ASK_TIMEOUT_S = 0.5
"""The planner's part is left out if it does not answer by then."""
LOOK_EVERY_S = 0.5
"""How often the planner is asked about models whose requests wait too long."""
NO_ROOM_RETRY_S = 60.0
MAX_ASKED = 50
"""Models that one question is about; requests of further ones that expire in the same moment wait for the next."""


class LateRequests:
    """The planner is asked once for all that expire at a moment, and by one question at a time."""

    def __init__(
        self,
        bus: Bus,
        requests: ActiveRequests,
        routes: RouteView,
        capacity: Capacity,
        tasks: OwnedTasks,
        fail: Callable[[ActiveRequest, BlitzError], None],
        give_up: Callable[[str, BlitzError], None],
        *,
        queue_timeout_s: float,
        default_no_room_timeout_s: float,
    ) -> None:
        """``fail`` ends a request that has not ended, ``give_up`` those of a model that have waited for as long as they
        do where there is no room, if it still has no instance. ``default_no_room_timeout_s``: of models without a
        setting of their own."""
        self._bus = bus
        self._requests = requests
        self._routes = routes
        self._capacity = capacity
        self._tasks = tasks
        self._fail = fail
        self._give_up = give_up
        self._queue_timeout_s = queue_timeout_s
        self._default_no_room_timeout_s = default_no_room_timeout_s
        self._looking = False
        self._late: dict[str, list[ActiveRequest]] = {}
        """By model; they are in no queue any more."""
        self._ending = False

    def end(self, request: ActiveRequest) -> None:
        """The request has left its queue, late: it ends in a moment."""
        self._late.setdefault(request.stream.model, []).append(request)
        if not self._ending:
            self._ending = True
            self._tasks.start(self._end_all())

    def look(self, names: list[str]) -> None:
        """End what waits for these models if nothing will come of it, as far as the planner knows."""
        if names and not self._looking:
            self._looking = True
            self._tasks.start(self._look(names))

    async def _look(self, names: list[str]) -> None:
        try:
            for start in range(0, len(names), MAX_ASKED):
                asked = names[start : start + MAX_ASKED]
                planned = await self._ask(asked)
                for name in asked:
                    known = Known(self._routes.models.get(name), self._capacity.has_workers, planned)
                    timeout_s = no_room_timeout_s(known.model, self._default_no_room_timeout_s)
                    if is_hopeless(name, known, timeout_s):
                        since = f"for {timeout_s:g} s " if timeout_s else ""
                        why = f"{since}no instance of model {name!r} could be started: "
                        self._give_up(name, NoCapacity(why + why_late(name, known), retry_after_s=NO_ROOM_RETRY_S))
        finally:
            self._looking = False

    async def _end_all(self) -> None:
        try:
            while self._late:
                names = list(self._late)[:MAX_ASKED]
                planned = await self._ask(names)
                for name in names:
                    self._end(name, self._late.pop(name), planned)
        finally:
            self._ending = False

    def _end(self, name: str, late: list[ActiveRequest], planned: ScaleRecords | None) -> None:
        known = Known(self._routes.models.get(name), self._capacity.has_workers, planned)
        why = f"no instance of model {name!r} took the request within {self._queue_timeout_s:g} s: "
        why += why_late(name, known)
        for request in late:
            # Its client may have left in the meantime.
            if self._requests.find(request.stream.request_id) is request:
                self._fail(request, Unavailable(why, retry_after_s=1.0))

    async def _ask(self, names: list[str]) -> ScaleRecords | None:
        message = ListScaleRecords(limit=0, models=tuple(names))
        try:
            return await self._bus.request(subjects.planner("records"), message, ScaleRecords, timeout_s=ASK_TIMEOUT_S)
        except BlitzError:
            return None
