"""What each family's models write, whole, cut anywhere, and character by character."""

from __future__ import annotations

import json
import random

import pytest

from services.gateway.core.tools.hermes import HermesParser
from services.gateway.core.tools.llama import LlamaParser
from services.gateway.core.tools.mistral import MistralParser
from services.gateway.core.tools.parser import ToolParser
from services.gateway.core.tools.pythonic import PythonicParser
from tests.services.gateway.core.tools.reading import parser_of, read
from tests.services.gateway.core.tools.transcripts import HERMES, LLAMA, MISTRAL, PYTHONIC, Transcript

FAMILIES: list[tuple[type[ToolParser], list[Transcript]]] = [
    (HermesParser, HERMES),
    (LlamaParser, LLAMA),
    (PythonicParser, PYTHONIC),
    (MistralParser, MISTRAL),
]
CASES = [(kind, transcript) for kind, transcripts in FAMILIES for transcript in transcripts]


@pytest.mark.parametrize(("kind", "transcript"), CASES)
def test_a_transcript_is_text_and_calls_however_it_is_cut(kind: type[ToolParser], transcript: Transcript) -> None:
    written, text, calls = transcript
    wanted = (text, [list(call) for call in calls])
    cuts = [[written], list(written), *([written[:at], written[at:]] for at in range(len(written)))]
    for pieces in cuts:
        found = read(parser_of(kind), pieces)
        assert (found.text, found.calls) == wanted, pieces


@pytest.mark.parametrize(("kind", "transcript"), CASES)
def test_calls_that_ended_have_an_object_as_arguments_and_no_others_do(
    kind: type[ToolParser], transcript: Transcript
) -> None:
    parser = parser_of(kind)
    whole = 0
    for _, arguments in read(parser, [transcript[0]]).calls:
        try:
            whole += isinstance(json.loads(arguments), dict)
        except ValueError:
            continue
    assert parser.num_complete == whole


@pytest.mark.parametrize(("kind", "transcripts"), FAMILIES)
def test_what_is_drawn_from_pieces_of_transcripts_is_the_same_however_it_is_cut(
    kind: type[ToolParser], transcripts: list[Transcript]
) -> None:
    draw = random.Random(0)
    for _ in range(600):
        written = ""
        for _ in range(draw.randint(1, 4)):
            source = draw.choice(transcripts)[0]
            begin = draw.randint(0, len(source))
            written += source[begin : draw.randint(begin, len(source))] if draw.random() < 0.6 else source
        whole, single = read(parser_of(kind), [written]), read(parser_of(kind), written)
        assert (single.text, single.calls) == (whole.text, whole.calls), written


@pytest.mark.parametrize(("kind", "transcripts"), FAMILIES)
def test_without_parallel_calls_the_first_one_is_kept(kind: type[ToolParser], transcripts: list[Transcript]) -> None:
    for written, text, calls in transcripts:
        found = read(parser_of(kind, parallel=False), written)
        assert (found.text, found.calls) == (text, [list(call) for call in calls[:1]])


def test_arguments_go_out_as_they_come() -> None:
    parser = parser_of(HermesParser)
    assert parser.push('<tool_call>{"name": "add", "arguments": ').calls == ()
    [first, piece] = parser.push('{"a": 1').calls
    assert (first.name, first.call_id, first.arguments, piece.arguments) == ("add", "id0", "", '{"a": 1')
    assert [delta.arguments for delta in parser.push("2").calls] == ["2"]
    assert not parser.in_text
    assert [delta.arguments for delta in parser.push("}}</tool_call>").calls] == ["}"]
    assert parser.in_text
