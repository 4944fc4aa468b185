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
from tests.services.waiting import eventually
from tests.stack.client import complete, scale, stream, until
from tests.stack.conftest import MODEL, READY_S, mock_config

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 400
"""At 4 layers of 1 ms: a stream of about two seconds."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    config = mock_config(tmp_path_factory.mktemp("standby"), workers=2)
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
    async with http_client() as http:
        answer = (await http.get(f"{stack.url}/admin/scale", params={"limit": 100})).raise_for_status()
    return {record["plan_id"] for record in answer.json()["records"]}


class Reader:
    """Reads one stream."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self.text = ""
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncOpenAI) -> None:
        async for piece in stream(client, MODEL, max_tokens=TOKENS):
            self.text += piece


async def _well_begun(readers: list[Reader], expected: str) -> None:
    """And far from their ends."""
    await eventually(lambda: all(len(reader.text) > len(expected) / 5 for reader in readers))
    assert not any(reader.task.done() for reader in readers)


async def _texts(readers: list[Reader]) -> list[str]:
    await asyncio.gather(*(reader.task for reader in readers))
    return [reader.text for reader in readers]


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
        expected = await complete(first, MODEL, max_tokens=TOKENS)
        readers = [Reader(client) for client in (first, second) for _ in range(3)]
        await _well_begun(readers, expected)
        stack.kill(leader)
        async with asyncio.timeout(60):
            while _newest_term(stack, kind)[0] == term:
                await asyncio.sleep(0.05)
        assert await _texts(readers) == [expected] * 6
    for instances in (1, 2):
        record = await scale(stack, MODEL, instances)
        assert record.status == "done", record
        await until(stack, lambda s, n=instances: s.serving(MODEL) == n)  # type: ignore[misc]
    assert known < await _listed(stack)


async def test_the_other_gateways_streams_do_not_notice_a_killed_one(stack: Stack) -> None:
    async with _client(stack.urls[0]) as first, _client(stack.urls[1]) as second:
        expected = await complete(first, MODEL, max_tokens=TOKENS)
        readers = [Reader(first) for _ in range(3)]
        await _well_begun(readers, expected)
        stack.kill("gateway-1")
        assert await _texts(readers) == [expected] * 3
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await complete(second, MODEL, max_tokens=TOKENS) == expected
                    break
                except openai.APIError:
                    await asyncio.sleep(0.2)
