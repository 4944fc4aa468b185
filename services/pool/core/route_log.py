"""Changes of routes on their way to the gateways: gathered, cut into events of bounded size, numbered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from shared.messages.registry import GoneRoute, ModelRecord, ModelRoute, Route, RouteChanges

EVENT_BYTES = 128 * 1024
"""Of one event, about."""
_Field = Literal["removed_models", "models", "gone", "routes"]
_encoder = msgspec.msgpack.Encoder()


class RouteLog:
    """What changed since the last ``take``. The newest change of an instance or model counts."""

    def __init__(self) -> None:
        self.sequence = 0
        """Of the last event that was taken."""
        self._removed: dict[str, None] = {}
        self._models: dict[str, ModelRecord] = {}
        self._routes: dict[tuple[str, str], Route | None] = {}

    @property
    def waiting(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._removed or self._models or self._routes)

    def put(self, route: ModelRoute) -> None:
        """A route came, or changed."""
        key = route.model, route.route.instance_id
        self._routes.pop(key, None)
        self._routes[key] = route.route

    def gone(self, model: str, instance_id: str) -> None:
        """A route is gone."""
        self._routes.pop((model, instance_id), None)
        self._routes[model, instance_id] = None

    def put_model(self, record: ModelRecord) -> None:
        """A model is new, or its record changed."""
        self._models[record.name] = record

    def remove_model(self, name: str) -> None:
        """A model is gone, and its routes with it."""
        self._models.pop(name, None)
        self._removed[name] = None
        for key in [key for key in self._routes if key[0] == name]:
            del self._routes[key]

    def take(self, publisher: str) -> tuple[list[RouteChanges], frozenset[str]]:
        """Everything that waits, as events in order, and the names of the models that it is about."""
        about = frozenset([*self._removed, *self._models, *(model for model, _ in self._routes)])
        # In this order, which is also that in which an event is applied, parts of one change never contradict each
        # other, however they are cut.
        items: list[tuple[_Field, object]] = [("removed_models", name) for name in self._removed]
        items += [("models", record) for record in self._models.values()]
        items += [("gone", GoneRoute(model=m, instance_id=i)) for (m, i), r in self._routes.items() if r is None]
        items += [("routes", ModelRoute(model=m, route=r)) for (m, _), r in self._routes.items() if r is not None]
        self._removed, self._models, self._routes = {}, {}, {}
        return [self._event(publisher, part) for part in _cut(items)], about

    def _event(self, publisher: str, items: Sequence[tuple[_Field, object]]) -> RouteChanges:
        self.sequence += 1
        fields: dict[str, list[object]] = {}
        for name, item in items:
            fields.setdefault(name, []).append(item)
        made: dict[str, Any] = {name: tuple(found) for name, found in fields.items()}
        return RouteChanges(publisher=publisher, sequence=self.sequence, **made)


def _cut(items: Sequence[tuple[_Field, object]]) -> list[list[tuple[_Field, object]]]:
    parts: list[list[tuple[_Field, object]]] = []
    left = 0
    for item in items:
        size = len(_encoder.encode(item))
        if not parts or size > left:
            parts.append([])
            left = EVENT_BYTES
        parts[-1].append(item)
        left -= size
    return parts
