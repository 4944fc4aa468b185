"""Who leads the planners and the monitors: a lease for each kind of service, with a term that only grows."""

from __future__ import annotations

import time

from services.pool.store import Store
from shared.errors import BadRequest, StaleTerm
from shared.messages.registry import Lead, Leadership

EPOCHS_BEGIN_S = 1735689600
MAX_TERM_AHEAD_MS = 24 * 3600 * 1000
"""Clocks differ, by less than a day."""


class Terms:
    """The newest term of each kind, as the store has it. ``open`` first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: dict[str, int] = {}

    async def open(self) -> None:
        """Learn what the store holds."""
        for service in ("planner", "monitor"):
            self._newest[service] = await self._store.term(service)

    def newest(self, service: str) -> int:
        """0 if none was given out."""
        return self._newest.get(service, 0)

    def check(self, service: str, term: int) -> None:
        """Raises ``StaleTerm`` if one of that kind leads with a newer term."""
        if 0 < term < self.newest(service):
            raise StaleTerm(f"a {service} of term {self.newest(service)} leads; yours is {term}")

    async def lead(self, request: Lead) -> Leadership:
        """A process asks to lead its kind, to go on, or to lead no longer."""
        if not request.owner or request.term < 0 or not 0.1 <= request.ttl_s <= 60.0:
            raise BadRequest("a leader has a name, and leads for 0.1 to 60 seconds at a time", param="ttl_s")
        # Terms begin at the milliseconds since 2025 (``services.pool.scripts``), and grow with each leader.
        newest = max(self.newest(request.service), round((time.time() - EPOCHS_BEGIN_S) * 1000))
        if request.term > newest + MAX_TERM_AHEAD_MS:
            raise BadRequest(f"no {request.service} can have led with term {request.term} yet", param="term")
        if request.give_up:
            await self._store.abdicate(request.service, request.owner)
            return Leadership(leads=False, term=self.newest(request.service), leader="", expires_in_s=0.0)
        standing = await self._store.lead(request.service, request.owner, request.ttl_s, last_term=request.term)
        self._newest[request.service] = max(standing.term, self.newest(request.service))
        return Leadership(
            leads=standing.leads, term=standing.term, leader=standing.leader, expires_in_s=standing.expires_in_s
        )
