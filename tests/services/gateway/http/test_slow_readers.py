"""Clients that do not read: what waits for them is bounded, and then they are let go."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from services.gateway.memory import ResponseMemory
from shared.messages.generation import TokenLogprobs
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_metrics import scrape
from tests.services.gateway.http.test_refusals import TEXT, check
from tests.services.gateway.test_failover import collect


async def connect(stack: Stack, body: dict[str, Any]) -> socket.socket:
    """A client that sends a request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", int(stack.url.rpartition(":")[2])))
    content = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + content)
    return client


def endless(stack: Stack) -> None:
    """Much more output than any buffer on the way holds."""
    record = stack.pool.models[0]
    worker = stack.workers[0]
    worker.script = lambda submit: [104] * submit.sampling.max_tokens
    worker.logprobs = TokenLogprobs(logprob=-0.5, top=tuple((i, -0.5) for i in range(20)))
    worker.step_s = 0.0
    assert record.spec.max_position == 256


STREAM = {"prompt": ["a"] * 64, "max_tokens": 200, "logprobs": 20, "stream": True}


async def test_a_client_for_which_too_much_waits_is_cut_off_and_its_requests_are_cancelled(
    make_stack: StackFactory, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await make_stack(slow_reader_bytes=65_536)
    endless(stack)
    client = await connect(stack, STREAM)
    await stack.until(lambda: stack.gateway.metrics.cuts.get("slow_reader"))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 0)
    await stack.until(lambda: stack.workers[0].cancels)
    assert stack.gateway.response_memory.used_bytes == 0
    assert stack.gateway.request_memory.used_bytes == 0
    assert "cut off (slow_reader)" in caplog.text
    assert (await scrape(stack))['blitz_gateway_cut_off_total{reason="slow_reader"}'] == 1
    client.close()
    stack.workers[0].logprobs = None
    assert await collect(stack)


async def test_a_client_that_takes_nothing_for_the_send_timeout_is_cut_off(make_stack: StackFactory) -> None:
    stack = await make_stack(send_timeout_s=0.2, slow_reader_bytes=2**30)
    endless(stack)
    client = await connect(stack, STREAM)
    await stack.until(lambda: stack.gateway.metrics.cuts.get("send_timeout"))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 0)
    # All of them may have been computed before.
    await stack.until(lambda: stack.gateway.response_memory.used_bytes == 0)
    client.close()


async def test_a_client_that_reads_gets_everything_however_small_the_bound(make_stack: StackFactory) -> None:
    stack = await make_stack(slow_reader_bytes=65_536)
    endless(stack)
    response = await stack.http.post(TEXT, json={"model": "tiny", **STREAM}, timeout=60)
    assert response.text.count("data: {") == 64 * 200
    assert response.text.endswith("data: [DONE]\n\n")
    assert stack.gateway.metrics.cuts == {}
    assert stack.gateway.response_memory.used_bytes == 0


async def test_an_answer_in_one_piece_that_grows_too_large_is_refused_and_stopped(make_stack: StackFactory) -> None:
    stack = await make_stack(response_memory_bytes=400_000)
    endless(stack)
    body = {"model": "tiny", **STREAM, "stream": False}
    response = await stack.http.post(TEXT, json=body)
    message = check(response, 400, "invalid_request_error", "response_too_large")
    assert "more than 100000 bytes" in message
    assert stack.gateway.dispatcher.num_active == 0
    assert stack.gateway.response_memory.used_bytes == 0


async def test_of_all_responses_the_largest_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    cuts: list[str] = []
    aborted: list[str] = []
    memory = ResponseMemory(total_bytes=1000, slow_bytes=10_000, whole_bytes=10_000, on_cut=cuts.append)
    large = memory.open("large", 1, lambda: aborted.append("large"))
    small = memory.open("small", 1, lambda: aborted.append("small"))
    large.begun = small.begun = True
    large.write(b"x" * 600)
    small.write(b"x" * 300)
    small.write(b"x" * 200)
    assert (cuts, aborted) == (["memory"], ["large"])
    assert large.over
    assert not small.over
    assert memory.used_bytes == small.held_bytes == 500
    assert small.take() == b"x" * 500
    small.sent(500)
    small.close()
    large.close()
    assert memory.used_bytes == 0
    assert "response large: cut off (memory)" in caplog.text
