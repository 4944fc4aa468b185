"""What the stack tests ask a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from openai import AsyncOpenAI

from compose.stack import Stack
from shared.bus.nats import NatsBus
from shared.errors import BlitzError, DeadlineExceeded, Unavailable
from shared.messages.admin import Status
from shared.messages.operations import ScaleRecord
from shared.permissions import User
from tests import plain_http

PATIENCE_S = 240.0
"""For what takes a second or two where nothing else runs."""
PROMPT = [5, 17, 33, 2, 90, 41, 7]


def openai_client(stack: Stack) -> AsyncOpenAI:
    """The unmodified client; use it with ``async with``, so that its connections are closed."""
    return plain_http.openai_client(stack.url)


async def complete(client: AsyncOpenAI, model: str, *, max_tokens: int = 24, prompt: list[int] | None = None) -> str:
    """Greedy text of exactly ``max_tokens`` tokens."""
    answer = await client.completions.create(
        model=model,
        prompt=prompt or PROMPT,
        max_tokens=max_tokens,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    assert answer.choices[0].finish_reason == "length"
    return answer.choices[0].text


async def stream(
    client: AsyncOpenAI, model: str, *, max_tokens: int, prompt: list[int] | None = None
) -> AsyncIterator[str]:
    """The same, piece by piece."""
    events = await client.completions.create(
        model=model,
        prompt=prompt or PROMPT,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for event in events:
        yield event.choices[0].text


async def scale(stack: Stack, model: str, instances: int, *, hold_s: float = 600.0) -> ScaleRecord:
    """Scale and wait for the end of the operation."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            record = await stack.admin.scale(model, instances, hold_s=hold_s)
            break
        except (Unavailable, DeadlineExceeded):
            # The planner or the pool was just killed and is not back yet.
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
    while record.status == "running" and time.monotonic() < deadline_s:
        record = await stack.admin.scale_record(record.plan_id, wait_s=5.0)
    return record


async def until(stack: Stack, condition: Callable[[Status], bool], timeout_s: float = PATIENCE_S) -> Status:
    """Poll the status until it fulfils the condition. The registry may be on its way back meanwhile."""
    deadline_s = time.monotonic() + timeout_s
    status: Status | BlitzError
    while True:
        try:
            status = await stack.admin.status()
        except (Unavailable, DeadlineExceeded) as error:
            status = error
        if isinstance(status, Status) and condition(status):
            return status
        assert time.monotonic() < deadline_s, status
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def bus(stack: Stack, user: User = "planner") -> AsyncIterator[NatsBus]:
    """As a planner, who hears the load of all, and what is wanted; or as somebody else."""
    connected = await NatsBus.connect(stack.addresses.nats_url, name=user, id="test", access=stack.nats_access(user))
    try:
        yield connected
    finally:
        await connected.close()
