"""The forms in which a request says what its answer must be."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.request_bodies.guided import GuidedFields, read_guide
from shared.errors import BlitzError
from shared.messages.generation import Grammar

SCHEMA = {"type": "object", "title": "T", "properties": {"a": {"type": "integer"}}}
CLEANED = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def fields(**values: Any) -> GuidedFields:
    return GuidedFields(**{name: msgspec.Raw(json.dumps(value).encode()) for name, value in values.items()})


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
         "json_schema", CLEANED),
        ({"guided_json": SCHEMA}, "json_schema", CLEANED),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", CLEANED),
        ({"guided_regex": "a+/"}, "regex", "a+/"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"guided_grammar": 'start: "&~" ~ 2 .. 3'}, "lark", 'start: "&~" ~ 2 .. 3'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", CLEANED),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_schema", '{"type":"object"}'),
    ],
)  # fmt: skip
def test_each_form_is_a_grammar(values: dict[str, Any], kind: Any, text: str) -> None:
    guide = read_guide(fields(**values))
    assert guide is not None
    assert guide.grammar == Grammar(kind=kind, text=text)


@pytest.mark.parametrize(
    "values",
    [
        {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None},
        {"guided_choice": []}, {"guided_regex": ""}, {"structured_outputs": {}},
        {"response_format": {"type": "text"}, "guided_json": False},
    ],
)  # fmt: skip
def test_any_text_may_come_where_nothing_is_said(values: dict[str, Any]) -> None:
    assert read_guide(fields(**values)) is None


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": None}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": 1}}, "response_format.type"),
        ({"response_format": {"kind": "text"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}},
         "response_format.json_schema.name"),
        ({"guided_json": "not JSON"}, "guided_json"),
        ({"guided_json": [SCHEMA]}, "guided_json"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
        ({"guided_regex": "(?x)a # {"}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_regex": "a" * 200_000}, "guided_regex"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["a" * 2000]}, "guided_choice"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice"),
        ({"guided_grammar": 'start: %json {"type": "array"}'}, "guided_grammar"),
        ({"guided_grammar": "start: <[1-9]>"}, "guided_grammar"),
        ({"guided_grammar": 'start: A\nA: ~"a"'}, "guided_grammar"),
        ({"guided_grammar": 'start: A\nA: /a+/ & "a"'}, "guided_grammar"),
        ({"guided_grammar": 'start: T0\nT0: T1 T1\nT1: "a"{5000}'}, "guided_grammar"),
        ({"guided_grammar": "\n".join(f"r{i}: r{i + 1}" for i in range(1000))}, "guided_grammar"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(values: dict[str, Any], param: str) -> None:
    with pytest.raises(BlitzError) as caught:
        read_guide(fields(**values))
    assert 400 <= caught.value.http_status < 500
    assert caught.value.param == param
    assert len(caught.value.message) < 700
