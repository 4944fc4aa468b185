"""Masks, ends, replays and errors of one request's grammar."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from services.worker.engine.grammar.compiler import GrammarCompiler
from services.worker.engine.grammar.matcher import GrammarMatcher
from shared.errors import BadCheckpoint, BadRequest, Internal
from shared.messages.generation import Grammar
from tests.services.worker.engine.grammar.vocabulary import (
    ALSO_END,
    END,
    VOCAB_SIZE,
    allowed,
    compiler,
    encoded,
    matcher_of,
    new_mask,
    text_of,
    tokenizer,
    walk,
)

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "yé"]}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
TOO_COSTLY = "((a|b|ab|ba|aab){1,1000}c?){1,1000}"
"""Compiles, and some masks later meets a limit."""


def test_the_ends_are_allowed_exactly_where_the_grammar_may_end() -> None:
    matcher = matcher_of("regex", "ab*")
    assert not matcher.may_end
    assert not {END, ALSO_END} & set(allowed(matcher))
    matcher.accept(encoded("a")[0])
    assert matcher.may_end
    assert not matcher.is_complete
    assert {END, ALSO_END} < set(allowed(matcher))
    matcher.accept(ALSO_END)
    assert matcher.is_complete
    with pytest.raises(Internal, match="behind the end"):
        matcher.accept(encoded("b")[0])


def test_what_nothing_may_follow_is_complete_without_an_end() -> None:
    matcher = matcher_of("choice", '["yes", "no"]')
    matcher.replay(encoded("yes"))
    assert matcher.is_complete
    assert matcher.may_end
    assert allowed(matcher) == [END, ALSO_END]


def test_a_choice_may_begin_another() -> None:
    matcher = matcher_of("choice", '["yes", "yes, please"]')
    matcher.replay(encoded("yes"))
    assert matcher.may_end
    assert not matcher.is_complete
    matcher.replay(encoded(", please"))
    assert matcher.is_complete


@pytest.mark.parametrize(
    "choice", ["a", "a/b", "\\", '"', "\x7f", "\x00", "a\nb", "é", "\U0001f600", "#//", "${x}", "\u2028", "'"]
)
def test_any_text_may_be_a_choice(choice: str) -> None:
    matcher = matcher_of("choice", json.dumps([choice, "other"]))
    matcher.replay(encoded(choice))
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("a/b", "a/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), (r"a\nb", "a\nb"), ("a\\\nb", "a\nb"), (r"\\/", "\\/"),
        (r"[/\d]{2}", "/1"), ("#x", "#x"), ("", ""), ("(?i)ab", "Ab"), (r"\\\\/", r"\\/"), ("a  b", "a  b"),
    ],
)  # fmt: skip
def test_expressions_mean_what_they_mean_in_python(expression: str, text: str) -> None:
    assert re.fullmatch(expression, text)
    matcher = matcher_of("regex", expression)
    matcher.replay(encoded(text))
    assert matcher.may_end


def test_a_mask_has_no_ids_behind_the_vocabulary() -> None:
    matcher = matcher_of("regex", "(.|\n)*")
    ids = allowed(matcher)
    assert max(ids) < tokenizer().get_vocab_size()
    assert 0 not in ids, "a special token is no text"


def test_each_step_of_a_replay_has_the_masks_of_the_one_that_lived() -> None:
    draw = random.Random(3)
    matcher = matcher_of("json_schema", SCHEMA)
    masks, token_ids = [], []
    while not matcher.is_complete and len(token_ids) < 200:
        masks.append(allowed(matcher))
        token_ids.append(draw.choice([i for i in masks[-1] if i not in (END, ALSO_END)]))
        matcher.accept(token_ids[-1])
    for cut, mask in enumerate(masks):
        again = matcher_of("json_schema", SCHEMA)
        again.replay(token_ids[:cut])
        assert allowed(again) == mask


def test_a_replay_may_contain_the_end() -> None:
    matcher = matcher_of("regex", "ab*")
    matcher.replay([*encoded("abb"), END])
    assert matcher.is_complete


@pytest.mark.parametrize("token_id", [0, END, VOCAB_SIZE - 1, VOCAB_SIZE, 2**40, -1])
def test_a_token_that_does_not_fit_is_an_error_of_its_row_alone(token_id: int) -> None:
    other = matcher_of("json_schema", SCHEMA)
    with pytest.raises(Internal):
        matcher_of("json_schema", SCHEMA).accept(token_id)
    token_ids, ended = walk(other, random.Random(1))
    assert ended
    json.loads(text_of(token_ids))


def test_a_limit_is_an_error_of_its_row_and_others_of_the_grammar_go_on() -> None:
    other = matcher_of("regex", TOO_COSTLY)
    draw, costly = random.Random(0), matcher_of("regex", TOO_COSTLY)

    def write() -> None:
        for _ in range(500):
            allowed(costly)
            costly.accept(encoded(draw.choice("ab"))[0])

    with pytest.raises(BadRequest, match="response_format") as caught:
        write()
    assert caught.value.param == "response_format"
    assert encoded("a")[0] in allowed(other)
    other.accept(encoded("a")[0])
    assert encoded("b")[0] in allowed(other)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"), ("json_schema", "[]"), ("json_schema", '{"type": "king"}'), ("json_schema", "[" * 9999),
        ("json_schema", '{"type": "array", "uniqueItems": true}'), ("regex", "("), ("regex", "(?=a)a"),
        ("regex", "a\\"), ("choice", "[1]"), ("lark", "start: ("), ("lark", ""), ("lark", "start: <|end|>x"),
        ("json_schema", '{"enum": []}'),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused(kind: str, text: str) -> None:
    with pytest.raises(BadRequest, match="response_format"):
        matcher_of(kind, text)


def test_a_grammar_that_nothing_follows_is_an_error_at_its_first_mask() -> None:
    matcher = matcher_of("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}')
    with pytest.raises(BadRequest):
        allowed(matcher)


def test_the_least_recently_used_grammars_go() -> None:
    raw = tokenizer().to_str().encode()
    few = GrammarCompiler(raw, vocab_size=VOCAB_SIZE, end_ids=(END,), max_cache_bytes=10 * 2**20)
    first, second, third = (Grammar(kind="regex", text=text) for text in "abc")
    kept = few.compile(first)
    forgotten = few.compile(second)
    assert few.compile(first) is kept
    few.compile(third)
    assert few.compile(first) is kept
    assert few.compile(second) is not forgotten
    assert few.cached_bytes <= 10 * 2**20


@pytest.mark.parametrize(
    ("raw", "vocab_size", "ends"),
    [
        (b"", 10, (1,)), (b"byte", 300, (1,)), (b"/etc/passwd", 10, (1,)), (b"{}", 10, (1,)), (b"\xff{", 10, (1,)),
        (None, 10, (1,)), (None, VOCAB_SIZE, (VOCAB_SIZE - 1,)), (None, VOCAB_SIZE, (-1,)),
        (None, VOCAB_SIZE, (2**40,)),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_read_is_refused(raw: bytes | None, vocab_size: int, ends: tuple[int, ...]) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        GrammarCompiler(raw if raw is not None else tokenizer().to_str().encode(), vocab_size=vocab_size, end_ids=ends)


def test_without_ends_no_token_ends_an_answer() -> None:
    endless = GrammarCompiler(tokenizer().to_str().encode(), vocab_size=VOCAB_SIZE, end_ids=())
    matcher = GrammarMatcher(endless.compile(Grammar(kind="regex", text="ab*")))
    matcher.accept(encoded("a")[0])
    assert matcher.may_end
    ids = allowed(matcher)
    assert encoded("b")[0] in ids
    assert not {0, 1, 2} & set(ids)


def goes_on_during(call: Callable[[], object]) -> bool:
    """Whether this thread computes in the middle of what another one does."""
    took: list[tuple[float, float]] = []

    def other() -> None:
        began_s = time.perf_counter()
        call()
        took.append((began_s, time.perf_counter()))

    thread = threading.Thread(target=other)
    thread.start()
    at_s = [time.perf_counter()]
    while not took:
        at_s.append(time.perf_counter())
    thread.join()
    began_s, ended_s = took[0]
    quarter_s = (ended_s - began_s) / 4
    return any(began_s + quarter_s < now_s < ended_s - quarter_s for now_s in at_s)


def test_compiling_and_masks_release_the_interpreter() -> None:
    long = "".join(random.Random(0).choices("abcdefgh", k=4000))
    schema = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}})

    def compiles(number: int) -> Callable[[], object]:
        grammar = Grammar(kind="json_schema", text=schema.replace("p0", f"q{number}"))
        return lambda: compiler().compile(grammar)

    def masks(number: int) -> Callable[[], object]:
        matcher = matcher_of("regex", f"{long}{number}")
        return lambda: matcher.mask(new_mask())

    # Now and then the machine is busy with something else.
    assert any(goes_on_during(compiles(number)) for number in range(50))
    assert any(goes_on_during(masks(number)) for number in range(50))


def test_masks_of_several_answers_may_be_computed_at_once() -> None:
    matchers = [matcher_of("json_schema", SCHEMA) for _ in range(8)]
    matchers += [matcher_of("json_schema", SCHEMA.replace("yé", f"y{i}")) for i in range(8)]
    alone = [allowed(matcher) for matcher in matchers]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert list(pool.map(allowed, matchers)) == alone


def test_a_mask_takes_one_piece_of_the_right_size() -> None:
    matcher = matcher_of("regex", "a")
    with pytest.raises(ValueError, match="size"):
        matcher.mask(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="one piece"):
        matcher.mask(np.zeros((len(new_mask()), 2), np.int32)[:, 0])
