"""Which models exist and which instances serve them, from the pool's events and snapshots.

Rules
- Each publisher numbers its events. A missing number, or an unknown publisher, asks for a snapshot.
- An event older than the snapshot that was applied (same publisher) is stale and dropped.
- A snapshot does not undo newer events that came while its pages were fetched. An event that was heard before the
  snapshot was asked for, and is nevertheless beyond it, is not of this registry: the snapshot undoes it.
- A worker that cannot be spoken to is no route.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shared import subjects
from shared.messages.common import TAKES_PROMPTS, InstanceState
from shared.messages.registry import ModelRecord, Route, RouteChanges
from shared.registry_view import ROUTABLE, RegistryView, counted_as, route_of

TAKES_REQUESTS: frozenset[InstanceState] = frozenset({"serving"})
"""Not ``live``: what a live instance computes comes to it through the instance that it cooperates with."""
MAX_RECENT = 1000
"""Changes to remember while a view from before them is being read."""


def takes_new(route: Route) -> bool:
    """Whether an instance gets requests from a gateway at all: a decode instance gets them from prefill instances."""
    return route.state in TAKES_REQUESTS and route.role in TAKES_PROMPTS


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    """One model and its instances by id."""

    record: ModelRecord
    routes: dict[str, Route]

    @property
    def has_limits(self) -> bool:
        """Whether instances bound the context, and not the model alone."""
        return bool(self._limits())

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output that the model, and the best of its instances, can hold."""
        longest = self.record.basics.max_position
        return min(longest, max(self._limits(), default=longest))

    def _limits(self) -> list[int]:
        # A live instance may never come to serve: it promises nothing yet. A request for which a decode instance is
        # too small is decoded where its prompt is computed: decode instances bound nothing, and allow nothing.
        return [
            route.context_tokens
            for route in self.routes.values()
            if route.context_tokens > 0 and route.state != "live" and route.role in TAKES_PROMPTS
        ]


@dataclass(slots=True)
class RouteDiff:
    """What an update changed."""

    models: set[str] = field(default_factory=set)
    """Models whose record or routes differ from before (or are new)."""
    removed: set[str] = field(default_factory=set)
    lost_instances: set[str] = field(default_factory=set)
    gap: bool = False
    """Events are missing: fetch a snapshot."""


def routes_of(view: RegistryView) -> dict[str, dict[str, Route]]:
    """Routes by model and instance id.

    Instances of other weights that had the same name before are no routes.
    """
    routes: dict[str, dict[str, Route]] = {}
    for record in view.workers:
        instance = record.instance
        if instance is None or not subjects.is_process(record.worker.process):
            continue
        route = route_of(record, view.models.get(instance.model))
        if route is not None:
            routes.setdefault(instance.model, {})[instance.instance_id] = route
    return routes


def _starting(view: RegistryView) -> frozenset[str]:
    coming = [counted_as(worker, view.models) for worker in view.workers if worker.state != "serving"]
    return frozenset([found[0] for found in coming if found is not None and found[1] in TAKES_PROMPTS])


class RouteView:
    """The current view. Mutated by ``apply_changes`` and ``apply_view`` only."""

    def __init__(self) -> None:
        self.models: dict[str, ModelRoutes] = {}
        self.starting: frozenset[str] = frozenset()
        """Models of which the last view has an instance that will take prompts, and does not serve yet."""
        self.ready = False
        """Whether a view was ever applied."""
        self._publisher = ""
        self._sequence = 0
        """Number of the last change that was applied. All changes of ``_publisher`` up to it are in."""
        self._recent: deque[tuple[int, RouteChanges]] = deque(maxlen=MAX_RECENT)
        """The newest changes, each with how many were heard by then: a view may be of before them."""
        self.num_heard = 0
        """Changes. ``apply_view`` is told what this was when the view was asked for."""

    def apply_changes(self, event: RouteChanges) -> RouteDiff:
        """Take one numbered event; ``gap`` in the result asks for a view."""
        if event.publisher == self._publisher and event.sequence <= self._sequence:
            return RouteDiff()
        gap = event.publisher != self._publisher or event.sequence != self._sequence + 1
        if event.publisher != self._publisher:
            self._recent.clear()
        self._publisher, self._sequence = event.publisher, event.sequence
        self.num_heard += 1
        self._recent.append((self.num_heard, event))
        changes = RouteDiff(gap=gap)
        self._apply(event, changes)
        return changes

    def _apply(self, event: RouteChanges, changes: RouteDiff) -> None:
        """Idempotent: applying it again changes nothing."""
        for name in event.removed_models:
            self._remove(name, changes)
        touched: dict[str, dict[str, Route]] = {}
        records = {record.name: record for record in event.models}

        def routes(name: str) -> dict[str, Route]:
            if name not in touched:
                known = self.models.get(name)
                # Instances of other weights are none of its; that they are gone may have been said unheard.
                stay = known is not None and records.get(name, known.record).model_hash == known.record.model_hash
                touched[name] = dict(known.routes) if known is not None and stay else {}
            return touched[name]

        for name in records:
            routes(name)
        for gone in event.gone:
            routes(gone.model).pop(gone.instance_id, None)
        for found in event.routes:
            if found.route.state in ROUTABLE and subjects.is_process(found.route.worker):
                routes(found.model)[found.route.instance_id] = found.route
            else:
                routes(found.model).pop(found.route.instance_id, None)
        for name, made in touched.items():
            known = self.models.get(name)
            record = records.get(name) or (known.record if known is not None else None)
            # Of a model that is not known yet: the view that the gap asks for has it.
            if record is not None:
                self._set(name, ModelRoutes(record, made), changes)

    def apply_view(self, view: RegistryView, *, num_heard: int = 0) -> RouteDiff:
        """Replace everything by what the registry holds, and what is known to have changed since. ``num_heard``: the
        changes heard when it was asked for, which it knows all."""
        changes = RouteDiff()
        routes = routes_of(view)
        for name in sorted(set(self.models) | set(view.models)):
            record = view.models.get(name)
            if record is None:
                self._remove(name, changes)
            else:
                self._set(name, ModelRoutes(record, routes.get(name, {})), changes)
        self._catch_up(view, changes, num_heard)
        self.starting = _starting(view)
        self.ready = True
        return changes

    def _catch_up(self, view: RegistryView, changes: RouteDiff, num_heard: int) -> None:
        if view.publisher != self._publisher:
            # Events of either may be on their way; and if this view is of the pool that led before, it has just undone
            # what the other one told. The next reading is of one that leads.
            changes.gap = bool(self._publisher)
            self._publisher, self._sequence = view.publisher, view.routes_sequence
            self._recent.clear()
            return
        newer = [(number, event) for number, event in self._recent if event.sequence > view.routes_sequence]
        self._recent = deque((entry for entry in newer if entry[0] > num_heard), maxlen=MAX_RECENT)
        self._sequence = view.routes_sequence
        for _, event in self._recent:
            if event.sequence > self._sequence:
                changes.gap = changes.gap or event.sequence != self._sequence + 1
                self._sequence = event.sequence
                self._apply(event, changes)

    def _set(self, name: str, new: ModelRoutes, changes: RouteDiff) -> None:
        old = self.models.get(name)
        changes.lost_instances -= new.routes.keys()
        if old == new:
            return
        self.models[name] = new
        changes.models.add(name)
        changes.removed.discard(name)
        if old is not None:
            changes.lost_instances |= old.routes.keys() - new.routes.keys()

    def _remove(self, name: str, changes: RouteDiff) -> None:
        old = self.models.pop(name, None)
        if old is not None:
            changes.removed.add(name)
            changes.models.discard(name)
            changes.lost_instances |= old.routes.keys()
