"""Instances of a real stack change roles while they answer: no token differs, and no weights move."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from compose.config import StackConfig
from compose.stack import Stack
from shared.messages.admin import SetModelBody
from shared.messages.common import Serving
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import openai_client, stream, until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 120
PROMPTS = tuple(
    random.Random(index).choices(range(3, 200), k=length) for index, length in enumerate((7, 300, 31, 250, 3, 120))
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two workers, both with a colocated instance of one model. No load moves the monitor."""
    config = StackConfig(
        models=(),
        state_dir=tmp_path_factory.mktemp("mutation"),
        workers=2,
        port=0,
        env=FAST | NO_DEMAND | {"BLITZ_MONITOR_DOWN_WINDOW_S": "600"},
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        await running.admin.add_model(str(tiny_checkpoint("llama")), min_instances=2)
        await until(running, lambda s: s.serving(MODEL) == 2)
        yield running


async def _serve(stack: Stack, served_as: Serving, least: int, **roles: int) -> None:
    """Serve the model in another way, with so many instances of each role, and wait until it is."""
    await stack.admin.set_model(MODEL, SetModelBody(served_as=served_as, min_instances=least))
    await until(stack, lambda s: Counter(i.role for i in s.instances if i.state == "serving") == Counter(roles))


async def _text(client: AsyncOpenAI, prompt: list[int]) -> str:
    return "".join([piece async for piece in stream(client, MODEL, max_tokens=MAX_TOKENS, prompt=prompt)])


async def test_a_model_is_served_in_another_way_and_back_in_mid_stream(stack: Stack) -> None:
    async with openai_client(stack) as client:
        alone = [await _text(client, prompt) for prompt in PROMPTS]
        before = {i.id for i in (await stack.admin.status()).instances}
        reading = [asyncio.create_task(_text(client, prompt)) for prompt in PROMPTS * 2]
        await _serve(stack, "disaggregated", 1, prefill=1, decode=1)
        reading += [asyncio.create_task(_text(client, prompt)) for prompt in PROMPTS * 2]
        await _serve(stack, "colocated", 2, colocated=2)
        reading += [asyncio.create_task(_text(client, prompt)) for prompt in PROMPTS]
        assert await asyncio.gather(*reading) == alone * 5
        assert {i.id for i in (await stack.admin.status()).instances} == before

        async def have_ended() -> bool:
            return all(record.status != "running" for record in await stack.admin.scale_records(limit=100))

        await eventually(have_ended)
        records = await stack.admin.scale_records(limit=100)
    changed = [record for record in records if record.direction == "mutate"]
    assert sorted(t.worker_id for record in changed for t in record.targets) == [
        "worker-0",
        "worker-0",
        "worker-1",
        "worker-1",
    ]
    assert all(record.status == "done" and record.bytes == 0 for record in changed)
    assert not [record for record in records if record.direction == "in"]
    (prefill,) = [record for record in changed if record.role == "prefill"]
    assert prefill.trigger_to_serving_ms is not None


async def test_a_worker_that_dies_with_its_new_role_costs_no_token(stack: Stack) -> None:
    async with openai_client(stack) as client:
        alone = [await _text(client, prompt) for prompt in PROMPTS]
        reading = [asyncio.create_task(_text(client, prompt)) for prompt in PROMPTS * 2]
        changing = asyncio.create_task(_serve(stack, "disaggregated", 1, prefill=1, decode=1))
        status = await until(stack, lambda s: any(i.role == "decode" for i in s.instances))
        (decode,) = [i for i in status.instances if i.role == "decode"]
        stack.kill(decode.workers[0])
        assert await asyncio.gather(*reading) == alone * 2
        # Another one is loaded, or what is left gets its role.
        await changing
        assert await _text(client, PROMPTS[1]) == alone[1]
