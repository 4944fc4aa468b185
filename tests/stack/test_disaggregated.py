"""Disaggregated serving in a real stack, with the unmodified ``openai`` client: prompts here, decoding there."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from compose.config import StackConfig
from compose.stack import Stack
from shared.load_feed import subscribe_load
from shared.messages.common import Role
from shared.messages.load import LoadReport
from shared.messages.operations import ScaleRecord
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import PATIENCE_S, bus, openai_client, stream, until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

SPLIT = "split"
"""The same checkpoint under another name, with prefill and decode instances only."""
MAX_TOKENS = 24
PROMPTS = tuple(
    random.Random(index).choices(range(3, 200), k=length) for index, length in enumerate((7, 400, 31, 250, 3, 480, 120))
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One colocated instance of the model; of its other name one prefill and one decode instance; one spare worker. The
    longer prompts are computed in several chunks."""
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("split"),
        workers=4,
        port=0,
        env=FAST | NO_DEMAND | {"BLITZ_WORKER_PREFILL_CHUNK": "96"},
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        await running.admin.add_model(str(tiny_checkpoint("llama")), name=SPLIT, min_instances=0)
        for role in ("prefill", "decode"):
            await _scale(running, 1, role)
        yield running


async def _scale(stack: Stack, instances: int, role: Role) -> None:
    record = await _ended(stack, await stack.admin.scale(SPLIT, instances, hold_s=3600.0, role=role))
    assert record.status == "done", record
    assert record.role == role
    await until(stack, lambda s: sum(i.role == role and i.state == "serving" for i in s.instances) == instances)


async def _ended(stack: Stack, record: ScaleRecord) -> ScaleRecord:
    """The operation's end, with that of its pairs."""
    async with asyncio.timeout(PATIENCE_S):
        while record.status == "running" or any(pair.outcome == "running" for pair in record.live):
            record = await stack.admin.scale_record(record.plan_id)
            await asyncio.sleep(0.02)
    return record


async def _text(client: AsyncOpenAI, model: str, prompt: list[int]) -> str:
    return "".join([piece async for piece in stream(client, model, max_tokens=MAX_TOKENS, prompt=prompt)])


async def test_the_text_is_that_of_one_instance(stack: Stack) -> None:
    reports: dict[str, LoadReport] = {}
    async with openai_client(stack) as client, bus(stack) as listening:
        await subscribe_load(listening, lambda r: reports.update({r.instance_id: r}))
        alone = [await _text(client, MODEL, prompt) for prompt in PROMPTS]
        split = await asyncio.gather(*(_text(client, SPLIT, prompt) for prompt in PROMPTS * 2))
        assert split == alone * 2

        def by_role(role: Role) -> LoadReport | None:
            return next((r for r in reports.values() if r.model == SPLIT and r.role == role), None)

        num_tokens = sum(map(len, PROMPTS))
        deadline_s = time.monotonic() + PATIENCE_S
        while (decode := by_role("decode")) is None or decode.decode_tokens_total < 2 * len(PROMPTS) * (MAX_TOKENS - 1):
            assert time.monotonic() < deadline_s, reports
            await asyncio.sleep(0.05)
        while (prefill := by_role("prefill")) is None or prefill.prefill_tokens_total < num_tokens:
            assert time.monotonic() < deadline_s, reports
            await asyncio.sleep(0.05)
        assert prefill.decode_tokens_total == 0
        assert prefill.prefill_tokens_total <= 2 * num_tokens  # the second time most of it may be there
        # The decode instance had no prompt to compute: its KV came.
        while any((r.kv_blocks_used, r.running_requests, r.queued_requests) != (0, 0, 0) for r in reports.values()):
            assert time.monotonic() < deadline_s, reports
            await asyncio.sleep(0.05)


async def test_a_killed_decode_worker_costs_no_token(stack: Stack) -> None:
    async with openai_client(stack) as client:
        alone = [await _text(client, MODEL, prompt) for prompt in PROMPTS]
        status = await stack.admin.status()
        (decode,) = [i for i in status.instances if i.role == "decode"]
        reading = [asyncio.create_task(_text(client, SPLIT, prompt)) for prompt in PROMPTS * 3]
        await asyncio.sleep(0.05)
        stack.kill(decode.workers[0])
        assert await asyncio.gather(*reading) == alone * 3
        # The floor brings another decode instance.
        await until(
            stack,
            lambda s: any(i.role == "decode" and i.state == "serving" and i.id != decode.id for i in s.instances),
        )
        assert await _text(client, SPLIT, PROMPTS[1]) == alone[1]


async def test_a_prefill_instance_is_scaled_live(stack: Stack) -> None:
    async with openai_client(stack) as client:
        alone = [await _text(client, MODEL, prompt) for prompt in PROMPTS]
        # The killed one is back.
        await until(stack, lambda s: len(s.workers) == 4 and any(w.state == "spare" for w in s.workers))
        reading = [asyncio.create_task(_text(client, SPLIT, prompt)) for prompt in PROMPTS * 3]
        record = await stack.admin.scale(SPLIT, 2, hold_s=600.0, live="always", role="prefill")
        assert await asyncio.gather(*reading) == alone * 3
        record = await _ended(stack, record)
        assert record.status == "done", record
        (pair,) = record.live
        assert pair.outcome in ("dissolved", "failed"), pair
