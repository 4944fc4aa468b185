"""What the idle stack answers: what every answer under chaos is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.answer import Answer, Failure, Reader
from bench.chaos.gateways import Gateway
from bench.chaos.injected_fault import now_s
from bench.chaos.load import ask
from bench.chaos.question import Question
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


async def expect(gateway: Gateway, model: str, questions: Sequence[Question]) -> Expected:
    """Ask each question streamed, one after the other, and then whole, some at a time.

    Raises ``ChaosFailed`` unless both answers are there and equal.
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
    return Expected(answers, tuple(first_tokens))


async def _answer(gateway: Gateway, model: str, question: Question, *, stream: bool) -> tuple[Reader, Answer]:
    reader, got = await ask(gateway, model, question, stream=stream, alone=True)
    if isinstance(got, Failure):
        raise ChaosFailed(f"the idle stack does not answer question {question.index}: {got.kind}: {got.detail}")
    return reader, got
