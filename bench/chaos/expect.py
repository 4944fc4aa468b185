"""What the idle stack answers: what every answer under chaos is compared with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.answer import Answer, Failure, Reader
from bench.chaos.gateways import Gateway
from bench.chaos.injected_fault import now_s
from bench.chaos.load import ask
from bench.chaos.question import SCHEMA, Question
from compose.errors import StackError

_AT_ONCE = 8


class ChaosFailed(StackError):
    """There is nothing to compare with, or nothing to do."""


@dataclass(frozen=True, slots=True)
class Expected:
    """By the index of the question."""

    answers: dict[int, Answer]
    first_tokens: tuple[tuple[int, float], ...]
    """(prompt tokens, seconds to the first token) of an idle instance."""
    schema_answers: int = 0
    """Of the answers, those with a schema that became whole: each is valid."""
    schema_cuts: int = 0
    """Those that their limit cut off."""


async def expect(gateway: Gateway, model: str, questions: Sequence[Question]) -> Expected:
    """Ask each question streamed, one after the other, and then whole, some at a time.

    Raises ``ChaosFailed`` unless both answers are there and equal, and valid where there is a schema.
    """
    answers: dict[int, Answer] = {}
    first_tokens = []
    for question in questions:
        sent_s = now_s()
        reader, answers[question.index] = await _answer(gateway, model, question, stream=True)
        if reader.token_times_s:
            first_tokens.append((len(question.prompt), reader.token_times_s[0] - sent_s))
    for start in range(0, len(questions), _AT_ONCE):
        batch = questions[start : start + _AT_ONCE]
        whole = await asyncio.gather(*(_answer(gateway, model, question, stream=False) for question in batch))
        for question, (_, answer) in zip(batch, whole, strict=True):
            if difference := answer.difference(answers[question.index]):
                raise ChaosFailed(f"streamed and whole answers to question {question.index} differ: {difference}")
    schemas = [answers[question.index] for question in questions if question.has_schema]
    complete = [answer for answer in schemas if answer.finish_reason == "stop"]
    for answer in complete:
        _check(answer)
    return Expected(answers, tuple(first_tokens), len(complete), len(schemas) - len(complete))


def _check(answer: Answer) -> None:
    """Without a library, since the schema is one: what it says, in the language of the benchmark."""
    try:
        value = json.loads(answer.text)
        valid = (
            value.keys() == SCHEMA["properties"].keys()
            and isinstance(value["name"], str)
            and len(value["name"]) <= SCHEMA["properties"]["name"]["maxLength"]
            and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
            and len(value["sizes"]) <= SCHEMA["properties"]["sizes"]["maxItems"]
            and all(type(size) is int and 0 <= size <= 999 for size in value["sizes"])
        )
    except (ValueError, AttributeError, TypeError, KeyError):
        valid = False
    if not valid:
        raise ChaosFailed(f"an answer does not have its schema: {answer.text!r}")


async def _answer(gateway: Gateway, model: str, question: Question, *, stream: bool) -> tuple[Reader, Answer]:
    reader, got = await ask(gateway, model, question, stream=stream, alone=True)
    if isinstance(got, Failure):
        raise ChaosFailed(f"the idle stack does not answer question {question.index}: {got.kind}: {got.detail}")
    return reader, got
