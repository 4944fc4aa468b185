"""Clients that ask, each one question after the other, and what became of every request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos.answer import Answer, Expectation, Failure, Reader
from bench.chaos.gateways import Gateway, Gateways
from bench.chaos.injected_fault import now_s
from bench.chaos.judge import Outcome, judge
from bench.chaos.question import Question
from bench.stream_client import StreamFailed

STREAMED_SHARE = 0.75
"""The others are asked for whole."""
_PAUSE_S = 0.05
"""Mean, between an answer and the next question of the same client."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request."""

    question: Question
    model: str
    stream: bool
    gateway: str
    sent_s: float
    ended_s: float
    response_id: str
    token_times_s: tuple[float, ...]
    outcome: Outcome


async def ask(
    gateway: Gateway,
    model: str,
    question: Question,
    *,
    stream: bool,
    silence_s: float,
    alone: bool = False,
) -> tuple[Reader, Answer | Failure]:
    """One request, once. ``alone``: all of it is computed."""
    reader = Reader()
    body = question.body(model, stream=stream, alone=alone)
    try:
        reply = await gateway.client.request(
            "POST", "/v1/completions", body, on_event=reader.on_event if stream else None, timeout_s=silence_s
        )
    except StreamFailed as error:
        return reader, Failure(error.kind, error.detail)
    return reader, reader.end(reply.status, reply.body, stream=stream)


class Load:
    """Grows ``records`` while it runs. A request is sent once, to one gateway, and has one outcome."""

    def __init__(
        self,
        gateways: Gateways,
        models: Sequence[str],
        questions: Sequence[Question],
        expected: Mapping[str, Mapping[int, Expectation]],
        *,
        seed: int,
        on_record: Callable[[Record], None] = lambda _: None,
        silence_s: float,
        streamed_share: float = STREAMED_SHARE,
    ) -> None:
        """``expected``: by model and index of the question."""
        self._gateways = gateways
        self._models = tuple(models)
        self._questions = tuple(questions)
        self._expected = expected
        self._seed = seed
        self._on_record = on_record
        self._silence_s = silence_s
        self._streamed_share = streamed_share
        self.records: list[Record] = []
        self.unsent = 0
        """Requests that were not sent when they were due, because there was no gateway."""

    async def run(self, num_clients: int, quiet: asyncio.Event) -> None:
        """Ask until ``quiet``; returns when every answer has ended."""
        async with asyncio.TaskGroup() as clients:
            for index in range(num_clients):
                clients.create_task(self._client(random.Random(f"client-{self._seed}-{index}"), quiet))

    async def _client(self, rng: random.Random, quiet: asyncio.Event) -> None:
        while not quiet.is_set():
            gateway = self._gateways.choose(rng)
            if gateway is None:
                self.unsent += 1
                await _first(self._gateways.wait_up(), quiet.wait())
                continue
            await self._one(rng, gateway)
            await asyncio.sleep(rng.expovariate(1 / _PAUSE_S))

    async def _one(self, rng: random.Random, gateway: Gateway) -> None:
        model, question = rng.choice(self._models), rng.choice(self._questions)
        stream = rng.random() < self._streamed_share
        sent_s = now_s()
        reader, got = await ask(gateway, model, question, stream=stream, silence_s=self._silence_s)
        ended_s = now_s()
        expected = self._expected[model][question.index]
        outcome = judge(got, expected, sent_s=sent_s, ended_s=ended_s, gateway_faults=gateway.faults)
        record = Record(
            question=question,
            model=model,
            stream=stream,
            gateway=gateway.name,
            sent_s=sent_s,
            ended_s=ended_s,
            response_id=reader.response_id,
            token_times_s=tuple(reader.token_times_s),
            outcome=outcome,
        )
        self.records.append(record)
        self._on_record(record)


async def _first(*waiting: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(each) for each in waiting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
