"""Several planners, monitors, pools and gateways: when one is killed, another goes on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from compose.stack import Stack
from tests.plain_http import http_client, openai_client
from tests.stack.client import PATIENCE_S, complete, scale, until
from tests.stack.conftest import MODEL, READY_S, mock_config
from tests.stack.readers import SLOWLY, texts, well_begun
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    config = mock_config(tmp_path_factory.mktemp("standby"), workers=2, **SLOWLY)
    async with Stack(replace(config, planners=2, monitors=2, pools=2, gateways=2)) as running:
        await running.wait_ready(READY_S)
        yield running


def _client(url: str) -> AsyncOpenAI:
    return openai_client(url)


def _newest_term(stack: Stack, kind: str) -> tuple[int, str]:
    """And the name of the process that has it."""
    return max(
        (int(term), name)
        for name in (f"{kind}-0", f"{kind}-1")
        for term in ["0", *re.findall(r"leading, term (\d+)", (stack.state_dir.logs / f"{name}.log").read_text())]
    )


async def _listed(stack: Stack) -> set[str]:
    """Ids of the operations that are on record."""
    async with http_client(timeout=PATIENCE_S) as http:
        answer = (await http.get(f"{stack.url}/admin/scale", params={"limit": 100})).raise_for_status()
    return {record["plan_id"] for record in answer.json()["records"]}


@pytest.mark.parametrize("kind", ["planner", "pool", "monitor"])
async def test_another_leads_when_the_leader_is_killed_and_nothing_is_forgotten(stack: Stack, kind: str) -> None:
    record = await scale(stack, MODEL, 2)
    assert record.status == "done", record
    await until(stack, lambda s: s.serving(MODEL) == 2)
    known = await _listed(stack)
    assert known
    term, leader = _newest_term(stack, kind)
    assert term > 0
    async with _client(stack.urls[0]) as first, _client(stack.urls[1]) as second:
        readers, expected = await well_begun([first, second] * 3)
        stack.kill(leader)
        await eventually(lambda: _newest_term(stack, kind)[0] > term)
        assert await texts(readers) == [expected] * 6
    for instances in (1, 2):
        record = await scale(stack, MODEL, instances)
        assert record.status == "done", record
        await until(stack, lambda s, n=instances: s.serving(MODEL) == n)  # type: ignore[misc]
    assert known < await _listed(stack)


async def test_the_other_gateways_streams_do_not_notice_a_killed_one(stack: Stack) -> None:
    async with _client(stack.urls[0]) as first, _client(stack.urls[1]) as second:
        readers, expected = await well_begun([first] * 3)
        stack.kill("gateway-1")
        assert await texts(readers) == [expected] * 3
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert await complete(second, MODEL, max_tokens=readers[0].max_tokens) == expected
                    break
                except openai.APIError:
                    await asyncio.sleep(0.2)
