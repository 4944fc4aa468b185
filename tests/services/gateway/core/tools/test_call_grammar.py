"""Answers that must be calls: what follows their grammar the family's parser reads as calls with valid arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import validate

from services.gateway.core.tools.call_grammar import call_schema, calls_grammar, calls_or_answer
from services.gateway.core.tools.hermes import HermesParser
from services.gateway.core.tools.llama import LlamaParser
from services.gateway.core.tools.mistral import MistralParser
from services.gateway.core.tools.parser import ToolParser
from services.gateway.core.tools.pythonic import PythonicParser
from services.worker.engine.grammar.matcher import GrammarMatcher
from tests.services.gateway.core.tools.reading import parser_of, read
from tests.services.worker.engine.grammar.vocabulary import allowed, compiler, encoded, text_of, walk

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bern"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}, "same": {"const": {"$ref": "#"}}},
        "required": ["tree", "same"],
        "additionalProperties": False,
        "$defs": {"tree": {"type": ["object", "null"], "properties": {"left": {"$ref": "#/$defs/tree"}},
                           "additionalProperties": False}},
    },
    "now": {"type": "object", "additionalProperties": False},
}  # fmt: skip
FAMILIES = [HermesParser, LlamaParser, MistralParser]
SPECIAL = 0
"""A token of the vocabulary that has no text."""


def answers(kind: type[ToolParser], marks: dict[str, int], *, parallel: bool, num: int = 12) -> list[list[int]]:
    grammar = calls_grammar(kind, call_schema(SCHEMAS, kind.arguments_field), marks, parallel=parallel)
    assert grammar is not None
    compiled = compiler().compile(grammar)
    found = []
    for seed in range(num):
        token_ids, whole = walk(GrammarMatcher(compiled), random.Random(seed))
        assert whole
        found.append([token_id for token_id in token_ids if token_id not in compiler().end_ids])
    return found


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_follows_the_grammar_is_calls_with_valid_arguments(kind: type[ToolParser], parallel: bool) -> None:
    numbers = set()
    for token_ids in answers(kind, {}, parallel=parallel):
        found = read(parser_of(kind), [text_of([token_id]) for token_id in token_ids])
        assert found.text == ""
        assert found.calls
        for name, arguments in found.calls:
            validate(json.loads(arguments), SCHEMAS[name])
        numbers.add(len(found.calls))
    assert (numbers == {1}) != parallel


@pytest.mark.parametrize("kind", [HermesParser, MistralParser])
def test_marks_that_are_special_tokens_are_written_as_such(kind: type[ToolParser]) -> None:
    begin = kind.starts[0]
    for token_ids in answers(kind, {begin: SPECIAL}, parallel=False, num=3):
        assert token_ids[0] == SPECIAL
        assert begin not in text_of(token_ids)
        parser = parser_of(kind)
        parts = [parser.mark(begin), parser.push(text_of(token_ids[1:])), parser.flush()]
        assert [delta.name for part in parts for delta in part.calls if delta.name]
        assert "".join(part.text for part in parts) == ""


@pytest.mark.parametrize("kind", FAMILIES)
def test_where_there_is_a_schema_too_it_is_calls_or_an_answer(kind: type[ToolParser]) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    any_call = {name: {"type": "object", "additionalProperties": False} for name in SCHEMAS}
    calls = calls_grammar(kind, call_schema(any_call, kind.arguments_field), {}, parallel=True)
    assert calls is not None
    compiled = compiler().compile(calls_or_answer(calls, schema))
    kinds = set()
    for seed in range(60):
        token_ids, whole = walk(GrammarMatcher(compiled), random.Random(seed))
        assert whole
        found = read(
            parser_of(kind), [text_of([token_id]) for token_id in token_ids if token_id not in compiler().end_ids]
        )
        kinds.add(bool(found.calls))
        if found.calls:
            assert found.text == ""
        else:
            validate(json.loads(found.text), schema)
    assert kinds == {True, False}


def test_calls_as_python_writes_them_cannot_be_asked_for() -> None:
    assert calls_grammar(PythonicParser, call_schema(SCHEMAS, "arguments"), {}, parallel=True) is None


def test_functions_may_have_as_many_members_as_schemas_may() -> None:
    many = {"type": "object", "properties": {f"member{n}": {"type": "integer"} for n in range(240)}}
    grammar = calls_grammar(HermesParser, call_schema({"f": many}, "arguments"), {}, parallel=True)
    assert grammar is not None
    matcher = GrammarMatcher(compiler().compile(grammar))
    matcher.replay(encoded('<tool_call>\n{"name": "f", "arguments": {"member7": 1, '))
    assert allowed(matcher)


def test_members_may_be_called_as_keywords_are() -> None:
    schema = {"properties": {"const": {"$ref": "#/$defs/enum"}}, "$defs": {"enum": {"type": "null"}}}
    moved = call_schema({"f": schema}, "arguments")["$defs"]["f0"]
    assert moved["properties"] == {"const": {"$ref": "#/$defs/f0/$defs/enum"}}


def test_references_lead_where_they_led_and_data_stays_as_it_is() -> None:
    schema = call_schema(SCHEMAS, "arguments")
    tree = schema["$defs"]["f1"]
    assert tree["properties"]["tree"] == {"$ref": "#/$defs/f1/$defs/tree"}
    assert tree["properties"]["same"] == {"const": {"$ref": "#"}}
