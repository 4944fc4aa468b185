"""A directory of tensors that is no language model, and that no engine here serves: kept, moved and dropped as any."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from compose.stack import Stack
from shared.errors import BadCheckpoint
from shared.messages.admin import PoolModel
from tests.stack.client import PATIENCE_S
from tests.stack.conftest import MODEL, READY_S, mock_config

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

NAME = "pictures"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    config = mock_config(tmp_path_factory.mktemp("stack"), BLITZ_WORKER_HOST_CACHE_MIB="64")
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    tensors = {f"unet.down_blocks.{i}.conv.weight": torch.randn(64, 64, 3, 3) for i in range(5)}
    save_file(tensors | {"unet.conv_in.bias": torch.randn(7).to(torch.float16)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    return path


async def copies_are(stack: Stack, condition: Callable[[PoolModel], bool]) -> PoolModel:
    """What the pool says of it, once that is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = next(model for model in (await stack.admin.pool()).models if model.name == NAME)
            if condition(found):
                return found
            await asyncio.sleep(0.05)


async def test_it_is_kept_moved_and_dropped_and_no_request_reaches_it(stack: Stack, directory: Path) -> None:
    with pytest.raises(BadCheckpoint, match="architecture"):
        await stack.admin.add_model(str(directory), name=NAME)
    await stack.admin.add_model(str(directory), name=NAME, engine="vllm", min_instances=0)
    kept = await copies_are(stack, lambda model: [copy.state for copy in model.host_copies] == ["ready"])
    assert kept.invariant == "ok"
    (holder,) = [copy.worker for copy in kept.host_copies]

    await stack.admin.drain_worker(holder)
    moved = await copies_are(
        stack, lambda model: [copy.state for copy in model.host_copies if copy.worker != holder] == ["ready"]
    )
    assert moved.weights_bytes == kept.weights_bytes > 5 * 64 * 64 * 9 * 4
    await stack.admin.undrain_worker(holder)

    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            refused = await client.post(path, json={"model": NAME, **body})
            assert refused.status_code == 400
            assert "no language model" in refused.json()["error"]["message"]
            assert (await client.post(path, json={"model": MODEL, **body})).status_code == 200

    await stack.admin.remove_model(NAME)
    async with asyncio.timeout(PATIENCE_S):
        while any(stray.model == NAME for stray in (await stack.admin.pool()).strays):
            await asyncio.sleep(0.05)
