"""Whether two JSON schemas can be shown to have no value in common, as the alternatives of a ``oneOf`` must.

Alternatives are compared pairwise, and may share all that they refer to: what is found out about a part is kept, so
that a pair costs little however large its parts are.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

_MAX_REFERENCES = 16
_MAX_INDEX_DIGITS = 6


class Disjointness:
    """Of schemas in one document, which stays as it is."""

    def __init__(self, root: Any) -> None:
        self._document = _Document(root)
        self._traits: dict[int, _Traits] = {}
        self._constants: dict[int, frozenset[str] | None] = {}
        """By the identity of the schema, as ``_traits``."""

    def are_disjoint(self, one: Any, other: Any) -> bool:
        """By their types, their constants, or a member that tells them apart. False: it is not known."""
        one, other = self._document.resolved(one), self._document.resolved(other)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        return self._traits_of(one).differ(self._traits_of(other))

    def _traits_of(self, schema: dict[str, Any]) -> _Traits:
        found = self._traits.get(id(schema))
        if found is None:
            properties = _properties(schema)
            members = {name: self._document.resolved(member) for name, member in properties.items()}
            constants = {name: self._constants_of(m) for name, m in members.items() if isinstance(m, dict)}
            closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
            found = self._traits[id(schema)] = _Traits(
                types=_types(schema),
                constants=self._constants_of(schema),
                is_object=schema.get("type") == "object",
                required=frozenset(_required(schema)),
                tags={name: values for name, values in constants.items() if values is not None},
                names=frozenset(properties) if closed else None,
            )
        return found

    def _constants_of(self, schema: dict[str, Any]) -> frozenset[str] | None:
        if id(schema) not in self._constants:
            self._constants[id(schema)] = _constants(schema)
        return self._constants[id(schema)]


@dataclass(frozen=True, slots=True)
class _Traits:
    """What tells a schema's values from those of others. None: nothing is known of it."""

    types: frozenset[str] | None
    constants: frozenset[str] | None
    is_object: bool
    required: frozenset[str]
    tags: dict[str, frozenset[str]]
    """The constants of members that have any."""
    names: frozenset[str] | None
    """All that a member may have."""

    def differ(self, other: _Traits) -> bool:
        if _no_common(self.types, other.types) or _no_common(self.constants, other.constants):
            return True
        return self.is_object and other.is_object and self._members_differ(other)

    def _members_differ(self, other: _Traits) -> bool:
        """By the constants of a member that one of them must have, or one that one must have and one must not."""
        required = self.required | other.required
        if any(names is not None and not required <= names for names in (self.names, other.names)):
            return True
        both = self.tags.keys() & other.tags.keys() & required
        return any(_no_common(self.tags[name], other.tags[name]) for name in both)


class _Document:
    """Where references lead."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}

    def resolved(self, schema: Any) -> Any:
        """What a schema that is nothing but a reference refers to."""
        for _ in range(_MAX_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or "type" in schema:
                return schema
            if reference not in self._targets:
                self._targets[reference] = self._target(reference)
            schema = self._targets[reference]
        return schema

    def _target(self, reference: str) -> Any:
        found = self._root
        for step in reference.removeprefix("#").removeprefix("/").split("/") if len(reference) > 2 else ():
            if isinstance(found, list):
                is_index = step.isdecimal() and len(step) <= _MAX_INDEX_DIGITS
                found = found[int(step)] if is_index and int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found


def with_tags(schema: Any) -> Any:
    """A schema in which the member that a ``discriminator`` names is one that each alternative must have, as Pydantic
    leaves open where it has a default. What the result allows the schema allows."""
    if "discriminator" not in json.dumps(schema):
        return schema
    root = copy.deepcopy(schema)
    document = _Document(root)
    tags: dict[int, tuple[dict[str, Any], set[str]]] = {}
    waiting = [root]
    while waiting:
        found = waiting.pop()
        waiting += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        if isinstance(found, dict) and isinstance(found.get("oneOf"), list):
            tag = found.get("discriminator")
            name = tag.get("propertyName") if isinstance(tag, dict) else None
            for alternative in found["oneOf"]:
                one = document.resolved(alternative)
                if isinstance(one, dict) and isinstance(name, str) and name in _properties(one):
                    tags.setdefault(id(one), (one, set()))[1].add(name)
    for one, names in tags.values():
        one["required"] = sorted({*_required(one), *names})
    return root


def _no_common(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    return one is not None and other is not None and one.isdisjoint(other)


def _types(schema: dict[str, Any]) -> frozenset[str] | None:
    found = schema.get("type")
    if found is None:
        return None
    types = found if isinstance(found, list) else [found]
    return frozenset("number" if name == "integer" else str(name) for name in types)


def _constants(schema: dict[str, Any]) -> frozenset[str] | None:
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    # Of arrays and objects it would take more to know which are equal.
    if not isinstance(found, list) or any(isinstance(value, list | dict) for value in found):
        return None
    return frozenset(map(_key, found))


def _key(value: Any) -> str:
    """Equal for values that are equal in JSON, where 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _required(schema: dict[str, Any]) -> list[str]:
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
