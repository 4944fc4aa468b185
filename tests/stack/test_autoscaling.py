"""The monitor alone takes a model up under load and back down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from compose.stack import Stack
from tests.stack.client import complete, openai_client, until
from tests.stack.conftest import MODEL, READY_S, mock_config

pytestmark = [pytest.mark.stack, pytest.mark.ucx]


async def test_load_adds_instances_and_silence_removes_them(tmp_path: Path) -> None:
    # One instance prefills 2,500 tokens/s: 4 layers of 0.1 ms per token.
    config = mock_config(
        tmp_path,
        BLITZ_MOCK_LAYER_PER_TOKEN_US="100",
        BLITZ_MOCK_LAYER_BASE_MS="0.1",
        BLITZ_MONITOR_ASSUMED_TOKENS_PER_S="2500",
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
            await until(stack, lambda s: s.serving(MODEL) == 3, timeout_s=20.0)
            quiet.set()
            assert sum(await asyncio.gather(*asking)) >= 24
            await until(stack, lambda s: s.serving(MODEL) == 1 and len(s.instances) == 1, timeout_s=20.0)
