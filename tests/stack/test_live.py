"""Live scaling in a real stack, with the unmodified ``openai`` client: a second instance helps while it loads."""

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
from shared.messages.load import LoadReport
from shared.messages.operations import ScaleRecord
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import bus, openai_client, stream, until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

NUM_LAYERS = 4
MAX_TOKENS = 20
ENDS_WITHIN_S = 240.0
PROMPTS = tuple(
    random.Random(index).choices(range(3, 200), k=length)
    for index, length in enumerate((7, 400, 31, 250, 3, 480, 120, 64, 333, 16, 222, 90))
)
"""All different, and of lengths of which some share a batch and some do not."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two workers with the torch engine, and a monitor that no load moves: only the test scales."""
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("live"),
        workers=2,
        port=0,
        env=FAST | NO_DEMAND,
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        yield running


async def _text(client: AsyncOpenAI, prompt: list[int]) -> str:
    return "".join([piece async for piece in stream(client, MODEL, max_tokens=MAX_TOKENS, prompt=prompt)])


async def _ended(stack: Stack, record: ScaleRecord) -> ScaleRecord:
    """The operation's end, with that of its pairs."""
    async with asyncio.timeout(ENDS_WITHIN_S):
        while record.status == "running" or any(pair.outcome == "running" for pair in record.live):
            record = await stack.admin.scale_record(record.plan_id)
            await asyncio.sleep(0.02)
    return record


async def test_streams_are_the_same_while_a_new_instance_works_before_it_is_loaded(stack: Stack) -> None:
    async with openai_client(stack) as client:
        alone = [await _text(client, prompt) for prompt in PROMPTS]

        reading = [asyncio.create_task(_text(client, prompt)) for prompt in PROMPTS * 2]
        record = await stack.admin.scale(MODEL, 2, hold_s=600.0, live="always")
        assert await asyncio.gather(*reading) == alone * 2
        record = await _ended(stack, record)

        assert record.status == "done", record
        (target,) = record.targets
        (pair,) = record.live
        assert pair.target == target.worker_id != pair.source
        # The weights may be here before the source has offered anything: then there is nothing to share.
        assert pair.outcome == "dissolved" or (pair.outcome == "failed" and pair.reason), pair
        assert target.live_ms is not None or pair.outcome == "failed", record
        assert all(batch.target_layers + batch.source_layers == NUM_LAYERS for batch in pair.batches), pair

        # Two instances with the same weights, and nothing of the pair left at either.
        status = await until(stack, lambda s: s.serving(MODEL) == len(s.instances) == 2)
        assert len({i.weights_digest for i in status.instances} - {""}) == 1
        reports: dict[str, LoadReport] = {}
        async with bus(stack) as listening:
            await subscribe_load(listening, lambda r: reports.update({r.instance_id: r}))
            deadline_s = time.monotonic() + ENDS_WITHIN_S
            while {i.id for i in status.instances} != {i for i, r in reports.items() if _is_idle(r)}:
                assert time.monotonic() < deadline_s, reports
                await asyncio.sleep(0.02)
        assert [await _text(client, prompt) for prompt in PROMPTS[:4]] == alone[:4]


def _is_idle(report: LoadReport) -> bool:
    return (report.queued_requests, report.running_requests, report.kv_blocks_used) == (0, 0, 0)
