"""Prompts that begin alike meet at one instance, in a real stack; what all share is at all of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from compose.config import StackConfig
from compose.stack import Stack
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
INSTANCES = 3


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Three instances of one model."""
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("affinity"),
        workers=INSTANCES,
        port=0,
        env=FAST | NO_DEMAND,
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        await running.admin.scale(MODEL, INSTANCES, hold_s=3600.0)
        await until(running, lambda s: sum(i.state == "serving" for i in s.instances) == INSTANCES)
        yield running


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 200), k=length)


async def cached(client: AsyncOpenAI, prompt: list[int], **given: object) -> int:
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0.0, extra_body={"ignore_eos": True, **given}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_each_turn_of_a_conversation_finds_the_one_before(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:

        async def talk(seed: int) -> int:
            prompt, missed = text(seed, 80), 0
            await cached(client, prompt)
            for turn in range(4):
                asked, prompt = len(prompt), prompt + text(100 * seed + turn, 40)
                missed += (await cached(client, prompt)) < asked // BLOCK * BLOCK
            return missed

        # Others may have been in the way now and then: an instance must not get too much.
        assert sum([await talk(seed) for seed in range(6)]) == 0
        assert sum(await asyncio.gather(*(talk(10 + seed) for seed in range(6)))) <= 8


async def test_a_key_of_the_caller_keeps_short_prompts_together(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(50, 56):
            prompt = text(seed, 33)
            assert await cached(client, prompt, prompt_cache_key=str(seed)) == 0
            assert await cached(client, prompt, prompt_cache_key=str(seed)) == 32


async def test_what_all_begin_with_is_soon_at_all_instances(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        system, ends = text(70, 200), iter(range(1000, 2000))

        async def ask_many() -> list[int]:
            return list(await asyncio.gather(*(cached(client, system + text(next(ends), 70)) for _ in range(24))))

        async with asyncio.timeout(60):
            while min(await ask_many()) < 192:
                pass
