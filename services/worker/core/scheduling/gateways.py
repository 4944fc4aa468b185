"""Which gateways live, and which requests have no gateway any more.

Rules
- A gateway is a process: an id, and the incarnation that its requests and heartbeats name.
- A process that is silent for its lease is gone.
- A process is gone as soon as the first heartbeat of another incarnation of its id is heard: a gateway that was killed
  and came back under its id waits for none of its earlier tokens. A request is no sign of life: its sender may be dead.
- An incarnation that was left is not gone back to, and nothing is refused for it: what it sent and came late is served,
  until a heartbeat of its successor ends it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_LEASE_S = 30.0
"""Of a gateway that has sent a request and no heartbeat yet."""
MAX_PROCESSES = 10_000
"""Beyond that, those that have been silent for longest are not watched: what they sent stays until they speak again."""
MAX_LEFT = 16
"""Incarnations of one id that were left, the newest."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Processes of a gateway whose requests end: that of one incarnation, or all others of its id."""

    gateway_id: str
    incarnation: str
    others: bool = False

    def had(self, gateway_id: str, incarnation: str) -> bool:
        """Whether what this process sent is theirs."""
        return gateway_id == self.gateway_id and (incarnation != self.incarnation) == self.others


@dataclass(slots=True)
class _Life:
    heard_at_s: float
    lease_s: float


@dataclass(slots=True)
class _Id:
    current: str | None = None
    """The one to have begun to beat last."""
    lives: dict[str, _Life] = field(default_factory=dict)
    left: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LEFT))


class Gateways:
    """Signs of life by id and incarnation."""

    def __init__(self) -> None:
        self._ids: dict[str, _Id] = {}

    def spoke(self, gateway_id: str, incarnation: str, now_s: float) -> None:
        """A request came."""
        known = self._ids.setdefault(gateway_id, _Id())
        known.lives.setdefault(incarnation, _Life(now_s, FIRST_LEASE_S))
        self._bound()

    def beat(self, gateway_id: str, incarnation: str, lease_s: float, now_s: float) -> Gone | None:
        """A heartbeat came. Gives the processes that this one has replaced, if there are."""
        known = self._ids.setdefault(gateway_id, _Id())
        known.lives[incarnation] = _Life(now_s, lease_s)
        gone = None if incarnation in known.left else self._moves_on(gateway_id, incarnation)
        self._bound()
        return gone

    def silent(self, now_s: float, connected_s: float) -> list[tuple[Gone, float]]:
        """Those that were silent for their lease, which they had; they are forgotten. ``connected_s``: silence counts
        only while our own connection has been up as long."""
        gone = []
        for gateway_id, known in list(self._ids.items()):
            for incarnation, life in list(known.lives.items()):
                if min(now_s - life.heard_at_s, connected_s) > life.lease_s:
                    del known.lives[incarnation]
                    gone.append((Gone(gateway_id, incarnation), life.lease_s))
            if not known.lives:
                del self._ids[gateway_id]
        return gone

    def _moves_on(self, gateway_id: str, incarnation: str) -> Gone | None:
        """All others of this id are over."""
        known = self._ids[gateway_id]
        if known.current != incarnation:
            if known.current is not None:
                known.left.append(known.current)
            known.current = incarnation
        others = [other for other in known.lives if other != incarnation]
        for other in others:
            del known.lives[other]
        return Gone(gateway_id, incarnation, others=True) if others else None

    def _bound(self) -> None:
        """Half of them go at once, so that this is seldom needed."""
        if sum(len(known.lives) for known in self._ids.values()) <= MAX_PROCESSES:
            return
        heard = [(life.heard_at_s, g, i) for g, known in self._ids.items() for i, life in known.lives.items()]
        for _, gateway_id, incarnation in sorted(heard)[: len(heard) // 2]:
            del self._ids[gateway_id].lives[incarnation]
            if not self._ids[gateway_id].lives:
                del self._ids[gateway_id]
