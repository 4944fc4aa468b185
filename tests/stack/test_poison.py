"""One request that an engine fails on, and one that kills its process, beside others that are well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from compose.stack import Stack
from tests.stack.client import complete, openai_client, scale, until
from tests.stack.conftest import MODEL, READY_S, mock_config
from tests.stack.readers import MORE_TOKENS, SLOWLY, TOKENS, Reader, texts
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

RAISES, KILLS = 200, 201
"""Tokens that the mock never says."""
OTHERS = [[5, 17, 33, 2, 90, index] for index in range(15)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    faults = {"BLITZ_MOCK_RAISE_TOKEN": str(RAISES), "BLITZ_MOCK_KILL_TOKEN": str(KILLS)}
    async with Stack(mock_config(tmp_path_factory.mktemp("poison"), workers=4, **SLOWLY, **faults)) as running:
        await running.wait_ready(READY_S)
        yield running


async def _beside_others(stack: Stack, token_id: int) -> openai.InternalServerError:
    """The error of a prompt with this token, sent while the others run; these must give their undisturbed texts."""
    async with openai_client(stack) as client:
        # On a busy machine one may be over before another has begun.
        for tokens in (TOKENS, *[MORE_TOKENS] * 5):
            expected = [await complete(client, MODEL, max_tokens=tokens, prompt=prompt) for prompt in OTHERS[:2]]
            others = [Reader(client, tokens, prompt) for prompt in OTHERS]
            await eventually(lambda begun=others: all(o.text or o.task.done() for o in begun))  # type: ignore[misc]
            if not any(other.task.done() for other in others):
                break
            await texts(others)
        assert not any(other.task.done() for other in others)
        with pytest.raises(openai.InternalServerError) as caught:
            await complete(client, MODEL, max_tokens=tokens, prompt=[1, 2, token_id, 3])
        found = await texts(others)
        assert found[:2] == expected
        again = (complete(client, MODEL, max_tokens=tokens, prompt=prompt) for prompt in OTHERS[2:])
        assert await asyncio.gather(*again) == found[2:]
    return caught.value


def _deaths(stack: Stack) -> int:
    return sum(child.num_restarts for name, child in stack.processes.items() if name.startswith("worker"))


async def test_a_prompt_that_the_engine_fails_on_ends_alone_and_costs_no_worker(stack: Stack) -> None:
    pids = {name: child.pid for name, child in stack.processes.items()}
    error = await _beside_others(stack, RAISES)
    assert error.code == "request_failed"
    assert f"token {RAISES}" in error.message
    assert {name: child.pid for name, child in stack.processes.items()} == pids


@pytest.mark.parametrize("instances", [1, 2])
async def test_a_prompt_that_kills_its_process_is_ended_after_three_and_the_others_are_answered(
    stack: Stack, instances: int
) -> None:
    await scale(stack, MODEL, instances)
    await until(stack, lambda s: s.serving(MODEL) == instances and len(s.workers) == 4)
    before = _deaths(stack)
    error = await _beside_others(stack, KILLS)
    assert error.code == "poison_request"
    await eventually(lambda: _deaths(stack) - before >= 3)
    assert _deaths(stack) - before == 3
    await until(stack, lambda s: s.serving(MODEL) >= 1 and len(s.workers) == 4)
