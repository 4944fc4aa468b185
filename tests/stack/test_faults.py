"""Real processes are killed; no accepted request is lost and no token is lost or repeated."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import httpx
import nats
import openai
import pytest
import pytest_asyncio
from nats.aio.client import Client

from compose.stack import Stack
from shared import subjects
from shared.messages.admin import Status
from shared.permissions import KINDS, TABLE, Kind, inbox_prefix
from tests.plain_http import http_client
from tests.stack.client import PATIENCE_S, complete, openai_client, scale, stream, until
from tests.stack.conftest import MODEL, READY_S, mock_config
from tests.stack.readers import MORE_TOKENS, SLOWLY, TOKENS, texts, well_begun
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(mock_config(tmp_path_factory.mktemp("faults"), **SLOWLY)) as running:
        await running.wait_ready(READY_S)
        yield running


async def _streams_through(stack: Stack, *names: str) -> None:
    """Six streams run while processes are killed; each must give the undisturbed text."""
    async with openai_client(stack) as client:
        readers, expected = await well_begun([client] * 6)
        for name in names:
            stack.kill(name)
        assert await texts(readers) == [expected] * 6


def _knows(status: Status, instance_id: str) -> bool:
    """Whether the registry lists it: it may take a moment to hear of a death."""
    return any(instance.id == instance_id for instance in status.instances)


async def test_a_killed_workers_streams_continue_elsewhere(stack: Stack) -> None:
    await scale(stack, MODEL, 2)
    status = await until(stack, lambda s: s.serving(MODEL) == 2)
    killed = status.instances[0]
    await _streams_through(stack, killed.workers[0])
    await until(stack, lambda s: not _knows(s, killed.id) and s.serving(MODEL) == 2 and len(s.workers) == 3)


async def test_the_only_instance_dies_and_its_streams_wait_for_the_next(stack: Stack) -> None:
    await scale(stack, MODEL, 1)
    status = await until(stack, lambda s: len(s.instances) == 1)
    killed = status.instances[0]
    await _streams_through(stack, killed.workers[0])
    await until(stack, lambda s: not _knows(s, killed.id) and s.serving(MODEL) >= 1 and len(s.workers) == 3)


async def test_streams_survive_a_restart_of_nats(stack: Stack) -> None:
    await scale(stack, MODEL, 2)
    before = await until(stack, lambda s: s.serving(MODEL) == 2)
    await _streams_through(stack, "nats")
    after = await until(stack, lambda s: s.serving(MODEL) >= 2)
    assert {i.id for i in before.instances} <= {i.id for i in after.instances}, "an outage is not a mass death"


async def test_streams_survive_the_control_plane(stack: Stack) -> None:
    await scale(stack, MODEL, 2)
    before = await until(stack, lambda s: s.serving(MODEL) == 2)
    await _streams_through(stack, "redis", "pool", "planner", "monitor")
    after = await until(stack, lambda s: s.serving(MODEL) >= 2)
    assert {i.id for i in before.instances} <= {i.id for i in after.instances}
    # And scaling works again.
    record = await scale(stack, MODEL, 3)
    assert record.status == "done", record
    await scale(stack, MODEL, 1)


async def _client(stack: Stack, user: Kind) -> Client:
    password = stack.nats_access(user).password
    return await nats.connect(stack.addresses.nats_url, user=user, password=password, inbox_prefix=inbox_prefix(user))


async def test_a_rolling_restart_of_all_workers_loses_no_request_and_at_most_one_instance_at_a_time(
    stack: Stack,
) -> None:
    wanted = 2
    await scale(stack, MODEL, wanted, hold_s=600.0)
    status = await until(stack, lambda s: s.serving(MODEL) == wanted and len(s.workers) == 3)
    workers = [worker.id for worker in status.workers]
    fewest, answers, over = wanted, 0, asyncio.Event()

    async def watch() -> None:
        nonlocal fewest
        while not over.is_set():
            fewest = min(fewest, (await stack.admin.status()).serving(MODEL))
            await asyncio.sleep(0.05)

    async with openai_client(stack) as client:
        expected = await complete(client, MODEL, max_tokens=TOKENS)

        async def ask() -> None:
            nonlocal answers
            while not over.is_set():
                assert "".join([piece async for piece in stream(client, MODEL, max_tokens=TOKENS)]) == expected
                answers += 1

        async with asyncio.TaskGroup() as group:
            for work in (watch(), ask(), ask(), ask()):
                group.create_task(work)
            for name in workers:
                before = stack.processes[name].pid
                stack.kill(name, signal.SIGTERM)
                await eventually(lambda name=name, before=before: stack.processes[name].pid != before)  # type: ignore[misc]
                await until(stack, lambda s: s.serving(MODEL) == wanted and len(s.workers) == 3)
            over.set()
    assert fewest >= wanted - 1
    assert answers > 0
    await scale(stack, MODEL, 1)


async def test_garbage_on_every_subject_changes_nothing(stack: Stack) -> None:
    await until(stack, lambda s: s.serving(MODEL) >= 1)
    pids = {name: child.pid for name, child in stack.processes.items()}
    # Of each subject, from one who may send on it.
    clients = {user: await _client(stack, user) for user in KINDS}
    workers = [w.id for w in (await stack.admin.status()).workers]
    everywhere = [
        (row.senders[0], subject)
        for row in TABLE
        if row.senders
        for subject in {row.subject.replace("*", name) for name in (*workers, "nobody")}
    ]
    for user, subject in everywhere:
        for payload in (b"", b"\xc1\xff\x00", b"\x81\xa4kind\xaanothing.v9", b"{}" * 50_000):
            await clients[user].publish(subject, payload)
    for client in clients.values():
        await client.flush()
    answer = await clients["gateway"].request(subjects.pool("snapshot"), b"\xc1", timeout=60)
    assert answer.headers is not None
    assert "malformed_message" in answer.headers.values()
    for client in clients.values():
        await client.close()
    async with openai_client(stack) as asking:
        assert await complete(asking, MODEL, max_tokens=5)
    assert {name: child.pid for name, child in stack.processes.items()} == pids


async def test_a_killed_gateway_comes_back_and_its_requests_are_freed(stack: Stack) -> None:
    async with openai_client(stack) as client:
        events = stream(client, MODEL, max_tokens=MORE_TOKENS)
        await anext(events)
        stack.kill("gateway")
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            async for _ in events:
                pass
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with openai_client(stack) as asking:
                        assert await complete(asking, MODEL, max_tokens=5)
                    break
                except openai.APIError:
                    await asyncio.sleep(0.2)
        async with http_client(timeout=PATIENCE_S) as http:
            assert (await http.get(f"{stack.url}/health")).status_code == 200
