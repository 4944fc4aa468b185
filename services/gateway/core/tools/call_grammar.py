"""Grammars of answers that are calls, in the format of a model's family, where a request says that there must be one.

A call is an object of JSON with the function's name and its arguments by their schema; what is around it, and whether
several may follow each other, its family says (``ToolParser.forced``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.gateway.core.tools.parser import ToolParser
from shared.grammars import OPTIONS, OPTIONS_KEYWORD
from shared.messages.generation import Grammar

_START = "start: "
_DATA = frozenset({"const", "enum"})
"""Keywords whose values are no schemas."""
_BY_NAME = frozenset({"$defs", "definitions", "patternProperties", "properties"})
"""Those whose values have schemas by names, which may be keywords, too."""


def call_schema(schemas: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Of one call of one of these functions, by name; ``field`` has the arguments. References lead where they led."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, schema) in enumerate(schemas.items()):
        place = f"f{number}"
        definitions[place] = _moved(schema, f"#/$defs/{place}")
        members = {"name": {"const": name}, field: {"$ref": f"#/$defs/{place}"}}
        calls.append(
            {"type": "object", "properties": members, "required": ["name", field], "additionalProperties": False}
        )
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(inner, root) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_value(key, value, root) for key, value in schema.items()}


def _moved_value(key: str, value: Any, root: str) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _moved(inner, root) for name, inner in value.items()}
    return root + value[1:] if key == "$ref" and isinstance(value, str) else _moved(value, root)


def calls_grammar(
    kind: type[ToolParser], schema: Mapping[str, Any], marks: Mapping[str, int], *, parallel: bool
) -> Grammar | None:
    """An answer of nothing but calls that are each as ``schema`` says (``call_schema``). ``marks``: those of the family
    that are tokens, by their text, which the model then writes as such. None: the family has none."""

    def mark(text: str) -> str:
        return f"<[{marks[text]}]>" if text in marks else json.dumps(text)

    rules = kind.forced(mark, parallel=parallel)
    if rules is None:
        return None
    return Grammar(kind="calls", text=f"{rules}\ncall: %json {json.dumps(schema)}")


def calls_or_answer(calls: Grammar, schema: Mapping[str, Any]) -> Grammar:
    """Either those (``calls_grammar``), or an object of JSON by ``schema``."""
    rules = calls.text.removeprefix(_START)
    assert rules != calls.text
    answer = json.dumps({**schema, OPTIONS_KEYWORD: OPTIONS})
    return Grammar(kind="calls", text=f"{_START}calls | answer\ncalls: {rules}\nanswer: %json {answer}")
