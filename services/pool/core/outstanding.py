"""What was asked of workers and does not show in their reports yet. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.pool.core.copies import Key
from services.pool.core.steps import Outstanding
from shared.messages.registry import WorkerHeartbeat

HOLD_TIMEOUT_S = 5.0
"""From the request to the first report that shows the copy."""
DROP_TIMEOUT_S = 10.0
"""Then the worker is told again: it may wait for a reader of the copy, or have been refused."""
AVOID_S = 10.0
"""A worker that failed to load a model is not asked for the same model again for so long."""
GIVEN_UP_S = 10.0
"""How long a worker's wish to be rid of a last copy counts; it repeats the wish while it lasts."""


@dataclass(slots=True)
class _Hold:
    num_bytes: int
    until_s: float
    seen: bool = False


class OutstandingSteps:
    """Steps from being sent until the reports show them. Lost when the pool restarts: then the reports alone count."""

    def __init__(self) -> None:
        self._holds: dict[Key, _Hold] = {}
        self._drops: dict[Key, float] = {}
        self._avoided: dict[Key, float] = {}
        self._given_up: dict[Key, float] = {}

    def hold_sent(self, key: Key, num_bytes: int, now_s: float) -> None:
        self._holds[key] = _Hold(num_bytes, now_s + HOLD_TIMEOUT_S)

    def hold_failed(self, key: Key, now_s: float) -> None:
        """The worker refused, or did not report the copy in time, or lost it while it loaded."""
        self._holds.pop(key, None)
        self._avoided[key] = now_s + AVOID_S

    def drop_sent(self, key: Key, now_s: float) -> None:
        self._drops[key] = now_s + DROP_TIMEOUT_S

    def drop_over(self, key: Key) -> bool:
        """The drop failed or was refused; False if there was none."""
        return self._drops.pop(key, None) is not None

    def give_up(self, key: Key, now_s: float) -> None:
        """A worker wants to be rid of its copy of a model, which is the last."""
        self._given_up[key] = now_s + GIVEN_UP_S

    def take_back(self, key: Key) -> None:
        """The worker keeps the copy after all."""
        self._given_up.pop(key, None)

    def observe(self, reports: Sequence[WorkerHeartbeat], now_s: float) -> tuple[str, ...]:
        """Strike off what the reports show, and what took too long; why, for each hold that failed."""
        copies = {(r.worker.worker_id, c.model_hash): c for r in reports for c in r.host_copies}
        living = {r.worker.worker_id for r in reports}
        failures = []
        for key, hold in list(self._holds.items()):
            copy = copies.get(key)
            placed = copy is not None and not copy.cached
            if key[0] not in living or (placed and copy is not None and copy.state == "ready"):
                del self._holds[key]
            elif placed:
                hold.seen = True
            elif hold.seen or now_s >= hold.until_s:
                what = "lost it while loading" if hold.seen else f"did not report it within {HOLD_TIMEOUT_S:g} s"
                failures.append(f"worker {key[0]} was to hold a copy of model {key[1][:12]} and {what}")
                self.hold_failed(key, now_s)
        self._drops = {k: until for k, until in self._drops.items() if k in copies and now_s < until}
        self._avoided = {k: until for k, until in self._avoided.items() if k[0] in living and now_s < until}
        self._given_up = {k: until for k, until in self._given_up.items() if k in copies and now_s < until}
        return tuple(failures)

    def now(self) -> Outstanding:
        """For ``place``."""
        return Outstanding(
            holds={key: hold.num_bytes for key, hold in self._holds.items()},
            drops=frozenset(self._drops),
            avoided=frozenset(self._avoided),
            given_up=frozenset(self._given_up),
        )
