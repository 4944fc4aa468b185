"""A disaggregated model's load decides on both of its roles; how it is served changes while it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from compose.stack import Stack
from shared.messages.admin import SetModelBody, Status
from tests.stack.client import complete, openai_client, until
from tests.stack.conftest import MODEL, READY_S, mock_config

LONG = [7] * 200
pytestmark = [pytest.mark.stack, pytest.mark.ucx]


def roles(status: Status) -> tuple[int, int, int]:
    """Serving instances: prefill, decode, colocated."""
    return status.serving(MODEL, "prefill"), status.serving(MODEL, "decode"), status.serving(MODEL, "colocated")


async def test_prefill_and_decode_instances_come_and_go_with_the_load(tmp_path: Path) -> None:
    # One prefill instance computes 2,500 tokens/s: 4 layers of 0.1 ms per token.
    slow = mock_config(
        tmp_path,
        workers=4,
        BLITZ_MOCK_LAYER_PER_TOKEN_US="100",
        BLITZ_MOCK_LAYER_BASE_MS="0.1",
        BLITZ_MONITOR_ASSUMED_TOKENS_PER_S="2500",
        BLITZ_GATEWAY_PREFIX_CACHE="0",  # prompts are equal
    )
    config = replace(slow, served_as="disaggregated")
    async with Stack(config) as stack, openai_client(stack) as client:
        assert roles(await stack.wait_ready(READY_S)) == (1, 1, 0)
        text = await complete(client, MODEL, max_tokens=8)
        grown = asyncio.Event()

        async def ask() -> set[str]:
            answers = {await complete(client, MODEL, prompt=LONG, max_tokens=8)}
            while not grown.is_set():
                answers.add(await complete(client, MODEL, prompt=LONG, max_tokens=8))
            return answers

        burst = asyncio.gather(*(ask() for _ in range(24)))
        await until(stack, lambda status: roles(status)[0] >= 2)
        grown.set()
        assert len(set().union(*await burst)) == 1
        await until(stack, lambda status: roles(status) == (1, 1, 0))

        await stack.admin.set_model(MODEL, SetModelBody(min_instances=0))
        await until(stack, lambda status: status.instances == ())
        assert await complete(client, MODEL, max_tokens=8) == text, "it wakes for a request"
        await until(stack, lambda status: status.instances == ())

        await stack.admin.set_model(MODEL, SetModelBody(min_instances=1, served_as="colocated"))
        await until(stack, lambda status: roles(status) == (0, 0, 1))
        await stack.admin.set_model(MODEL, SetModelBody(served_as="disaggregated"))
        # There is an instance for its prompts all along.
        assert await asyncio.gather(*(complete(client, MODEL, max_tokens=8) for _ in range(8))) == [text] * 8
        await until(stack, lambda status: roles(status) == (1, 1, 0))
