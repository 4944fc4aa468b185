"""Workers that did not load what they were told to: they are left alone for a while, each time for longer.

Without this one worker that cannot load would be chosen again and again, because the choice is deterministic.
Times are of any one clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shared.messages.operations import RefusedLoad

AVOID_S = 1.0
AVOID_MAX_S = 60.0
"""A worker is avoided for ``AVOID_S``, for twice as long after every further failure, up to this."""
FORGET_S = 300.0
"""A failure is forgotten when nothing has failed for so long after it was over."""
MAX_REFUSALS = 10_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker that is not to load a model until ``until_s``."""

    worker_id: str
    model: str
    why: str
    until_s: float
    failures: int


class WorkerRefusals:
    """By worker and model: another model may fit where one does not."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Refusal] = {}
        """The newest last."""
        self._by_model: dict[str, dict[str, Refusal]] = {}
        """The same, by worker: a round asks for each of its models."""

    def failed(self, worker_id: str, model: str, why: str, now_s: float) -> None:
        """The worker refused the model, or did not get to serve it."""
        known = self._remove(model, worker_id)
        failures = known.failures + 1 if known is not None else 1
        until_s = now_s + min(AVOID_MAX_S, AVOID_S * 2.0 ** min(failures - 1, 30))
        self._put(Refusal(worker_id, model, why, until_s, failures))

    def excused(self, worker_id: str, model: str, why: str, now_s: float) -> None:
        """Once that was not the worker's fault. The next time it failed, too: it may be the model that it dies of."""
        if (model, worker_id) in self._by_key:
            self.failed(worker_id, model, why, now_s)
        else:
            self._put(Refusal(worker_id, model, why, now_s, 0))

    def _put(self, refusal: Refusal) -> None:
        model, worker_id = refusal.model, refusal.worker_id
        self._by_key[model, worker_id] = self._by_model.setdefault(model, {})[worker_id] = refusal
        while len(self._by_key) > MAX_REFUSALS:
            self._remove(*next(iter(self._by_key)))

    def served(self, worker_id: str, model: str) -> None:
        """It can, after all."""
        self._remove(model, worker_id)

    def avoided(self, model: str, now_s: float) -> dict[str, str]:
        """Workers not to choose for a model now, and why."""
        return {r.worker_id: r.why for r in self._by_model.get(model, {}).values() if now_s < r.until_s}

    def newest(self, now_s: float, limit: int, models: Collection[str] = ()) -> tuple[RefusedLoad, ...]:
        """At most ``limit`` that are in force, the newest first. ``models``: of these only."""
        return tuple(
            RefusedLoad(
                worker_id=r.worker_id, model=r.model, why=r.why, for_s=round(r.until_s - now_s, 3), failures=r.failures
            )
            for r in [r for r in self._now(now_s) if not models or r.model in models][: -limit - 1 : -1]
        )

    def forget(self, now_s: float) -> None:
        """Forget what is long over."""
        for model, worker_id in [key for key, r in self._by_key.items() if now_s >= r.until_s + FORGET_S]:
            self._remove(model, worker_id)

    def _remove(self, model: str, worker_id: str) -> Refusal | None:
        known = self._by_key.pop((model, worker_id), None)
        if known is not None:
            of_model = self._by_model[model]
            del of_model[worker_id]
            if not of_model:
                del self._by_model[model]
        return known

    def _now(self, now_s: float) -> Iterable[Refusal]:
        return (r for r in self._by_key.values() if now_s < r.until_s)
