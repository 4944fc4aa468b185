"""What an operator asks is answered by one command, and shown by ``top``: the page's feed in a terminal."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError
from typer.testing import CliRunner

from bench.replay.compare import app as report_app
from compose.cli.app import app
from compose.stack import Stack
from shared.messages.admin import SetModelBody
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import complete, openai_client, scale
from tests.stack.conftest import MODEL, READY_S, mock_config
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx]


async def _ask(stack: Stack, *arguments: str) -> str:
    use, rest = (report_app, arguments[1:]) if arguments[0] == "report" else (app, arguments)
    found = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, use, [*rest, "--url", stack.url])
    assert found.exit_code == 0, found.output
    return found.stdout


async def test_five_questions_have_an_answer_each(tmp_path: Path) -> None:
    config = mock_config(tmp_path, workers=4)
    config = replace(config, service_env={"pool": {"BLITZ_POOL_GPU_HOUR_COST": "2.5"}})
    async with Stack(config) as stack, openai_client(stack) as client:
        await stack.wait_ready(READY_S)
        record = await scale(stack, MODEL, 3)
        spare = next(worker.id for worker in (await stack.admin.status()).workers if worker.state == "spare")
        await _ask(stack, "workers", "drain", spare)
        other = await stack.admin.add_model(str(tiny_checkpoint("qwen2")), min_instances=0, no_room_timeout_s=0.0)

        async def view(key: str) -> Any:
            shown = json.loads((await _ask(stack, "top", "--once", "--json")).splitlines()[-1])["entities"]
            return shown.get(key, {})

        async def is_seen(key: str, name: str, value: object) -> None:
            """Sooner or later: what the planner knows comes to the feed when it comes."""

            async def is_so() -> bool:
                return bool((await view(key)).get(name) == value)

            await eventually(is_so)

        # Why are there three instances?
        why = await _ask(stack, "why", MODEL)
        assert "1 to 3 instances, by hand" in why
        await is_seen(f"operation/{record.plan_id}", "desired", 3)

        # Why was it a 503?
        with pytest.raises(APIStatusError) as refused:
            await complete(client, other.name, max_tokens=1)
        assert refused.value.status_code == 503
        assert f"drained: {spare}" in refused.value.message
        assert f"drained: {spare}" in await _ask(stack, "why", other.name)
        await stack.admin.set_model(other.name, SetModelBody(no_room_timeout_s=600.0))
        waiting = asyncio.create_task(complete(client, other.name, max_tokens=1))

        async def is_shown() -> bool:
            return f"drained: {spare}" in (await view(f"unplanned/{other.name}/colocated")).get("why", "")

        await eventually(is_shown)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        # Which worker holds what?
        held = json.loads(await _ask(stack, "pool", "--json"))
        [of] = [model for model in held["models"] if model["name"] == MODEL]
        holders = {each.workers[0] for each in (await stack.admin.status()).instances}
        assert {each["worker"] for each in of["instances"]} == holders
        for worker in holders:
            await is_seen(f"worker/{worker}", "model", MODEL)

        # What was slow in the last scale?
        report = json.loads(await _ask(stack, "report", "latest", "--json"))
        phases = {phase["name"]: phase["after_ms"] for phase in report["phases"]}
        assert phases["serving"] == record.trigger_to_serving_ms
        await is_seen(f"operation/{record.plan_id}", "trigger_to_serving_ms", record.trigger_to_serving_ms)

        # What does the model cost?
        cost = json.loads(await _ask(stack, "cost", MODEL, "--json"))
        assert cost["hour_cost"] == 2.5
        assert {use["model"] for use in cost["uses"]} == {"", MODEL}

        async def has_cost() -> bool:
            return (await view(f"gpu_time/{MODEL}")).get("cost", 0.0) > 0.0

        await eventually(has_cost)
