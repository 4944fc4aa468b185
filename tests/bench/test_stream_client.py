from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench import stream_client
from bench.stream_client import Endpoint, StreamClient, StreamFailed
from shared.errors import BadRequest


@asynccontextmanager
async def _answering(*answers: bytes, hang_up: bool = False) -> AsyncIterator[tuple[StreamClient, list[int]]]:
    """A server that gives ``answers`` in turn, and the number of connections it has seen."""
    connections = [0]
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[0] += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(left.pop(0))
                await writer.drain()
                if hang_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = StreamClient(Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1], tls=False, path=""))
    try:
        yield client, connections
    finally:
        client.close()
        listener.close()


LONG_S = 60.0
"""Of what is not to be late."""
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:8000", Endpoint("127.0.0.1", 8000, False, "")),
        ("http://box/v1/", Endpoint("box", 80, False, "")),
        ("https://api.example.org/serve", Endpoint("api.example.org", 443, True, "/serve")),
        ("http://[::1]:9", Endpoint("::1", 9, False, "")),
    ],
)
def test_urls_are_parsed(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.of(url) == endpoint


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadRequest):
        Endpoint.of(url)


async def test_connections_are_kept_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_client, "IDLE_S", LONG_S)
    async with _answering(SIZED, SIZED) as (client, connections):
        for _ in range(2):
            assert (await client.request("GET", "/", timeout_s=LONG_S)).body == b"ok"
    assert connections == [1]


async def test_a_connection_kept_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_client, "IDLE_S", 0.05)
    async with _answering(SIZED, SIZED) as (client, connections):
        await client.request("GET", "/", timeout_s=LONG_S)
        await asyncio.sleep(0.1)
        await client.request("GET", "/", timeout_s=LONG_S)
    assert connections == [2]


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with _answering(SIZED, SIZED, hang_up=True) as (client, connections):
        await client.request("GET", "/", timeout_s=LONG_S)
        await asyncio.sleep(0.05)
        assert (await client.request("GET", "/", timeout_s=LONG_S)).status == 200
    assert connections == [2]


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async with _answering(b"HTTP/1.1 500 Oops\r\n\r\nlong story", hang_up=True) as (client, _):
        reply = await client.request("GET", "/", timeout_s=LONG_S)
    assert (reply.status, reply.body) == (500, b"long story")


async def test_events_of_either_line_ending_are_read_and_comments_ignored() -> None:
    body = b": ping\n\ndata: one\n\ndata:two\r\n\r\nevent: x\ndata: three\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    events: list[bytes] = []
    async with _answering(head + body) as (client, _):
        await client.request("POST", "/", on_event=lambda data, now: events.append(data), timeout_s=LONG_S)
    assert b"one" in events
    assert events[-1] == b"three"
    assert b"ping" not in b"".join(events)


@pytest.mark.parametrize(
    ("answer", "timeout_s", "kind"),
    [
        (b"SSH-2.0-x\r\n\r\n", LONG_S, "protocol"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", LONG_S, "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", 0.2, "timeout"),
    ],
)
async def test_broken_answers_are_told_apart(answer: bytes, timeout_s: float, kind: str) -> None:
    async with _answering(answer) as (client, _):
        with pytest.raises(StreamFailed) as caught:
            await client.request("GET", "/", timeout_s=timeout_s)
    assert caught.value.kind == kind


async def test_a_body_cut_short_is_a_lost_connection() -> None:
    async with _answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", hang_up=True) as (client, _):
        with pytest.raises(StreamFailed) as caught:
            await client.request("GET", "/", timeout_s=LONG_S)
    assert caught.value.kind == "disconnected"
