"""A model with a keep-alive comes and goes with its requests, and its settings change while it is served."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from compose.stack import Stack
from shared.errors import BadRequest, ModelNotFound
from shared.messages.admin import SetModelBody
from tests.stack.client import complete, openai_client, until
from tests.stack.conftest import MODEL, READY_S, mock_config

KEEP_ALIVE_S = 6.0
"""Much more than a busy machine takes to say that a request has ended."""


async def num_host_copies(stack: Stack) -> int:
    (model,) = (await stack.admin.pool()).models
    return sum(copy.state == "ready" for copy in model.host_copies)


async def test_a_model_sleeps_after_its_keep_alive_and_takes_new_settings_at_once(tmp_path: Path) -> None:
    # Without a keep-alive it would go at once.
    config = mock_config(tmp_path, BLITZ_MONITOR_DOWN_WINDOW_S="0.1")
    async with Stack(replace(config, keep_alive_s=KEEP_ALIVE_S)) as stack, openai_client(stack) as client:
        status = await stack.wait_ready(READY_S)
        assert status.instances == (), "it sleeps from the beginning"
        for _ in range(2):
            text = await complete(client, MODEL, max_tokens=4)
            assert text
            ended_s = time.monotonic()
            assert (await stack.admin.status()).serving(MODEL) == 1
            await until(stack, lambda status: not status.serving(MODEL))
            # The monitor may have known of the end before this process did.
            assert time.monotonic() - ended_s >= KEEP_ALIVE_S / 2
            await until(stack, lambda status: all(worker.state == "spare" for worker in status.workers))
            assert await num_host_copies(stack) == 1

        with pytest.raises(BadRequest) as refused:
            await stack.admin.set_model(MODEL, SetModelBody(min_instances=2))
        assert f"keep_alive_s {KEEP_ALIVE_S:g}" in refused.value.message
        with pytest.raises(ModelNotFound):
            await stack.admin.set_model("no-such", SetModelBody(min_instances=2))
        with pytest.raises(BadRequest, match="nothing to change"):
            await stack.admin.set_model(MODEL, SetModelBody())
        assert not (await stack.admin.status()).serving(MODEL)

        await stack.admin.set_model(MODEL, SetModelBody(min_instances=2, keep_alive_s=0))
        await until(stack, lambda status: status.serving(MODEL) == 2)
        await stack.admin.set_model(MODEL, SetModelBody(min_instances=1, max_instances=1))
        await until(stack, lambda status: len(status.instances) == 1)
        await stack.admin.set_model(MODEL, SetModelBody(min_instances=0))
        await until(stack, lambda status: status.instances == ())
        (model,) = await stack.admin.models()
        assert (model.min_instances, model.max_instances, model.keep_alive_s) == (0, 1, 0.0)
        assert await complete(client, MODEL, max_tokens=4) == text
