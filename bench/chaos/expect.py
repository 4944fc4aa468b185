"""What the idle stack answers: what every answer under chaos is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.answer import Answer, Expectation, Failure, Reader
from bench.chaos.gateways import Gateway
from bench.chaos.injected_fault import now_s
from bench.chaos.load import ask
from bench.chaos.question import Question
from bench.chaos.schema import AnyOfSchema, has_schema
from compose.errors import StackError

_AT_ONCE = 8


class ChaosFailed(StackError):
    """There is nothing to compare with, or nothing to do."""


@dataclass(frozen=True, slots=True)
class Expected:
    """By the index of the question."""

    answers: dict[int, Expectation]
    first_tokens: tuple[tuple[int, float], ...]
    """(prompt tokens, seconds to the first token) of an idle instance."""
    schema_answers: int = 0
    """Of the answers, those with a schema that became whole: each is valid."""
    schema_cuts: int = 0
    """Those that their limit cut off."""


async def expect(gateway: Gateway, model: str, questions: Sequence[Question], *, silence_s: float) -> Expected:
    """Ask each question streamed, one after the other, and then whole, some at a time.

    Raises ``ChaosFailed`` unless both answers are there and equal, and valid where there is a schema.
    """
    answers: dict[int, Answer] = {}

    async def answer_to(question: Question, *, stream: bool) -> tuple[Reader, Answer]:
        reader, got = await ask(gateway, model, question, stream=stream, silence_s=silence_s, alone=True)
        if isinstance(got, Failure):
            raise ChaosFailed(f"the idle stack does not answer question {question.index}: {got.kind}: {got.detail}")
        return reader, got

    first_tokens = []
    for question in questions:
        sent_s = now_s()
        reader, answers[question.index] = await answer_to(question, stream=True)
        if reader.token_times_s:
            first_tokens.append((len(question.prompt), reader.token_times_s[0] - sent_s))
    for start in range(0, len(questions), _AT_ONCE):
        batch = questions[start : start + _AT_ONCE]
        whole = await asyncio.gather(*(answer_to(question, stream=False) for question in batch))
        for question, (_, answer) in zip(batch, whole, strict=True):
            if difference := answer.difference(answers[question.index]):  # an open one is drawn with the same seed
                raise ChaosFailed(f"streamed and whole answers to question {question.index} differ: {difference}")
    schemas = [answers[question.index] for question in questions if question.has_schema]
    complete = [answer for answer in schemas if answer.finish_reason == "stop"]
    for answer in complete:
        if not has_schema(answer.text):
            raise ChaosFailed(f"an answer does not have its schema: {answer.text!r}")
    expected: dict[int, Expectation] = dict(answers)
    for question in questions:
        if question.is_open:
            expected[question.index] = AnyOfSchema(len(question.prompt), question.max_tokens)
    return Expected(expected, tuple(first_tokens), len(complete), len(schemas) - len(complete))
