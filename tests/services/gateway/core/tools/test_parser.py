"""What holds for every family: nothing grows, special tokens stay hidden, a template tells the family."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest

from services.gateway.core.tools.families import family_of
from services.gateway.core.tools.hermes import HermesParser
from services.gateway.core.tools.llama import LlamaParser
from services.gateway.core.tools.mistral import MistralParser
from services.gateway.core.tools.parser import MAX_HELD_CHARACTERS, ToolParser
from services.gateway.core.tools.pythonic import PythonicParser
from tests.services.gateway.core.tools import templates
from tests.services.gateway.core.tools.reading import Read, parser_of, read

FAMILIES = [HermesParser, LlamaParser, MistralParser, PythonicParser]
OPENINGS = {
    HermesParser: '<tool_call>{"name": "add", "arguments": ',
    LlamaParser: '{"name": "add", "parameters": ',
    MistralParser: "[TOOL_CALLS]add",
    PythonicParser: "[add(a=",
}


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that the parsers run for some work: what it costs, whatever else the machine does."""
    count = 0

    def local(frame: object, event: str, argument: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return local

    def trace(frame: object, event: str, argument: object) -> Callable[..., object] | None:
        return local if "core/tools" in frame.f_code.co_filename else None  # type: ignore[attr-defined]

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


HARD = [
    "<|python_tag|>",
    *("{", "}", "[", "{}", "<", "<tool_call>", "<tool_call>{", "[TOOL_CALLS]", "[now(", ";", " ", "a"),
    *('{"name": "now", "parameters": {}}; ', "[now()] ", "[TOOL_CALLS]now{}", '{"name":', "\\", '"'),
]  # fmt: skip


@pytest.mark.parametrize("unit", HARD)
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("inside", [False, True])
def test_twice_the_text_costs_twice_the_work(kind: type[ToolParser], unit: str, inside: bool) -> None:
    def cost(times: int) -> int:
        written = (OPENINGS[kind] if inside else "") + unit * times
        pieces = [written[at : at + 7] for at in range(0, len(written), 7)]
        return lines_of(lambda: read(parser_of(kind), pieces))

    assert cost(1600) < 2.3 * cost(800) + 20 * MAX_HELD_CHARACTERS


@pytest.mark.parametrize("unit", ["{", '{"a":'])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_megabyte_of_braces_comes_through(kind: type[ToolParser], unit: str) -> None:
    written = unit * (2**20 // len(unit))
    found = read(parser_of(kind), (written[at : at + 3] for at in range(0, len(written), 3)))
    assert len(found.text) + sum(len(arguments) for _, arguments in found.calls) >= len(written) // 2


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_held_back_has_a_bound_and_is_text_beyond(kind: type[ToolParser]) -> None:
    beginnings = {
        HermesParser: '<tool_call>{"name"' + " " * 9000,
        LlamaParser: '{"parameters": {"a": "' + "x" * 9000,
        MistralParser: "[TOOL_CALLS]now" + " " * 9000,
        PythonicParser: "[now(" + " " * 9000,
    }
    written = beginnings[kind]
    parser = parser_of(kind)
    shown = "".join(parser.push(character).text for character in written)
    assert written.startswith(shown)
    assert len(written) - len(shown) < MAX_HELD_CHARACTERS
    assert shown + parser.flush().text == written
    assert read(parser_of(kind), [written]).text == written


@pytest.mark.parametrize("kind", FAMILIES)
def test_depth_has_a_bound(kind: type[ToolParser]) -> None:
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    opening = OPENINGS[kind] + (deep if kind is not PythonicParser else deep[6:])
    found = read(parser_of(kind), [opening])
    assert len(found.calls) == 1
    assert found.calls[0][1].count("[") < 130


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_characters_are_text_or_calls(kind: type[ToolParser]) -> None:
    draw = random.Random(1)
    alphabet = [
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ":",
        ",",
        ";",
        "=",
        "a",
        "0",
        "-",
        ".",
        "e",
        "\n",
        " ",
        "é",
    ]
    alphabet += ["now", "add", '"name"', '"arguments"', '"parameters"', *kind.starts, *kind.marks, OPENINGS[kind]]
    for _ in range(2000):
        pieces = draw.choices(alphabet, k=draw.randint(1, 30))
        one, other = read(parser_of(kind), pieces), read(parser_of(kind), ["".join(pieces)])
        assert (one.text, one.calls) == (other.text, other.calls), pieces


def run(parser: ToolParser, steps: list[str]) -> Read:
    """Steps that begin with ``!`` are special tokens."""
    found = Read()
    for step in steps:
        found.add(parser.mark(step[1:]) if step.startswith("!") else parser.push(step))
    found.add(parser.flush())
    return found


MARKED: list[tuple[type[ToolParser], list[str], str, list[list[str]]]] = [
    (HermesParser, ["!<tool_call>", '{"name": "now", "arguments": {}}', "!</tool_call>"], "", [["now", "{}"]]),
    (HermesParser, ["!<tool_call>", '{"name": "rm"}', "!</tool_call>", "x"], '{"name": "rm"}x', []),
    (HermesParser, ["a", "!</tool_call>", "b", "!<tool_call>"], "ab", []),
    (HermesParser, ["!<tool_call>", '{"name": "add", "arguments": {"a', "!<tool_call>", "b"], "b", [["add", '{"a']]),
    (HermesParser, ["!<tool_call>", '{"name": "add", "arguments": {"a', "!</tool_call>", "b"], "b", [["add", '{"a']]),
    (HermesParser, ["!<tool_call>", '{"na', "!<tool_call>", '{"name": "now", "arguments": {}}'],
     '{"na', [["now", "{}"]]),
    (HermesParser, ["<tool", "!<tool_call>", "_call>"], "<tool_call>", []),
    (LlamaParser, ["!<|python_tag|>", '{"name": "now", "parameters": {}}'], "", [["now", "{}"]]),
    (LlamaParser, ["!<|python_tag|>", "print(1)"], "print(1)", []),
    (MistralParser, ["!", "x"], "x", []),
    (MistralParser, ["!" + "[TOOL_CALLS]", "now", "![ARGS]", "{}"], "", [["now", "{}"]]),
    (MistralParser,
     ["![TOOL_CALLS]", "now", "![CALL_ID]", "123456789", "![ARGS]", "{", "}", "![TOOL_CALLS]", "add{}"], "",
     [["now", "{}"], ["add", "{}"]]),
    (MistralParser, ["![TOOL_CALLS]", "rm", "![ARGS]", "{}"], "rm{}", []),
    (MistralParser, ["![TOOL_CALLS]", '[{"name": "now", ', "![ARGS]", "x"], '[{"name": "now", x', []),
    (MistralParser, ["![TOOL_CALLS]", "now[AR", "![ARGS]", "{}"], "now[AR{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "steps", "text", "calls"), MARKED)
def test_special_tokens_are_read_and_not_shown(
    kind: type[ToolParser], steps: list[str], text: str, calls: list[list[str]]
) -> None:
    found = run(parser_of(kind), steps)
    assert (found.text, found.calls) == (text, calls)


def test_a_template_tells_the_family() -> None:
    assert family_of(templates.HERMES) is HermesParser
    assert family_of(templates.LLAMA) is LlamaParser
    assert family_of(templates.MISTRAL) is MistralParser
    assert family_of(templates.PYTHONIC) is PythonicParser
    assert family_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    assert family_of("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>") is None
    assert family_of("{{ tools }}<tool_call>{name}<arg_key>") is None
    assert family_of("{{ tools }}") is None
