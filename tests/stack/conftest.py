"""Real stacks: NATS, Redis and every service as a process. Started once per module that uses them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from compose.config import StackConfig
from compose.stack import Stack
from tests.checkpoints import tiny_checkpoint

READY_S = 240.0
MODEL = "llama-float32-single"
"""The tiny checkpoint's directory, and so the model's name."""

FAST = {
    "BLITZ_WORKER_ARENA_MIB": "64",
    "BLITZ_WORKER_KV_MIB": "64",
    "BLITZ_MONITOR_DOWN_WINDOW_S": "1",
}
NO_DEMAND = {
    "BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9",
    # What waits is not taken for a sign that instances are slower than that, either.
    "BLITZ_MONITOR_RATE_WINDOW_S": "60",
}
"""No load moves the monitor."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def torch_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Four workers with the torch engine and a tiny Llama. No load moves the monitor: only the tests scale."""
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("stack"),
        workers=4,
        port=0,
        env=FAST | NO_DEMAND,
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        yield stack


def mock_config(state_dir: Path, *, workers: int = 3, **env: str) -> StackConfig:
    """Workers that take time and no compute: 1 ms per decode step and layer, unless ``env`` says otherwise."""
    slow = {"BLITZ_MOCK_LAYER_BASE_MS": "1.0"}
    return StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=state_dir,
        workers=workers,
        port=0,
        engine="mock",
        env=FAST | slow | env,
    )
