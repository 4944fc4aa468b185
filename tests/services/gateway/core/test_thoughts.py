"""Thoughts, told apart from answers however the text is cut, and the tokens that they take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from services.gateway.core.call_output import AnswerParser
from services.gateway.core.text_output import ByteDetokenizer, StopScanner
from services.gateway.core.thinking_output import ThinkingOutput
from services.gateway.core.thoughts import (
    MAX_BLANKS,
    PlainText,
    Thinking,
    ThoughtFormat,
    ThoughtParser,
    chosen_format,
    format_in,
)
from services.gateway.core.tools.hermes import HermesParser

THINK = ThoughtFormat()
OPEN, MAYBE = Thinking(THINK, is_open=True), Thinking(THINK, is_open=False)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
Case = tuple[Thinking, str, str, str, list[tuple[str, str]]]
"""What the output begins with, what is written, and what comes of it: a thought, text, calls."""
CASES: list[Case] = [
    (OPEN, "hm\n</think>\n\nhi\n", "hm", "hi\n", []),
    (OPEN, "\n hm\n\n ho \n</think>hi", "hm\n\n ho", "hi", []),
    (OPEN, "<think>\nhm</think>hi", "hm", "hi", []),
    (OPEN, "\n<think>hm</think>hi", "hm", "hi", []),
    (OPEN, "</think>hi", "", "hi", []),
    (OPEN, " \n</think>\n", "", "", []),
    (OPEN, "hm", "hm", "", []),
    (OPEN, "hm </thin", "hm </thin", "", []),
    (OPEN, "<thin", "<thin", "", []),
    (OPEN, "a <think> b </thi </think> c </think> d", "a <think> b </thi", " c </think> d", []),
    (OPEN, "hm</think>\r\n\n yes", "hm", " yes", []),
    (OPEN, "a < b << </</think>c", "a < b << </", "c", []),
    (OPEN, f"I call {CALL} then</think>\n\n{CALL}", f"I call {CALL} then", "", [("add", '{"a": 1}')]),
    (OPEN, f"hm</think>so: {CALL}", "hm", "so: ", [("add", '{"a": 1}')]),
    (OPEN, CALL, CALL, "", []),
    (MAYBE, "<think>\nhm\n</think>\n\nhi", "hm", "hi", []),
    (MAYBE, "\n <think>hm</think>hi", "hm", "hi", []),
    (MAYBE, "<think></think>hi", "", "hi", []),
    (MAYBE, "<think>\n\n</think>\n\nhi", "", "hi", []),
    (MAYBE, "<think>hm", "hm", "", []),
    (MAYBE, "hi", "", "hi", []),
    (MAYBE, "\n hi <think>no</think>", "", "\n hi <think>no</think>", []),
    (MAYBE, "<thinking>hi", "", "<thinking>hi", []),
    (MAYBE, "<thin", "", "<thin", []),
    (MAYBE, " ", "", " ", []),
    (MAYBE, "", "", "", []),
    (MAYBE, CALL, "", "", [("add", '{"a": 1}')]),
    (MAYBE, f"<think>{CALL}</think>{CALL}", CALL, "", [("add", '{"a": 1}')]),
    (MAYBE, " " * (MAX_BLANKS + 1) + "<think>a</think>", "", " " * (MAX_BLANKS + 1) + "<think>a</think>", []),
    (MAYBE, " " * MAX_BLANKS + "<think>a</think>b", "a", "b", []),
    (OPEN, "a" + "\n" * (MAX_BLANKS + 3) + "</think>b", "a\n\n\n", "b", []),
    (OPEN, "\n" * 3 * MAX_BLANKS + "a</think>b", "a", "b", []),
]


def parser_of(thinking: Thinking, *, tools: bool = True) -> ThoughtParser:
    ids = (f"c{number}" for number in itertools.count())
    answer: AnswerParser = HermesParser({"add"}, lambda: next(ids), parallel=True) if tools else PlainText()
    return ThoughtParser(thinking, answer)


def read(thinking: Thinking, pieces: Sequence[str], *, tools: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    parser = parser_of(thinking, tools=tools)
    thought, text, calls = "", "", list[tuple[str, str]]()
    for parsed in (*map(parser.push, pieces), parser.flush()):
        assert not parsed.thought or not (text or calls), "a thought comes first"
        thought, text = thought + parsed.thought, text + parsed.text
        for delta in parsed.calls:
            if delta.name:
                calls.append((delta.name, ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return thought, text, calls


@pytest.mark.parametrize(("thinking", "written", "thought", "text", "calls"), CASES)
def test_it_is_the_same_however_the_text_is_cut(
    thinking: Thinking, written: str, thought: str, text: str, calls: list[tuple[str, str]]
) -> None:
    expected = (thought, text, calls)
    assert read(thinking, [written]) == expected
    assert read(thinking, list(written)) == expected
    for cut in range(len(written)):
        assert read(thinking, [written[:cut], written[cut:]]) == expected, cut
    if len(written) < 60:
        for one, two in itertools.combinations(range(len(written)), 2):
            assert read(thinking, [written[:one], written[one:two], written[two:]]) == expected, (one, two)


def test_without_tools_a_call_is_text() -> None:
    for thinking, written in ((OPEN, f"hm</think>{CALL}"), (MAYBE, f"<think>hm</think>{CALL}")):
        assert read(thinking, list(written), tools=False) == ("hm", CALL, [])


def test_a_thought_goes_out_as_it_comes() -> None:
    parser = parser_of(OPEN)
    assert [parser.push(piece).thought for piece in ("\n", "a", " ", "\n", "b", "<", "/", "x", " ")] == [
        "", "a", "", "", " \nb", "", "", "</x", "",
    ]  # fmt: skip
    assert parser.in_thought
    assert not parser.in_text
    assert parser.push("</think>").thought == ""
    assert not parser.in_thought
    assert parser.push("\n").text == ""
    assert parser.push("hi").text == "hi"
    assert parser.in_text


def test_marks_that_are_special_tokens_are_not_shown() -> None:
    for thinking in (OPEN, MAYBE):
        parser = parser_of(thinking)
        assert parser.mark("<think>") == ("", (), "")
        assert parser.push("\na </thi").thought == "a"
        # What could have been the end's text is none, and nothing of a call is one here.
        assert parser.mark("<tool_call>").thought == " </thi"
        assert parser.push("x ").thought == "x"
        assert parser.mark("</think>") == ("", (), "")
        assert parser.push("\n\n").text == ""
        parser.mark("<tool_call>")
        [first, *rest] = parser.push('{"name": "add", "arguments": {}}').calls
        assert (first.name, "".join(delta.arguments for delta in rest)) == ("add", "{}")
        assert parser.mark("</think>").text == ""
        assert parser.num_complete == 1


def test_a_special_token_behind_other_text_begins_no_thought() -> None:
    parser = parser_of(MAYBE)
    parts = [parser.push("<thi"), parser.mark("<think>"), parser.push("a"), parser.mark("</think>"), parser.push("b")]
    assert ("".join(p.thought for p in parts), "".join(p.text for p in parts)) == ("", "<thiab")


def test_a_mark_of_the_answer_at_once_is_the_answers() -> None:
    parser = parser_of(MAYBE)
    parser.mark("<tool_call>")
    assert [delta.name for delta in parser.push('{"name": "add", "arguments": {}}').calls][:1] == ["add"]


@pytest.mark.parametrize(
    ("prompt", "qwen", "deepseek"),
    [
        ("<|im_start|>assistant\n", MAYBE.is_open, True),
        ("<|Assistant|><think>\n", True, True),
        ("<|Assistant|><think>", True, True),
        ("assistant\n<think>\n\n</think>\n\n", None, None),
        ("<|Assistant|></think>", None, None),
        ("", False, True),
    ],
)
def test_the_end_of_the_prompt_says_whether_a_thought_is_open(
    prompt: str, qwen: bool | None, deepseek: bool | None
) -> None:
    for name, expected in (("qwen3", qwen), ("deepseek_r1", deepseek)):
        format_ = chosen_format(name, None)  # type: ignore[arg-type]
        assert format_ is not None
        found = format_.behind(prompt)
        assert (found.is_open if found is not None else None) == expected


def test_a_template_that_knows_of_thoughts_has_them() -> None:
    assert format_in("{{ content.split('</think>')[-1] }}") == THINK
    assert format_in("{{ messages }}") is None
    assert chosen_format("auto", THINK) == THINK
    assert chosen_format("auto", None) is None
    assert chosen_format("none", THINK) is None


BYTES = [bytes([value]) for value in range(256)]
BEGIN, END, EOS = 256, 257, 258


def output_of(thinking: Thinking, marks: dict[int, str], scanner: StopScanner | None = None) -> ThinkingOutput:
    table = [*BYTES, b"", b"", b""]
    return ThinkingOutput(
        ByteDetokenizer(table, frozenset({BEGIN, END, EOS})), parser_of(thinking), marks, scanner=scanner,
        hidden_ids=frozenset({EOS}), min_tokens=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("thinking", "ids", "num_thought"),
    [
        (OPEN, [*b"\nabc\n", END, *b"\n\nhi", EOS], 5),
        (MAYBE, [BEGIN, *b"abc", END, *b"hi", EOS], 3),
        (MAYBE, [*b"hi", EOS], 0),
        (OPEN, [*b"abc", EOS], 3),
        (OPEN, [END, EOS], 0),
        (MAYBE, [*b"<think>", *b"abc", END, EOS], 3),
    ],
)
def test_the_tokens_of_a_thought_are_counted(thinking: Thinking, ids: list[int], num_thought: int) -> None:
    output = output_of(thinking, {BEGIN: "<think>", END: "</think>"})
    text = "".join(map(output.push, ids)) + output.flush()
    assert (output.num_thought_tokens, output.num_tokens) == (num_thought, len(ids))
    assert text in ("hi", "")
    assert output.take_thought() in ("abc", "")
    assert output.take_thought() == ""


def test_a_stop_string_is_found_in_a_thought() -> None:
    output = output_of(OPEN, {}, StopScanner(("STOP",), include=False))
    text = "".join(output.push(token_id) for token_id in b"a STOP" if not output.stopped)
    assert (output.stopped, text, output.take_thought()) == (True, "", "a")
