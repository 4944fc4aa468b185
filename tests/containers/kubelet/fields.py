"""Reading YAML strictly: a field that nobody asks for is an error, unless a table says why it may be left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IGNORED = {
    "spec.priorityClassName": "all pods fit, so there is no queue of pods",
    "spec.topologySpreadConstraints": "the placement spreads anyway",
    "spec.serviceAccountName": "there is no API to have an account of",
    "spec.securityContext.fsGroupChangePolicy": "volumes are small: ownership is always set",
    "container.resources.requests": "equal to the limits, and nodes are names",
    "claim.accessModes": "one machine has all nodes",
    "claim.resources": "folders have no size",
    "Deployment.progressDeadlineSeconds": "tests have limits of their own",
    "Deployment.selector": "a workload's pods are those that it made",
    "StatefulSet.selector": "a workload's pods are those that it made",
}
_NOTHING = object()


class UnknownField(Exception):
    """The YAML says something that is not done here."""


class Fields:
    """A mapping of the YAML, of which each field is taken once."""

    def __init__(self, doc: Mapping[str, Any], kind: str) -> None:
        self._left = dict(doc)
        self.kind = kind

    def take(self, name: str, default: Any = _NOTHING) -> Any:
        if default is _NOTHING and name not in self._left:
            raise UnknownField(f"{self.kind} has no {name}")
        return self._left.pop(name, default)

    def part(self, name: str) -> Fields:
        """A mapping in it; without one: an empty one."""
        return Fields(self.take(name, {}), f"{self.kind}.{name}")

    def must_be(self, name: str, value: Any) -> None:
        """What is only done in one way."""
        found = self.take(name, None)
        if found != value:
            raise UnknownField(f"{self.kind}.{name} is {found!r}: only {value!r} is known")

    def end(self) -> None:
        """Raises ``UnknownField`` for what nobody took."""
        for name in self._left:
            if f"{self.kind}.{name}" not in IGNORED:
                raise UnknownField(f"{self.kind}.{name} is not known")
