"""Which gateways live, and which requests have no gateway any more.

Rules
- A gateway is a process: an id, and the incarnation that its requests and heartbeats name.
- A process that is silent for its lease is gone.
- A process is gone as soon as a later incarnation of its id speaks, by a heartbeat or by a request: a gateway that was
  killed and came back under its id waits for none of its earlier tokens.
- Nothing is refused for its incarnation. One that is late, or whose clock is behind, is served like any other: what a
  dead process sent and a later heartbeat follows is ended by that.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LEASE_S = 30.0
"""Of a gateway that has sent a request and no heartbeat yet."""
MAX_PROCESSES = 10_000
"""Beyond that, those that have been silent for longest are not watched: what they sent stays until they speak again."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Processes of a gateway whose requests end: that of one incarnation, or all earlier ones."""

    gateway_id: str
    incarnation: str
    earlier: bool = False

    def had(self, gateway_id: str, incarnation: str) -> bool:
        """Whether what this process sent is theirs."""
        if gateway_id != self.gateway_id:
            return False
        if self.earlier:
            return incarnation < self.incarnation
        return incarnation == self.incarnation


@dataclass(slots=True)
class _Life:
    heard_at_s: float
    lease_s: float


class Gateways:
    """Signs of life by id and incarnation."""

    def __init__(self) -> None:
        self._lives: dict[str, dict[str, _Life]] = {}

    def spoke(self, gateway_id: str, incarnation: str, now_s: float) -> Gone | None:
        """A request came. Gives the processes that this one has replaced, if there are."""
        self._lives.setdefault(gateway_id, {}).setdefault(incarnation, _Life(now_s, FIRST_LEASE_S))
        replaced = self._replaced(gateway_id, incarnation)
        self._bound()
        return replaced

    def beat(self, gateway_id: str, incarnation: str, lease_s: float, now_s: float) -> Gone | None:
        """A heartbeat came. Gives the processes that this one has replaced, if there are."""
        lives = self._lives.setdefault(gateway_id, {})
        lives[incarnation] = _Life(now_s, lease_s)
        replaced = self._replaced(gateway_id, incarnation)
        self._bound()
        return replaced

    def silent(self, now_s: float, connected_s: float) -> list[tuple[Gone, float]]:
        """Those that were silent for their lease, which they had; they are forgotten. ``connected_s``: silence counts
        only while our own connection has been up as long."""
        gone = []
        for gateway_id, lives in list(self._lives.items()):
            for incarnation, life in list(lives.items()):
                if min(now_s - life.heard_at_s, connected_s) > life.lease_s:
                    del lives[incarnation]
                    gone.append((Gone(gateway_id, incarnation), life.lease_s))
            if not lives:
                del self._lives[gateway_id]
        return gone

    def _replaced(self, gateway_id: str, incarnation: str) -> Gone | None:
        lives = self._lives[gateway_id]
        earlier = [other for other in lives if other < incarnation]
        for other in earlier:
            del lives[other]
        return Gone(gateway_id, incarnation, earlier=True) if earlier else None

    def _bound(self) -> None:
        """Half of them go at once, so that this is seldom needed."""
        if sum(map(len, self._lives.values())) <= MAX_PROCESSES:
            return
        heard = [(life.heard_at_s, g, i) for g, lives in self._lives.items() for i, life in lives.items()]
        for _, gateway_id, incarnation in sorted(heard)[: len(heard) // 2]:
            del self._lives[gateway_id][incarnation]
            if not self._lives[gateway_id]:
                del self._lives[gateway_id]
