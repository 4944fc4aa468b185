"""Sends a plan: every request at its time, whatever became of those before. Only a conversation waits for itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.openai_events import CompletionRequest
from bench.prefix.workload import Plan, Planned
from bench.stream_client import StreamClient, StreamFailed
from bench.streamed import Streamed, ask

PATIENCE_S = 120.0
_LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a request."""

    planned: Planned
    streamed: Streamed
    late: bool
    """The answer before it came after its time."""


class Load:
    """One plan, for one model. ``token_of``: the tokens of what answers are written with."""

    def __init__(self, client: StreamClient, model: str, plan: Plan, token_of: Mapping[str, int]) -> None:
        self._client = client
        self._model = model
        self._plan = plan
        self._token_of = token_of
        self._tasks: list[asyncio.Task[tuple[Answered, tuple[int, ...]]]] = []

    async def run(self) -> tuple[Answered, ...]:
        """All answers, in the order of the plan. Cancelled, nothing goes on."""
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as asking:
            for planned in self._plan:
                self._tasks.append(asking.create_task(self._one(planned, began_s)))
        return tuple(task.result()[0] for task in self._tasks)

    async def _one(self, planned: Planned, began_s: float) -> tuple[Answered, tuple[int, ...]]:
        """And the context at its end."""
        before: tuple[int, ...] = ()
        if planned.after is not None:
            _, before = await asyncio.shield(self._tasks[planned.after])
        late = time.perf_counter() - began_s > planned.at_s + _LATE_S
        await asyncio.sleep(max(0.0, began_s + planned.at_s - time.perf_counter()))
        prompt = before + planned.tokens
        streamed = await _ask(self._client, self._model, planned, prompt)
        answer = tuple(self._token_of[character] for character in streamed.text)
        return Answered(planned, streamed, planned.after is not None and late), prompt + answer


async def sustained_per_s(
    client: StreamClient,
    model: str,
    plan: Plan,
    prompts: Sequence[tuple[int, ...]],
    *,
    at_a_time: int,
    settle_s: float,
    seconds: float,
) -> float:
    """Requests per second that are answered while ``at_a_time`` are under way, in ``seconds`` after ``settle_s``.

    Begins again at the plan's begin if it comes to its end. Raises ``StreamFailed`` for a request that failed.
    """
    ends_s: list[float] = []
    began_s = time.perf_counter()
    until_s = began_s + settle_s + seconds
    number = 0

    async def one_after_the_other() -> None:
        nonlocal number
        while time.perf_counter() < until_s:
            index, number = number % len(plan), number + 1
            streamed = await _ask(client, model, plan[index], prompts[index])
            if streamed.error:
                raise StreamFailed("protocol", streamed.error)
            ends_s.append(time.perf_counter())

    with first_error():
        async with asyncio.TaskGroup() as asking:
            for _ in range(at_a_time):
                asking.create_task(one_after_the_other())
    return sum(began_s + settle_s <= end_s < until_s for end_s in ends_s) / seconds


@contextlib.contextmanager
def first_error() -> Iterator[None]:
    """Of several tasks of a group, one error is as good as all."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _ask(client: StreamClient, model: str, planned: Planned, prompt: tuple[int, ...]) -> Streamed:
    request = CompletionRequest.exactly(model, prompt, planned.output_tokens)
    return await ask(client, planned.number, request, timeout_s=PATIENCE_S)
