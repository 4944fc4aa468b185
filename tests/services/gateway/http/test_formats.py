"""What any answer is made of, before an endpoint gives it its form."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.core.tools.deltas import CallDelta
from services.gateway.http.formats import AnswerFormat, ChoiceEnd, ChoiceResult, MadeCall, Reply, TokenUsage, in_order
from services.gateway.http.message_format import MessageFormat
from services.gateway.http.response_format import ResponsesFormat

BEGUN = CallDelta(1, "c", "f", "")
PIECE = CallDelta(0, "", "", "}")
USAGE = TokenUsage(prompt_tokens=30, completion_tokens=5, cached_tokens=16)


def test_text_of_a_token_comes_behind_the_call_that_ends_and_before_the_one_that_begins() -> None:
    assert in_order([PIECE, BEGUN], " and ") == [PIECE, " and ", BEGUN]
    assert in_order([BEGUN], "a") == ["a", BEGUN]
    assert in_order([PIECE], "a") == [PIECE, "a"]
    assert in_order([], "a") == ["a"]
    assert in_order([PIECE], "") == [PIECE]


def test_a_text_is_cut_where_calls_come_between() -> None:
    calls = tuple(MadeCall(str(at), "f", "{}", at) for at in (0, 2, 2, 4))
    end = ChoiceEnd("stop", None)
    assert ChoiceResult("abcd", calls, end, None).parts() == [calls[0], "ab", calls[1], calls[2], "cd", calls[3]]
    assert ChoiceResult("", (), end, None).parts() == []


def whole(format_: AnswerFormat) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(format_.whole([ChoiceResult("a", (), ChoiceEnd("stop", None), None)], USAGE))
    return answer


def test_cached_tokens_are_a_part_of_a_responses_input_and_none_of_a_messages() -> None:
    reply = Reply("x_1", "tiny", 1, repeated=b'"tools":[]')
    usage = whole(ResponsesFormat(reply))["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["total_tokens"]) == (
        30,
        16,
        35,
    )
    usage = whole(MessageFormat(reply))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (14, 16, 5)
