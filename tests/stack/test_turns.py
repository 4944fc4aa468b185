"""More models than workers: they take turns, and nobody is refused."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import PATIENCE_S, complete, openai_client
from tests.stack.conftest import FAST, READY_S

NUM_REQUESTS = 30


async def test_six_models_on_two_workers_answer_everything(tmp_path: Path) -> None:
    # How soon a turn comes depends on how busy the machine is.
    env = FAST | {"BLITZ_GATEWAY_NO_ROOM_TIMEOUT_S": f"{PATIENCE_S:g}"}
    config = StackConfig(models=(), state_dir=tmp_path, workers=2, port=0, engine="mock", env=env)
    paths = [tiny_checkpoint("llama"), tiny_checkpoint("qwen2"), ensure_demo_model(tmp_path)]
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        for number in range(6):
            # Two names each: what loads under one may be read for the other.
            await stack.admin.add_model(str(paths[number % 3]), name=f"m{number}", min_instances=0)
        async with openai_client(stack) as client:
            draw, free = random.Random(5), asyncio.Semaphore(6)

            async def ask() -> tuple[int, str]:
                number = draw.randrange(6)
                async with free:
                    return number % 3, await complete(client, f"m{number}", max_tokens=8)

            async with asyncio.timeout(PATIENCE_S):
                answers = await asyncio.gather(*(ask() for _ in range(NUM_REQUESTS)))
        assert len(answers) == NUM_REQUESTS
        texts = {checkpoint: {text for number, text in answers if number == checkpoint} for checkpoint in range(3)}
        assert all(len(found) == 1 for found in texts.values())
        pool = await stack.admin.pool()
        assert all(len(model.host_copies) <= 1 for model in pool.models)
