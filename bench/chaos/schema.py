"""The schema that some answers must have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.chaos.answer import Answer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 4},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


def has_schema(text: str) -> bool:
    """Without a library, since the schema is one: what it says, in the language of the benchmark."""
    try:
        value = json.loads(text)
        return (
            value.keys() == SCHEMA["properties"].keys()
            and isinstance(value["name"], str)
            and len(value["name"]) <= SCHEMA["properties"]["name"]["maxLength"]
            and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
            and len(value["sizes"]) <= SCHEMA["properties"]["sizes"]["maxItems"]
            and all(type(size) is int and 0 <= size <= 999 for size in value["sizes"])
        )
    except (ValueError, AttributeError, TypeError, KeyError):
        return False


@dataclass(frozen=True, slots=True)
class AnyOfSchema:
    """What is expected of an answer that may be another one each time."""

    prompt_tokens: int
    max_tokens: int

    def wrong(self, got: Answer) -> str:
        """See ``Expectation``. What its limit cuts off has no schema yet."""
        if got.prompt_tokens != self.prompt_tokens:
            return f"prompt_tokens: {got.prompt_tokens} instead of {self.prompt_tokens}"
        if got.finish_reason == "length" and got.completion_tokens == self.max_tokens:
            return ""
        if got.finish_reason != "stop" or not has_schema(got.text):
            return f"no answer of its schema, {got.completion_tokens} tokens, {got.finish_reason}: {got.text!r}"
        return ""
