"""Answers behind a thought: what follows the grammar the parser reads as a thought and an answer as asked for."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from functools import lru_cache

import pytest
from tokenizers import AddedToken, Tokenizer

from services.gateway.core.call_output import AnswerParser
from services.gateway.core.thought_grammar import behind_thought
from services.gateway.core.thoughts import PlainText, Thinking, ThoughtFormat, ThoughtParser
from services.gateway.core.tools.call_grammar import call_schema, calls_grammar
from services.gateway.core.tools.hermes import HermesParser
from services.gateway.request_bodies.grammar_check import why_not
from services.worker.engine.grammar.compiler import GrammarCompiler
from services.worker.engine.grammar.matcher import GrammarMatcher
from shared.errors import Internal
from shared.messages.generation import MAX_BEFORE_BYTES, Grammar
from tests.services.worker.engine.grammar.vocabulary import END, VOCAB_SIZE, allowed, encoded, text_of, tokenizer, walk

OPEN, MAYBE = Thinking(ThoughtFormat(), is_open=True), Thinking(ThoughtFormat(), is_open=False)
MARKS = ("<think>", "</think>")
HOW = ["text", "added", "special"]
"""What the marks are: text, tokens that are shown, tokens that are not."""
THOUGHT = '\nhm {"n": 5} <thin </thin <'
SCHEMA = {"properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False, "type": "object"}  # fmt: skip


def is_object(text: str) -> bool:
    return 0 <= json.loads(text)["n"] <= 99


KINDS: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "json_schema": (Grammar(kind="json_schema", text=json.dumps(SCHEMA)), is_object),
    "regex": (Grammar(kind="regex", text="[a-c]{3}"), lambda text: re.fullmatch("[a-c]{3}", text)),
    "choice": (Grammar(kind="choice", text='[" yes", "no"]'), lambda text: text in (" yes", "no")),
    "lark": (Grammar(kind="lark", text='start: open\nopen: "<" thought\nthought: /x+/ "y"'),
             lambda text: re.fullmatch("<x+y", text)),
}  # fmt: skip


@lru_cache
def compiler_of(how: str) -> GrammarCompiler:
    made = Tokenizer.from_str(tokenizer().to_str())
    if how != "text":
        made.add_tokens([AddedToken(text, special=how == "special") for text in MARKS])
    return GrammarCompiler(made.to_str().encode(), vocab_size=VOCAB_SIZE, end_ids=(END,))


def marks_of(how: str) -> dict[str, int]:
    return {} if how == "text" else dict(zip(MARKS, (1000, 1001), strict=True))


def matcher_of(grammar: Grammar, thinking: Thinking, how: str) -> GrammarMatcher:
    return GrammarMatcher(compiler_of(how).compile(behind_thought(grammar, thinking, marks_of(how))))


def thought_ids(thinking: Thinking, how: str, *, as_text: bool = False, thought: str = THOUGHT) -> list[int]:
    """A whole thought, with its marks as the tokenizer has them, or as text."""
    marks = {} if as_text else marks_of(how)
    begin, end = ([marks[mark]] if mark in marks else encoded(mark) for mark in MARKS)
    return [*([] if thinking.is_open else begin), *encoded(thought), *end]


def read(token_ids: list[int], thinking: Thinking, answer: AnswerParser, how: str) -> tuple[str, str, int]:
    parser, ids = ThoughtParser(thinking, answer), {i: mark for mark, i in marks_of(how).items()}
    parts = [parser.mark(ids[i]) if i in ids else parser.push(text_of([i])) for i in token_ids]
    parts.append(parser.flush())
    return "".join(p.thought for p in parts), "".join(p.text for p in parts), sum(len(p.calls) for p in parts)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_as_asked_for_behind_the_thought(kind: str, how: str) -> None:
    grammar, holds = KINDS[kind]
    for thinking, as_text, gap, seed in itertools.product((OPEN, MAYBE), (False, True), ("", "\n", "\n\n"), range(3)):
        matcher = matcher_of(grammar, thinking, how)
        before = [*thought_ids(thinking, how, as_text=as_text), *encoded(gap)]
        matcher.replay(before)
        answer, whole = walk(matcher, random.Random(seed))
        assert whole
        thought, text, _ = read([*before, *answer], thinking, PlainText(), how)
        assert (thought, bool(holds(text))) == (THOUGHT.strip(), True), text


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("thinking", [OPEN, MAYBE])
def test_nothing_ends_inside_of_a_thought_and_all_else_may_come(thinking: Thinking, how: str) -> None:
    matcher = matcher_of(KINDS["json_schema"][0], thinking, how)
    ids = thought_ids(thinking, how)[:-1]
    matcher.replay(ids)
    may = set(allowed(matcher))
    assert END not in may
    assert set(encoded("".join(map(chr, range(32, 127))))) <= may
    assert all(token_id in may for mark, token_id in marks_of(how).items() if mark == "</think>")


@pytest.mark.parametrize("how", HOW)
def test_a_thought_that_a_model_opens_itself_may_be_missing(how: str) -> None:
    for kind, first in {"json_schema": "{", "regex": "a", "choice": "n", "lark": "<x"}.items():
        grammar, holds = KINDS[kind]
        matcher = matcher_of(grammar, MAYBE, how)
        may = set(allowed(matcher))
        assert encoded("<")[0] in may
        assert may >= {token_id for mark, token_id in marks_of(how).items() if mark == "<think>"}
        matcher.replay(encoded(first))
        answer, whole = walk(matcher, random.Random(1))
        assert whole
        thought, text, _ = read([*encoded(first), *answer], MAYBE, PlainText(), how)
        assert (thought, bool(holds(text))) == ("", True)


@pytest.mark.parametrize("how", HOW)
def test_a_thought_comes_first_also_where_an_answer_could_begin_so(how: str) -> None:
    anything = Grammar(kind="regex", text=r"(?s:.*)")
    matcher = matcher_of(anything, MAYBE, how)
    matcher.replay(encoded("<think>"))
    assert END not in allowed(matcher)
    matcher.replay(encoded("a</think>"))
    assert END in allowed(matcher)


def test_an_answer_may_not_come_before_the_thought_has_ended() -> None:
    matcher = matcher_of(KINDS["regex"][0], OPEN, "special")
    matcher.replay(encoded("abc"))
    assert not matcher.is_complete
    matcher.accept(1001)
    with pytest.raises(Internal, match="does not follow"):
        matcher.replay(encoded("x"))


@pytest.mark.parametrize("how", ["added", "special"])
def test_a_model_may_write_again_what_the_prompt_ends_with(how: str) -> None:
    matcher = matcher_of(KINDS["regex"][0], OPEN, how)
    ids = [1000, *encoded("hm"), 1001, *encoded("\n\nabc")]
    matcher.replay(ids)
    assert matcher.is_complete
    assert read(ids, OPEN, PlainText(), how) == ("hm", "abc", 0)


@pytest.mark.parametrize("how", HOW)
def test_a_call_is_made_behind_the_thought(how: str) -> None:
    grammar = calls_grammar(HermesParser, call_schema({"f": SCHEMA}, "arguments"), {}, parallel=False)
    assert grammar is not None
    for thinking in (OPEN, MAYBE):
        matcher = matcher_of(grammar, thinking, how)
        before = [*thought_ids(thinking, how, thought="I call <tool_call>\n{}"), *encoded("\n\n")]
        matcher.replay(before)
        answer, whole = walk(matcher, random.Random(0))
        assert whole
        thought, text, num_deltas = read([*before, *answer], thinking, HermesParser({"f"}, str, parallel=True), how)
        assert (thought, text) == ("I call <tool_call>\n{}", "")
        assert num_deltas > 1


def test_a_long_thought_costs_no_more_than_a_short_one() -> None:
    for how in HOW:
        matcher = matcher_of(KINDS["json_schema"][0], OPEN, how)
        matcher.replay(encoded("ab <é\n") * 5000)
        matcher.replay([*thought_ids(OPEN, how), *encoded('{"n": 5}')])
        assert matcher.is_complete


def test_it_is_bounded_and_gateways_check_it() -> None:
    for thinking in (OPEN, MAYBE):
        made = behind_thought(KINDS["regex"][0], thinking, dict(zip(MARKS, (2**31, 2**31), strict=True)))
        assert len(made.before.encode()) < MAX_BEFORE_BYTES // 2
        assert why_not(behind_thought(KINDS["regex"][0], thinking, {})) == ""
        assert why_not(behind_thought(Grammar(kind="regex", text="(a"), thinking, {}))
