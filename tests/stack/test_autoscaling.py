"""The monitor alone takes a model up under load and back down."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from shared import subjects
from shared.load_feed import subscribe_load
from shared.messages.load import Demand, LoadReport
from tests.stack.client import bus, complete, openai_client, until
from tests.stack.conftest import MODEL, READY_S, mock_config
from tests.wait_until import eventually

SAME_PROMPTS = {"BLITZ_GATEWAY_PREFIX_CACHE": "0"}
"""Each is computed, though they are equal."""

pytestmark = [pytest.mark.stack, pytest.mark.ucx]


async def test_load_adds_instances_and_silence_removes_them(tmp_path: Path) -> None:
    # One instance prefills 2,500 tokens/s: 4 layers of 0.1 ms per token.
    config = mock_config(
        tmp_path,
        BLITZ_MOCK_LAYER_PER_TOKEN_US="100",
        BLITZ_MOCK_LAYER_BASE_MS="0.1",
        BLITZ_MONITOR_ASSUMED_TOKENS_PER_S="2500",
        **SAME_PROMPTS,
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        async with openai_client(stack) as client:
            quiet = asyncio.Event()

            async def keep_asking() -> int:
                asked = 0
                while not quiet.is_set():
                    await complete(client, MODEL, prompt=[7] * 300, max_tokens=4)
                    asked += 1
                return asked

            asking = [asyncio.create_task(keep_asking()) for _ in range(24)]
            await until(stack, lambda s: s.serving(MODEL) == 3)
            quiet.set()
            assert sum(await asyncio.gather(*asking)) >= 24
            await until(stack, lambda s: s.serving(MODEL) == 1 and len(s.instances) == 1)


async def test_one_long_prompt_asks_for_one_instance_and_many_for_more(tmp_path: Path) -> None:
    # A long prompt takes 1.4 s, however busy the machine is: 8 layers of 0.05 ms per token.
    slow = mock_config(tmp_path, BLITZ_MOCK_LAYER_PER_TOKEN_US="50", BLITZ_MOCK_LAYER_BASE_MS="0.1", **SAME_PROMPTS)
    async with Stack(replace(slow, models=(ensure_demo_model(tmp_path),))) as stack:
        await stack.wait_ready(READY_S)
        async with openai_client(stack) as client, bus(stack) as listening:
            demands: list[Demand] = []
            reports: list[LoadReport] = []
            await listening.subscribe(subjects.demand(), Demand, demands.append)
            await subscribe_load(listening, reports.append)
            long = [60] * 3500
            for _ in range(2):
                await complete(client, "demo", prompt=long, max_tokens=4)
            while not any(r.queued_tokens > 2000 for r in reports):  # it was not seen to wait
                await complete(client, "demo", prompt=long, max_tokens=4)
            await eventually(lambda: reports[-1].prefill_tokens_per_s > 0)  # and was measured
            await asyncio.sleep(1.5)
            assert {d.desired for d in demands} <= {1}
            await asyncio.gather(*(complete(client, "demo", prompt=long, max_tokens=4) for _ in range(3)))
            most = max(demands, key=lambda d: d.desired)
            assert most.desired in (2, 3), most.reason
