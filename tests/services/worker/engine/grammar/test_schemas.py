"""What follows a schema's masks, token by token, is what an independent validator takes."""

from __future__ import annotations

import datetime
import json
import random
import re
from typing import Any

import jsonschema
import msgspec
import pytest

from services.gateway.request_bodies.grammar_check import why_not
from services.gateway.request_bodies.schema_check import enforced_schema
from services.worker.engine.grammar.matcher import GrammarMatcher
from shared.messages.generation import Grammar
from tests.services.worker.engine.grammar.schemas import schemas
from tests.services.worker.engine.grammar.vocabulary import allowed, compiler, matcher_of, text_of, walk

SCHEMAS = schemas()
SEEDS = 2
MAX_TOKENS = 2000

FORMATS = jsonschema.FormatChecker(())


@FORMATS.checks("date")
def _is_date(value: object) -> bool:
    """The 29th of February of any year is one, to the grammar."""
    return not isinstance(value, str) or bool(_date(value))


@FORMATS.checks("time")
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or bool(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)", value))


@FORMATS.checks("date-time")
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or (_date(value[:10]) and value[10] in "tT" and _is_time(value[11:]))


@FORMATS.checks("uuid")
def _is_uuid(value: object) -> bool:
    return not isinstance(value, str) or bool(re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value))


@FORMATS.checks("email")
def _is_email(value: object) -> bool:
    return not isinstance(value, str) or bool(re.fullmatch(r"[^@\s]+@[^@\s]+", value))


@FORMATS.checks("duration")
def _is_duration(value: object) -> bool:
    return not isinstance(value, str) or bool(re.fullmatch(r"P(?=.)(\d+[YMWD])*(T(\d+[HMS])+)?", value))


def _date(value: str) -> bool:
    try:
        datetime.date.fromisoformat(value.replace("0000", "2000", 1).replace("-02-29", "-02-28"))
    except ValueError:
        return False
    return True


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind="json_schema", text=msgspec.json.encode(enforced_schema(schema)).decode())


def _int(digits: str) -> int:
    """A random walk may write more digits than Python reads."""
    return int(digits if len(digits) < 4000 else digits[-4000:])


def check(schema: dict[str, Any], text: str) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text, parse_int=_int))


@pytest.mark.parametrize("part", range(10))
def test_whatever_ends_by_itself_is_valid(part: int) -> None:
    ended = walks = 0
    for number in range(part, len(SCHEMAS), 10):
        schema = SCHEMAS[number]
        grammar = grammar_of(schema)
        assert why_not(grammar) == "", schema
        for seed in range(SEEDS):
            matcher = GrammarMatcher(compiler().compile(grammar))
            token_ids, whole = walk(matcher, random.Random(seed), max_tokens=MAX_TOKENS)
            walks += 1
            if whole:
                ended += 1
                check(schema, text_of(token_ids))
    print(f"{walks - ended} of {walks} did not end within {MAX_TOKENS} tokens")  # noqa: T201
    assert ended > walks / 2


@pytest.mark.parametrize("number", range(0, 300, 25))
def test_each_cut_of_an_answer_has_the_masks_of_the_one_that_lived(number: int) -> None:
    compiled = compiler().compile(grammar_of(SCHEMAS[number]))
    matcher, draw = GrammarMatcher(compiled), random.Random(number)
    token_ids, _ = walk(matcher, draw, max_tokens=60)
    living = GrammarMatcher(compiled)
    for cut, token_id in enumerate(token_ids):
        again = GrammarMatcher(compiled)
        again.replay(token_ids[:cut])
        assert (allowed(again), again.may_end, again.is_complete) == (
            allowed(living), living.may_end, living.is_complete,
        )  # fmt: skip
        living.accept(token_id)


EXPRESSIONS = [
    "[a-z]{3,9}", "[0-9]{4}-[0-9]{2}-[0-9]{2}", "(yes|no|maybe)( please)?", "[A-Z][a-z0-9_]*", "a/b+",
    r"\+[0-9]{1,3} [0-9]{4,10}", "x*",
    r"(\{\"a\": [0-9]+\}\n)+", "[^a]{2}", "é+|ü",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_whatever_follows_an_expression_matches_it(expression: str) -> None:
    ended = 0
    for seed in range(20):
        token_ids, whole = walk(matcher_of("regex", expression), random.Random(seed), max_tokens=200)
        if whole:
            ended += 1
            assert re.fullmatch(expression, text_of(token_ids))
    assert ended


def test_whatever_follows_choices_is_one_of_them() -> None:
    choices = ["red", "green", "greenish", "blue\n", '"', "été", "a b"]
    found = set()
    for seed in range(60):
        token_ids, whole = walk(matcher_of("choice", json.dumps(choices)), random.Random(seed))
        assert whole
        found.add(text_of(token_ids))
    assert found == set(choices)


def test_whatever_follows_lark_is_of_its_rules() -> None:
    lark = 'start: sum\nsum: NUMBER ("+" | "-") NUMBER | "(" sum ")"\nNUMBER: /[1-9][0-9]{0,2}/\n'
    for seed in range(30):
        token_ids, whole = walk(matcher_of("lark", lark), random.Random(seed), max_tokens=100)
        if whole:
            assert re.fullmatch(r"\(*[1-9]\d{0,2}[+-][1-9]\d{0,2}\)*", text_of(token_ids))
