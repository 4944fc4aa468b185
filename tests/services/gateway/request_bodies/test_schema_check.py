"""Keyword by keyword: enforced by the masks, or refused by its name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

from services.gateway.request_bodies.grammar_check import check_grammar, why_not
from services.gateway.request_bodies.guided import GuidedFields, read_guide
from services.gateway.request_bodies.schema_check import ANNOTATIONS, ENFORCED, SchemaError, enforced_schema
from services.worker.engine.grammar.matcher import GrammarMatcher
from shared.errors import BadRequest, Internal
from tests.services.worker.engine.grammar.vocabulary import compiler, encoded

OBJECT = {"type": "object"}
PET = {"type": "object", "required": ["kind"], "additionalProperties": False}
CAT, DOG = ({**PET, "properties": {"kind": {"const": kind}}} for kind in ("cat", "dog"))

ROWS: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("type", {"type": "integer"}, 1, "a"),
    ("type", {"type": ["string", "null"]}, None, 1),
    ("enum", {"enum": ["a", 2, None]}, 2, 3),
    ("const", {"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    ("properties", {**OBJECT, "properties": {"a": {"type": "null"}}}, {"a": None}, {"a": 1}),
    ("required", {**OBJECT, "properties": {"a": {}}, "required": ["a"]}, {"a": 1}, {}),
    ("additionalProperties", {**OBJECT, "additionalProperties": False}, {}, {"a": 1}),
    ("additionalProperties", {**OBJECT, "additionalProperties": {"type": "null"}}, {"a": None}, {"a": 1}),
    ("patternProperties", {**OBJECT, "patternProperties": {"^a": {"type": "null"}}}, {"ab": None}, {"ab": 1}),
    ("minProperties", {**OBJECT, "minProperties": 1}, {"a": 1}, {}),
    ("maxProperties", {**OBJECT, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    ("items", {"type": "array", "items": {"type": "null"}}, [None], [1]),
    ("prefixItems", {"type": "array", "prefixItems": [{"type": "null"}]}, [None, 1], [1]),
    ("minItems", {"type": "array", "minItems": 2}, [1, 2], [1]),
    ("maxItems", {"type": "array", "maxItems": 1}, [1], [1, 2]),
    ("minLength", {"type": "string", "minLength": 2}, "é\n", "a"),
    ("maxLength", {"type": "string", "maxLength": 2}, "é\n", "abc"),
    ("pattern", {"type": "string", "pattern": "^a/b+$"}, "a/bb", "a/"),
    ("format", {"type": "string", "format": "date"}, "2024-02-29", "2024-13-01"),
    ("minimum", {"type": "integer", "minimum": 5}, 5, 4),
    ("maximum", {"type": "number", "maximum": 5}, 5, 5.5),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 5}, 6, 5),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 5}, 4.9, 5),
    ("multipleOf", {"type": "integer", "multipleOf": 5}, 15, 16),
    ("anyOf", {"anyOf": [{"type": "null"}, {"const": 1}]}, 1, 2),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3, 2),
    ("oneOf", {"oneOf": [CAT, DOG]}, {"kind": "dog"}, {"kind": "fox"}),
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, 1, 2),
    ("$defs", {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"const": 1}}}, 1, 2),
    ("definitions", {"$ref": "#/definitions/a", "definitions": {"a": {"const": 1}}}, 1, 2),
]  # fmt: skip


def follows(schema: dict[str, Any], value: Any) -> bool:
    guide = read_guide(GuidedFields(guided_json=msgspec.Raw(json.dumps(schema).encode())))
    assert guide is not None
    assert why_not(guide.grammar) == ""
    matcher = GrammarMatcher(compiler().compile(guide.grammar))
    try:
        matcher.replay(encoded(json.dumps(value, ensure_ascii=False)))
    except Internal:
        return False
    return matcher.may_end


@pytest.mark.parametrize(("keyword", "schema", "good", "bad"), ROWS)
def test_what_is_taken_is_enforced(keyword: str, schema: dict[str, Any], good: Any, bad: Any) -> None:
    assert follows(schema, good)
    assert not follows(schema, bad)


def test_there_is_a_row_of_every_keyword_that_is_taken() -> None:
    assert {keyword for keyword, *_ in ROWS} == ENFORCED


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS))
def test_annotations_are_passed_over(keyword: str) -> None:
    assert follows({"type": "integer", keyword: "https://json-schema.org/draft-07/schema#"}, 1)


NOT_ENFORCED = [
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "propertyNames", "contains",
    "minContains", "maxContains", "uniqueItems", "additionalItems", "unevaluatedItems", "unevaluatedProperties",
    "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$vocabulary", "contentEncoding", "contentSchema",
    "nullable", "x-guidance", "x-anything", "id", "typo",
]  # fmt: skip


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
def test_what_is_not_enforced_is_refused_by_name(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", keyword: {}}}}
    with pytest.raises(BadRequest, match="not supported") as caught:
        follows(schema, {})
    assert caught.value.param == f"guided_json.properties.a.{keyword}"


@pytest.mark.parametrize(
    ("at", "schema"),
    [
        (".oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        (".oneOf", {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}} for k in "ab"]}),
        (".oneOf", {"oneOf": [{"const": 1}, {"const": 1.0}]}),
        (".$ref", {"$ref": "#/$defs/none"}),
        (".$ref", {"$ref": "https://example.org/a"}),
        (".$ref", {"$ref": "#/$defs/a/default", "$defs": {"a": {"default": {"not": {}}}}}),
        (".oneOf[0].$ref", {"oneOf": [{"$ref": "#/$defs/" + "1" * 5000}], "discriminator": {"propertyName": "k"}}),
        (".oneOf[0].$ref", {"oneOf": [{"$ref": "#/oneOf/" + "1" * 5000}], "discriminator": {"propertyName": "k"}}),
        (".minProperties", {"type": "object", "minProperties": 2}),
        (".const", {"const": 2**53 + 1}),
        (".exclusiveMinimum", {"minimum": 1, "exclusiveMinimum": True}),
        (".items", {"items": [{"type": "string"}]}),
        (".format", {"type": "string", "format": "password"}),
        (".multipleOf", {"multipleOf": 99991}),
        ("", {"allOf": [{"multipleOf": 9}, {"anyOf": [{"multipleOf": 5}, {"multipleOf": 16}]}]}),
        (".items", {"items": {"$ref": "#/items/$defs/a", "multipleOf": 9, "$defs": {"a": {"multipleOf": 16}}}}),
        ("", {"allOf": [{"items": {"multipleOf": 9}}, {"items": {"items": {"multipleOf": 16}}}]}),
        ("", {"allOf": [{"items": {"$ref": "#"}}, {"items": {"multipleOf": 9, "items": {"multipleOf": 16}}}]}),
        (".properties.a", {"properties": {"a": {"allOf": [{"pattern": letter} for letter in "abcde"]}}}),
        ("", {"enum": [str(number) for number in range(300)], "pattern": "^1"}),
        (".minItems", {"minItems": 10**9}),
        (".pattern", {"pattern": "(a{99}){99}"}),
        (".type", {"type": "king"}),
        ("", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(at: str, schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        read_and_check(schema)
    assert caught.value.param == f"guided_json{at}"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string", "format": name} for name in ("date", "time", "uri", "email", "uuid")]},
        {"properties": {"a": {"$ref": "#"}, **{f"p{i}": {"type": "string", "pattern": f"^{i}"} for i in range(9)}}},
        {"properties": {"a": {"enum": [str(i) for i in range(300)]}, "b": {"type": "string", "format": "date"}}},
        {"properties": {f"p{i}": {"type": "integer", "multipleOf": i} for i in (7, 9, 11, 13)}},
        {"allOf": [{"multipleOf": 0.01}, {"multipleOf": 5}, {"multipleOf": 0.1}]},
        {"allOf": [{"properties": {"a": {"type": "string", "format": "date"}}},
                   {"properties": {"b": {"type": "string", "pattern": "^b"}}}]},
    ],
)  # fmt: skip
def test_what_is_asked_of_different_values_does_not_add_up(schema: dict[str, Any]) -> None:
    read_and_check(schema)


def read_and_check(schema: dict[str, Any]) -> None:
    guide = read_guide(GuidedFields(guided_json=msgspec.Raw(json.dumps(schema).encode())))
    assert guide is not None
    check_grammar(guide.grammar, guide.param)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_the_tags_of_pydantics_unions_may_have_defaults() -> None:
    given = Owner.model_json_schema()
    before = json.dumps(given)
    found = enforced_schema(given)
    assert [found["$defs"][name]["required"] for name in ("Cat", "Dog")] == [["kind"], ["kind"]]
    assert json.dumps(given) == before, "a template is given the same"
    del given["properties"]["pet"]["discriminator"]
    with pytest.raises(SchemaError, match="may both hold"):
        enforced_schema(given)
