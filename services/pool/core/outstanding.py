"""What was asked of workers and does not show in their reports yet. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.pool.core.copies import Key
from services.pool.core.steps import Outstanding
from shared.messages.registry import HostCopy, WorkerHeartbeat

HOLD_TIMEOUT_S = 5.0
"""From the request to the first report that shows the copy."""
LOAD_TIMEOUT_S = 120.0
SLOWEST_GBPS = 0.1
"""A copy that loads for longer than ``LOAD_TIMEOUT_S``, and than its bytes take at this rate, does not count."""
DROP_TIMEOUT_S = 10.0
"""Then the worker is told again: it may wait for a reader of the copy, or have been refused."""
AVOID_S = 10.0
AVOID_MAX_S = 300.0
"""A worker that failed to load a model is not asked for the same model again for ``AVOID_S``; for twice as long after
every further failure, up to this."""
GIVEN_UP_S = 10.0
"""How long a worker's wish to be rid of a last copy counts; it repeats the wish while it lasts."""
LEAVING_S = 10.0
"""How long a worker that asked because it stops counts as leaving."""


@dataclass(slots=True)
class _Hold:
    num_bytes: int
    until_s: float
    seen: bool = False


@dataclass(slots=True)
class _Avoided:
    until_s: float
    failures: int

    def forgotten(self, now_s: float) -> bool:
        return now_s >= self.until_s + AVOID_MAX_S


@dataclass(frozen=True, slots=True)
class _Leaving:
    incarnation: str
    until_s: float


class OutstandingSteps:
    """Steps from being sent until the reports show them. Lost when the pool restarts: then the reports alone count."""

    def __init__(self) -> None:
        self._holds: dict[Key, _Hold] = {}
        self._drops: dict[Key, float] = {}
        self._avoided: dict[Key, _Avoided] = {}
        self._given_up: dict[Key, float] = {}
        self._loading: dict[Key, tuple[int, float]] = {}
        """Serial of each placed copy that loads, and since when it is seen to."""
        self._overdue: frozenset[Key] = frozenset()
        self._leaving: dict[str, _Leaving] = {}
        self._now_s = float("-inf")

    def hold_sent(self, key: Key, num_bytes: int, now_s: float) -> None:
        self._holds[key] = _Hold(num_bytes, now_s + HOLD_TIMEOUT_S)

    def hold_failed(self, key: Key, now_s: float) -> None:
        """The worker refused, or did not report the copy in time, or lost it while it loaded, or loads it for ever."""
        self._holds.pop(key, None)
        failures = self._avoided[key].failures + 1 if key in self._avoided else 1
        self._avoided[key] = _Avoided(now_s + min(AVOID_MAX_S, AVOID_S * 2.0 ** (failures - 1)), failures)

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

    def leaves(self, worker_id: str, incarnation: str, now_s: float) -> None:
        """A worker said that it stops."""
        self._now_s = max(self._now_s, now_s)
        self._leaving[worker_id] = _Leaving(incarnation, now_s + LEAVING_S)

    def observe(self, reports: Sequence[WorkerHeartbeat], now_s: float) -> tuple[str, ...]:
        """Strike off what the reports show, and what took too long; why, for each hold that failed."""
        self._now_s = now_s
        copies = {(r.worker.worker_id, c.model_hash): c for r in reports for c in r.host_copies}
        living = {r.worker.worker_id: r.worker.incarnation for r in reports}
        failures = self._observe_loading(copies, now_s)
        for key, hold in list(self._holds.items()):
            copy = copies.get(key)
            placed = copy is not None and not copy.cached
            if key[0] not in living:
                del self._holds[key]
            elif placed and copy is not None and copy.state == "ready":
                del self._holds[key]
                self._avoided.pop(key, None)
            elif placed:
                hold.seen = True
            elif hold.seen or now_s >= hold.until_s:
                what = "lost it while loading" if hold.seen else f"did not report it within {HOLD_TIMEOUT_S:g} s"
                failures.append(f"worker {key[0]} was to hold a copy of model {key[1][:12]} and {what}")
                self.hold_failed(key, now_s)
        self._drops = {k: until for k, until in self._drops.items() if k in copies and now_s < until}
        self._avoided = {k: a for k, a in self._avoided.items() if k[0] in living and not a.forgotten(now_s)}
        self._given_up = {k: until for k, until in self._given_up.items() if k in copies and now_s < until}
        self._leaving = {
            w: leaving
            for w, leaving in self._leaving.items()
            if living.get(w) == leaving.incarnation and now_s < leaving.until_s
        }
        return tuple(failures)

    def _observe_loading(self, copies: dict[Key, HostCopy], now_s: float) -> list[str]:
        loading = {k: c for k, c in copies.items() if c.state == "loading" and not c.cached}
        before = self._loading
        self._loading = {
            k: before[k] if k in before and before[k][0] == c.serial else (c.serial, now_s) for k, c in loading.items()
        }
        overdue = {
            k
            for k, c in loading.items()
            if now_s - self._loading[k][1] > max(LOAD_TIMEOUT_S, c.num_bytes * 8 / (SLOWEST_GBPS * 1e9))
        }
        for key in overdue - self._overdue:
            self.hold_failed(key, now_s)
        failures = [
            f"worker {k[0]} loads a copy of {loading[k].model} for more than {now_s - self._loading[k][1]:.0f} s"
            for k in sorted(overdue - self._overdue)
        ]
        self._overdue = frozenset(overdue)
        return failures

    def now(self) -> Outstanding:
        """For ``place``, as of the last look at the reports."""
        return Outstanding(
            holds={key: hold.num_bytes for key, hold in self._holds.items()},
            drops=frozenset(self._drops),
            avoided=frozenset(key for key, avoided in self._avoided.items() if self._now_s < avoided.until_s),
            given_up=frozenset(self._given_up),
            overdue=self._overdue,
            leaving=frozenset(w for w, leaving in self._leaving.items() if self._now_s < leaving.until_s),
        )
