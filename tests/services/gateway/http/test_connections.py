"""Clients that connect and do not send, or never end."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from services.gateway.server import ClientConnection, connection_capacity
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_refusals import TEXT, check
from tests.wait_until import WAIT_S

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(stack: Stack, sent: bytes = b"") -> Client:
    client = socket.create_connection(("127.0.0.1", int(stack.url.rpartition(":")[2])))
    client.setblocking(False)
    # Before the gateway takes the connection: from then on it counts the time, and the machine may stand still.
    sent = sent[client.send(sent) :]
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(sent)
    return reader, writer


async def closed(client: Client) -> bytes:
    """What came before the gateway closed the connection."""
    reader, writer = client
    try:
        async with asyncio.timeout(WAIT_S):
            got = await reader.read()
    except ConnectionResetError:
        got = b""
    writer.close()
    return got


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nHost"])
async def test_headers_that_do_not_come_in_time_end_the_connection(make_stack: StackFactory, sent: bytes) -> None:
    stack = await make_stack(read_timeout_s=0.2)
    assert await closed(await connect(stack, sent)) == b""
    assert stack.gateway.metrics.cuts == {"read_timeout": 1}


async def test_bytes_that_trickle_in_do_not_extend_the_time(make_stack: StackFactory) -> None:
    stack = await make_stack(read_timeout_s=0.3)
    reader, writer = await connect(stack)

    async def trickle() -> None:
        for byte in b"GET /" + b"a" * 10_000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    assert await closed((reader, writer)) == b""
    task.cancel()
    assert stack.gateway.metrics.cuts == {"read_timeout": 1}


async def test_a_body_that_does_not_come_in_time_is_408_and_the_connection_ends(make_stack: StackFactory) -> None:
    stack = await make_stack(read_timeout_s=0.2)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode()
    answer = await closed(await connect(stack, head))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert stack.gateway.request_memory.used_bytes == 0


async def test_headers_without_end_are_cut_off(stack: Stack) -> None:
    endless = b"GET /live HTTP/1.1\r\n" + b"a: " + b"x" * 70_000
    assert await closed(await connect(stack, endless)) == b""
    assert stack.gateway.metrics.cuts == {"head_too_large": 1}


async def test_a_body_behind_an_answer_is_read_for_a_while_and_then_no_more(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.server.LINGER_S", 0.2)
    stack = await make_stack(max_body_bytes=2000)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n".encode()
    reader, writer = await connect(stack, head)
    # Before anything is sent behind it: a connection that is closed with something unread is reset, and what its client
    # has not read by then is lost.
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")

    async def send() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.01)

    task = asyncio.create_task(send())
    await closed((reader, writer))
    task.cancel()


async def test_a_body_that_ends_behind_its_answer_does_not_keep_the_connection(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.server.LINGER_S", 0.3)
    stack = await make_stack(max_body_bytes=2000)
    reader, writer = await connect(stack, f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 3000\r\n\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.write(b"x" * 3000)
    await closed((reader, writer))
    assert not stack.gateway.metrics.cuts


async def test_the_longest_idle_connection_makes_room_for_a_new_one(make_stack: StackFactory) -> None:
    stack = await make_stack(max_connections=20)
    worker = stack.workers[0]
    worker.pause_after = 1
    streaming = asyncio.create_task(
        stack.http.post(TEXT, json={"model": "tiny", "prompt": "a", "max_tokens": 3}, timeout=WAIT_S)
    )
    await stack.until(lambda: worker.submits)
    idle = [await connect(stack) for _ in range(60)]
    assert (await stack.http.get("/live")).status_code == 200
    assert len(stack.server.server_state.connections) <= 20
    assert stack.gateway.metrics.cuts["too_many_connections"] >= 40
    assert await closed(idle[0]) == b""
    worker.resume.set()
    assert (await streaming).status_code == 200
    for _, writer in idle:
        writer.close()


async def test_a_connection_serves_request_after_request(make_stack: StackFactory) -> None:
    stack = await make_stack(read_timeout_s=1.0)
    request = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
    reader, writer = await connect(stack, request)
    for _ in range(6):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await reader.readuntil(b'{"status":"ok"}')
        await asyncio.sleep(0.2)
        writer.write(request)
    writer.write(request * 2)
    for _ in range(3):
        await reader.readuntil(b'{"status":"ok"}')
    writer.close()
    assert stack.gateway.metrics.cuts == {}


async def read_timeouts(stack: Stack) -> None:
    """Returns when every header timer that runs now has ended."""
    for _ in range(2):
        await closed(await connect(stack, b"GET /live HTTP/1.1\r\nHost"))


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /live HTTP/1.1\r\nHo"])
async def test_what_comes_behind_a_body_does_not_end_a_long_answer(make_stack: StackFactory, behind: bytes) -> None:
    stack = await make_stack(read_timeout_s=0.3)
    worker = stack.workers[0]
    worker.pause_after = 1
    body = b'{"model": "tiny", "prompt": "a", "stream": true}'
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reader, writer = await connect(stack, head + body)
    await stack.until(lambda: worker.submits)
    writer.write(behind)
    await read_timeouts(stack)
    worker.resume.set()
    await reader.readuntil(b"[DONE]")
    if behind.isspace():
        writer.write(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        writer.close()
    else:
        await closed((reader, writer))


async def test_empty_lines_between_requests_are_ignored(make_stack: StackFactory) -> None:
    stack = await make_stack()
    reader, writer = await connect(stack, b"\r\n")
    for _ in range(2):
        writer.write(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        stack.limits.read_timeout_s = 0.3  # and not for the first request, which comes when the machine lets it
        writer.write(b"\r\n\r\n")
        await read_timeouts(stack)
    writer.close()


async def test_requests_sent_ahead_hold_up_nothing_and_are_answered_in_turn(stack: Stack) -> None:
    count = 20_000
    reader, writer = await connect(stack, b"GET /live HTTP/1.1\r\n\r\n" * count)
    await stack.until(lambda: stack.server.server_state.connections)
    [connection] = stack.server.server_state.connections
    assert isinstance(connection, ClientConnection)
    for _ in range(300):
        await reader.readuntil(b'{"status":"ok"}')
        assert len(connection.pipeline) < 1000
        assert connection.num_waiting_bytes < 1024 * 1024
    assert (await stack.http.get("/live")).status_code == 200
    writer.close()


async def test_trailers_are_ignored_and_bounded(make_stack: StackFactory) -> None:
    stack = await make_stack(read_timeout_s=WAIT_S)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n0\r\n".encode()
    reader, writer = await connect(stack, head)
    await stack.until(lambda: stack.gateway.request_memory.used_bytes > 0)
    [connection] = stack.server.server_state.connections
    assert isinstance(connection, ClientConnection)
    writer.write(b"a: b\r\n" * 5000)
    await asyncio.sleep(0.1)
    assert len(connection.headers) == 2
    writer.write(b"a: b\r\n" * 20_000)
    assert await closed((reader, writer)) == b""
    assert stack.gateway.metrics.cuts == {"head_too_large": 1}
    assert stack.gateway.request_memory.used_bytes == 0


async def test_a_long_body_sent_ahead_comes_in_whole(make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.server.LINGER_S", 0.1)
    stack = await make_stack()
    worker = stack.workers[0]
    worker.pause_after = 1
    body = b'{"model": "tiny", "prompt": "a", "stream": true}' + b" " * 300_000
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reader, writer = await connect(stack, 2 * (head + body))
    await stack.until(lambda: worker.submits)
    await asyncio.sleep(0.3)
    worker.resume.set()
    await reader.readuntil(b"[DONE]")
    await stack.until(lambda: len(worker.submits) == 2)
    await asyncio.sleep(0.3)
    await reader.readuntil(b"[DONE]")
    writer.close()


async def test_a_client_that_sent_ahead_and_leaves_ends_what_is_answered(stack: Stack) -> None:
    worker = stack.workers[0]
    worker.pause_after = 1
    body = b'{"model": "tiny", "prompt": "a", "stream": true}'
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    _, writer = await connect(stack, 2 * (head + body))
    await stack.until(lambda: worker.submits)
    writer.close()
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 0)
    assert len(worker.submits) == 1


async def test_what_follows_an_offered_upgrade_is_no_request(stack: Stack) -> None:
    offer = b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    reader, writer = await connect(stack, offer + b"x" * 20_000)
    await reader.readuntil(b'{"status":"ok"}')
    writer.write(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
    await reader.readuntil(b'{"status":"ok"}')
    writer.close()


async def test_a_connection_without_a_request_is_given_up_by_its_client_first(stack: Stack) -> None:
    client_s = httpx.Limits().keepalive_expiry
    assert client_s is not None
    assert stack.server.config.timeout_keep_alive > client_s


async def test_too_large_a_body_can_still_read_its_refusal(make_stack: StackFactory) -> None:
    stack = await make_stack(max_body_bytes=2000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    check(await stack.http.post(TEXT, content=chunks()), 413, "invalid_request_error", "payload_too_large")


@pytest.mark.parametrize(
    ("hard", "capacity", "soft"), [(4096, 1000, 1128), (500, 372, 500), (resource.RLIM_INFINITY, 1000, 1128)]
)
def test_open_files_are_raised_to_what_connections_need(
    monkeypatch: pytest.MonkeyPatch, hard: int, capacity: int, soft: int
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert (connection_capacity(1000), raised) == (capacity, [(soft, hard)])
    assert (connection_capacity(100), len(raised)) == (100, 1)
