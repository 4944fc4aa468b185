"""Which models the workers' GPUs are for, and for how long each had them, since this process leads. Pure.

Rules
- A worker counts as one GPU, also where it computes on a CPU. Its time goes to its instance's model, in the state that
  the instance has.
- A worker without an instance is idle. An instance of a model that is not registered has a state and no model: names
  come from workers, and what is kept is bounded by the registered models and the states.
- Time goes by what there is at a look, since the look before. What comes and goes between two looks has none, and all
  together have the living workers' time.
- Of a model that is registered no more nothing is kept.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from services.pool.core.registry import InstanceKind, Registry
from shared.messages.common import SERVED_BY, Role
from shared.messages.registry import GpuTimeReport, GpuUse

SHOW_EVERY_S = 1.0
"""Looks are more frequent, and what is shown takes longer to make than they do."""
IDLE = "idle"
NO_MODEL = ""
MAX_USES = 1000
"""In one report."""


class GpuTime:
    """Follows a registry. The mappings are replaced, never changed: any thread may read them."""

    def __init__(self, registry: Registry, now_s: float) -> None:
        """Nothing is counted of the time before ``now_s`` (monotonic, as all times here)."""
        self._registry = registry
        self._began_s = self._until_s = now_s
        self._shown_at_s = -math.inf
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._seen: set[InstanceKind] = set()
        self.seconds: Mapping[tuple[str, str], float] = {}
        """By model and state."""
        self.instances: Mapping[InstanceKind, int] = {}
        """By model, role and state: those that there have been, and ``serving`` of each role that a model is served
        by."""
        self.least: Mapping[tuple[str, Role], int] = {}
        """``min_instances`` of each role that a model is served by."""

    def look(self, now_s: float) -> None:
        """Give the workers the time until now. Earlier than the last look: nothing."""
        passed_s = max(0.0, now_s - self._until_s)
        self._until_s += passed_s
        num_idle = self._registry.num_workers
        for (name, _, state), number in self._registry.instances.items():
            self._seconds[self._counted_as(name), state] += number * passed_s
            num_idle -= number
        self._seconds[NO_MODEL, IDLE] += num_idle * passed_s
        if now_s - self._shown_at_s >= SHOW_EVERY_S:
            self._shown_at_s = now_s
            self._show()

    def report(self, model: str, hour_cost: float) -> GpuTimeReport:
        """As it was shown last; of ``model``, if one is named, and of what is idle. ``hour_cost`` is passed on."""
        asked = [
            GpuUse(model=name, state=state, seconds=seconds)
            for (name, state), seconds in self.seconds.items()
            if not model or name in (model, NO_MODEL)
        ]
        asked.sort(key=lambda use: (-use.seconds, use.model, use.state))
        return GpuTimeReport(
            counted_s=self._until_s - self._began_s,
            total_s=sum(self.seconds.values()),
            hour_cost=hour_cost,
            uses=tuple(asked[:MAX_USES]),
        )

    def _counted_as(self, name: str) -> str:
        return name if name in self._registry.models.entries else NO_MODEL

    def _show(self) -> None:
        models = {record.name: record for record in self._registry.models.records()}
        instances: Counter[InstanceKind] = Counter()
        for (name, role, state), number in self._registry.instances.items():
            instances[self._counted_as(name), role, state] += number
        kept = models.keys() | {NO_MODEL}
        for gone in [key for key in self._seconds if key[0] not in kept]:
            del self._seconds[gone]
        self.least = {(n, role): r.min_instances for n, r in models.items() for role in SERVED_BY[r.serving]}
        self._seen = {key for key in self._seen if key[0] in kept} | instances.keys()
        served: set[InstanceKind] = {(name, role, "serving") for name, role in self.least}
        self.instances = {kind: instances[kind] for kind in sorted(self._seen | served)}
        self.seconds = dict(self._seconds)
