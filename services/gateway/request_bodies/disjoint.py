"""Whether two JSON schemas can be shown to have no value in common, as the alternatives of a ``oneOf`` must."""

from __future__ import annotations

import copy
import json
from typing import Any

_MAX_REFERENCES = 16


def are_disjoint(one: Any, other: Any, root: Any) -> bool:
    """By their types, their constants, or a member that tells them apart. False: it is not known."""
    one, other = _resolved(one, root), _resolved(other, root)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    if _no_common(_types(one), _types(other)) or _no_common(_constants(one), _constants(other)):
        return True
    return one.get("type") == other.get("type") == "object" and _members_differ(one, other, root)


def with_tags(schema: Any) -> Any:
    """A schema in which the member that a ``discriminator`` names is one that each alternative must have, as Pydantic
    leaves open where it has a default. What the result allows the schema allows."""
    if "discriminator" not in json.dumps(schema):
        return schema
    root = copy.deepcopy(schema)
    waiting = [root]
    while waiting:
        found = waiting.pop()
        waiting += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        if isinstance(found, dict) and isinstance(found.get("oneOf"), list):
            tag = found.get("discriminator")
            name = tag.get("propertyName") if isinstance(tag, dict) else None
            for alternative in found["oneOf"]:
                one = _resolved(alternative, root)
                if isinstance(one, dict) and isinstance(name, str) and name in _properties(one):
                    one["required"] = sorted({*_required(one), name})
    return root


def _members_differ(one: dict[str, Any], other: dict[str, Any], root: Any) -> bool:
    """Of objects: by the constants of a member that one of them must have, or one that the other must not have."""
    for name in {*_required(one), *_required(other)}:
        found = [_resolved(_properties(schema).get(name, True), root) for schema in (one, other)]
        constants = [_constants(member) if isinstance(member, dict) else None for member in found]
        if _no_common(*constants):
            return True
        if any(name not in _properties(s) and s.get("additionalProperties") is False and not s.get("patternProperties")
               for s in (one, other)):  # fmt: skip
            return True
    return False


def _no_common(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    return one is not None and other is not None and not one & other


def _resolved(schema: Any, root: Any) -> Any:
    """What a schema that is nothing but a reference refers to."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or "type" in schema:
            return schema
        schema = root
        for step in reference.removeprefix("#").removeprefix("/").split("/") if len(reference) > 2 else ():
            if isinstance(schema, list):
                schema = schema[int(step)] if step.isdecimal() and int(step) < len(schema) else None
            else:
                schema = schema.get(step) if isinstance(schema, dict) else None
    return schema


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
