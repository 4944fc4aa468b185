"""Prompts that begin alike, in a real stack with the torch engine: the same tokens, and less to compute."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from compose.config import StackConfig
from compose.stack import Stack
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

KEYS = ("one", "other")
SPLIT, OFF = "split", "off"
BLOCK = 16
MAX_TOKENS = 20


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One checkpoint under three names: colocated, prefill and decode instances, and without a prefix cache."""
    keys = {"BLITZ_API_KEYS": ",".join(KEYS), "BLITZ_API_KEY": KEYS[0], "BLITZ_WORKER_PREFILL_CHUNK": "96"}
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("prefixes"),
        workers=4,
        port=0,
        env=FAST | NO_DEMAND | keys,
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        await running.admin.add_model(str(tiny_checkpoint("llama")), name=OFF, prefix_cache=False)
        await running.admin.add_model(str(tiny_checkpoint("llama")), name=SPLIT, min_instances=0)
        for role in ("prefill", "decode"):
            await running.admin.scale(SPLIT, 1, hold_s=3600.0, role=role)
        await until(running, lambda s: sum(i.state == "serving" for i in s.instances) == 4)
        yield running


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 200), k=length)


async def ask(stack: Stack, prompt: list[int], *, model: str = MODEL, key: str = KEYS[0], **given: Any) -> Any:
    """(text, cached tokens)."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as client:
        extra = {"ignore_eos": True, **given.pop("extra_body", {})}
        answer = await client.completions.create(
            model=model, prompt=prompt, max_tokens=MAX_TOKENS, extra_body=extra, **({"temperature": 0.0} | given)
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("model", [MODEL, SPLIT])
async def test_what_was_computed_is_not_computed_again_and_the_text_is_the_same(stack: Stack, model: str) -> None:
    prompt = prompt_of(1, 300)
    expected, none = await ask(stack, prompt, model=OFF)
    first = await ask(stack, prompt, model=model)
    assert (none, first) == (0, (expected, 0))
    again = await ask(stack, prompt, model=model)
    assert again == (expected, 299 // BLOCK * BLOCK)
    # Another end, and a beginning that is shorter than a block.
    longer = prompt + prompt_of(2, 150)
    assert await ask(stack, longer, model=model) == ((await ask(stack, longer, model=OFF))[0], 300 // BLOCK * BLOCK)
    assert (await ask(stack, prompt[:10], model=model))[1] == 0


async def test_the_next_turn_finds_the_answer_too(stack: Stack) -> None:
    prompt = prompt_of(3, 40)
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=41, temperature=0.0, extra_body={"logit_bias": {"7": 100}}
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 41
    # The last token that was sampled has no KV yet.
    assert (await ask(stack, prompt + [7] * 41 + prompt_of(6, 20)))[1] == 80 // BLOCK * BLOCK


async def test_nobody_finds_what_another_key_or_salt_has_computed(stack: Stack) -> None:
    prompt = prompt_of(4, 200)
    expected, _ = await ask(stack, prompt)
    whole = 199 // BLOCK * BLOCK
    assert await ask(stack, prompt) == (expected, whole)
    assert await ask(stack, prompt, key=KEYS[1]) == (expected, 0)
    assert await ask(stack, prompt, extra_body={"cache_salt": "x"}) == (expected, 0)
    assert await ask(stack, prompt, extra_body={"cache_salt": "x"}) == (expected, whole)
    assert await ask(stack, prompt, extra_body={"cache_salt": "y"}) == (expected, 0)
    assert await ask(stack, prompt, model=OFF) == (expected, 0)
    assert await ask(stack, prompt, model=OFF) == (expected, 0)


async def test_sampled_and_penalised_answers_are_the_same_beside_many_others(stack: Stack) -> None:
    shared = prompt_of(5, 130)
    asked = [
        (
            shared[: 60 + 7 * number] + prompt_of(number, 9),
            {"temperature": 0.8, "seed": number, "frequency_penalty": 0.3},
        )
        for number in range(12)
    ]
    without = await asyncio.gather(*(ask(stack, prompt, model=OFF, **given) for prompt, given in asked))
    for _ in range(2):
        found = await asyncio.gather(*(ask(stack, prompt, **given) for prompt, given in asked))
        assert [text for text, _ in found] == [text for text, _ in without]
    assert all(cached for _, cached in found)
