"""Which models exist and which instances serve them, from the pool's events and snapshots.

Rules
- Each publisher numbers its events. A missing number, or an unknown publisher, asks for a snapshot.
- An event older than the snapshot that was applied (same publisher) is stale and dropped.
- A snapshot does not undo newer events that came while its pages were fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.messages.common import InstanceState
from shared.messages.registry import ModelRecord, Route, RouteTable, Snapshot

TAKES_REQUESTS: frozenset[InstanceState] = frozenset({"serving"})
"""Not ``live``: what a live instance computes comes to it through the instance that it cooperates with."""
KNOWN_STATES: frozenset[InstanceState] = frozenset({"live", "serving", "draining"})
"""States in which an instance may hold requests of ours."""


def takes_new(route: Route) -> bool:
    """Whether an instance gets requests from a gateway at all: a decode instance gets them from prefill instances."""
    return route.state in TAKES_REQUESTS and route.role != "decode"


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    """One model and its instances by id."""

    record: ModelRecord
    routes: dict[str, Route]

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output that the model, and the best of its instances, can hold."""
        # A live instance may never come to serve: it promises nothing yet. A request for which a decode instance is
        # too small is decoded where its prompt is computed: decode instances bound nothing, and allow nothing.
        limits = [
            route.context_tokens
            for route in self.routes.values()
            if route.context_tokens > 0 and route.state != "live" and route.role != "decode"
        ]
        return min(self.record.spec.max_position, max(limits)) if limits else self.record.spec.max_position


@dataclass(slots=True)
class RouteChanges:
    """What an update changed."""

    models: set[str] = field(default_factory=set)
    """Models whose record or routes differ from before (or are new)."""
    removed: set[str] = field(default_factory=set)
    lost_instances: set[str] = field(default_factory=set)
    gap: bool = False
    """Events are missing: fetch a snapshot."""


def routes_of(workers: Iterable[Snapshot]) -> dict[str, dict[str, Route]]:
    """Routes by model and instance id, from a snapshot's pages.

    Instances of other weights that had the same name before are no routes.
    """
    pages = tuple(workers)
    hashes = {model.name: model.model_hash for page in pages for model in page.models}
    routes: dict[str, dict[str, Route]] = {}
    for page in pages:
        for record in page.workers:
            instance = record.instance
            if instance is None or instance.state not in KNOWN_STATES:
                continue
            if hashes.get(instance.model) != instance.model_hash:
                continue
            routes.setdefault(instance.model, {})[instance.instance_id] = Route(
                instance_id=instance.instance_id,
                worker_id=record.worker.worker_id,
                state=instance.state,
                role=instance.role,
                max_running_requests=instance.max_running_requests,
                max_queued_tokens=instance.max_queued_tokens,
                context_tokens=instance.context_tokens,
                epoch=instance.epoch,
            )
    return routes


class RouteBook:
    """The current view. Mutated by ``apply_event`` and ``apply_snapshot`` only."""

    def __init__(self) -> None:
        self.models: dict[str, ModelRoutes] = {}
        self.ready = False
        """Whether a snapshot was ever applied."""
        self._sequences: dict[str, int] = {}
        self._last_event: dict[str, tuple[str, int]] = {}

    def find(self, name: str) -> ModelRoutes | None:
        """The model of that name, None when it is not registered."""
        return self.models.get(name)

    def apply_event(self, table: RouteTable) -> RouteChanges:
        """Take one event; ``gap`` in the result asks for a snapshot."""
        seen = self._sequences.get(table.publisher)
        if seen is not None and table.sequence <= seen:
            return RouteChanges()
        self._sequences[table.publisher] = table.sequence
        self._last_event[table.name] = (table.publisher, table.sequence)
        changes = RouteChanges(gap=seen is None or table.sequence != seen + 1)
        if table.model is None:
            self._remove(table.name, changes)
        else:
            routes = {r.instance_id: r for r in table.routes if r.state in KNOWN_STATES}
            self._set(table.name, ModelRoutes(table.model, routes), changes)
        return changes

    def apply_snapshot(self, pages: list[Snapshot]) -> RouteChanges:
        """Replace the view by a snapshot (its pages in order; at least one)."""
        first = pages[0]
        routes = routes_of(pages)
        records = {record.name: record for page in pages for record in page.models}
        changes = RouteChanges()
        for name in sorted(set(self.models) | set(records)):
            publisher, sequence = self._last_event.get(name, ("", -1))
            if publisher == first.publisher and sequence > first.sequence:
                continue
            record = records.get(name)
            if record is None:
                self._remove(name, changes)
            else:
                self._set(name, ModelRoutes(record, routes.get(name, {})), changes)
        self._last_event = {name: last for name, last in self._last_event.items() if name in self.models}
        # Only this publisher's numbers are known to be whole; another's next event asks again.
        self._sequences = {
            first.publisher: max(first.sequence, self._sequences.get(first.publisher, first.sequence)),
        }
        self.ready = True
        return changes

    def _set(self, name: str, new: ModelRoutes, changes: RouteChanges) -> None:
        old = self.models.get(name)
        if old == new:
            return
        self.models[name] = new
        changes.models.add(name)
        if old is not None:
            changes.lost_instances |= old.routes.keys() - new.routes.keys()

    def _remove(self, name: str, changes: RouteChanges) -> None:
        old = self.models.pop(name, None)
        if old is not None:
            changes.removed.add(name)
            changes.lost_instances |= old.routes.keys()
