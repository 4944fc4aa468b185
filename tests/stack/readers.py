"""Streams that are read while something happens to the stack."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openai import AsyncOpenAI

from tests.stack.client import complete, stream
from tests.stack.conftest import MODEL
from tests.wait_until import eventually

SLOWLY = {"BLITZ_MOCK_LAYER_BASE_MS": "4.0"}
"""For ``mock_config``: tokens come more slowly than clients of six streams can read, also on a busy machine."""
TOKENS = 120
"""At 4 layers of 4 ms: a stream of about two seconds."""
MORE_TOKENS = 900


class Reader:
    """Reads one stream."""

    def __init__(self, client: AsyncOpenAI, max_tokens: int, prompt: list[int] | None = None) -> None:
        self.text = ""
        self.max_tokens = max_tokens
        self._prompt = prompt
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncOpenAI) -> None:
        async for piece in stream(client, MODEL, max_tokens=self.max_tokens, prompt=self._prompt):
            self.text += piece


async def well_begun(clients: Sequence[AsyncOpenAI]) -> tuple[list[Reader], str]:
    """A stream of each client, all well begun and far from their ends; and the undisturbed text of each."""
    # On a busy machine one may be over before another has begun.
    for max_tokens in (TOKENS, *[MORE_TOKENS] * 5):
        expected = await complete(clients[0], MODEL, max_tokens=max_tokens)
        readers = [Reader(client, max_tokens) for client in clients]
        for reader in readers:
            await eventually(lambda o=reader, e=expected: len(o.text) > len(e) / 5 or o.task.done())  # type: ignore[misc]
        if not any(reader.task.done() for reader in readers):
            return readers, expected
        assert await texts(readers) == [expected] * len(readers)
    raise AssertionError("streams were over before others had begun")


async def texts(readers: list[Reader]) -> list[str]:
    """What they read, once all are over."""
    await asyncio.gather(*(reader.task for reader in readers))
    return [reader.text for reader in readers]
