"""A tiny OpenAI server over plain asyncio, whose misbehaviour a test chooses per request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

Script = Callable[[int], str]
"""The behaviour for the n-th completion: ok, 429, error_event, cut, silent, short, garbage, no_usage; die: nothing
answers any more, and what is being answered breaks off."""


@dataclass
class FakeServer:
    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    connections: int = 0
    dead: bool = False


def _chunk(data: str) -> bytes:
    payload = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(payload), payload)


@asynccontextmanager
async def fake_server(
    script: Script = lambda n: "ok",
    *,
    gap_s: float = 0.0,
    answers: asyncio.Event | None = None,
    max_model_len: int | None = None,
    split: bool = False,
    admin: Mapping[str, msgspec.Struct] | None = None,
    admin_status: str = "404 Not Found",
) -> AsyncIterator[FakeServer]:
    """Serve one model, "fake"; ``split`` sends every answer a few bytes at a time. ``answers``: until it is set, no
    completion is answered. ``admin``: what GET answers there, by path; elsewhere there it answers ``admin_status``."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1

        async def send(data: bytes) -> None:
            pieces = [data[i : i + 7] for i in range(0, len(data), 7)] if split else [data]
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if split:
                    await asyncio.sleep(0)

        async def answer(status: str, body: bytes) -> None:
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            await send(head.encode() + body)

        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if server.dead:
                    return
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if head.startswith("GET /v1/models "):
                    card = {"id": "fake", "object": "model"}
                    if max_model_len is not None:
                        card["max_model_len"] = max_model_len  # type: ignore[assignment]
                    await answer("200 OK", json.dumps({"object": "list", "data": [card]}).encode())
                    continue
                path = head.split(" ")[1]
                if path.startswith("/admin"):
                    found = (admin or {}).get(path)
                    body = msgspec.json.encode(found) if found is not None else b"{}"
                    await answer(admin_status if found is None else "200 OK", body)
                    continue
                server.bodies.append(json.loads(body))
                server.authorizations.append(headers.get("authorization"))
                server.running += 1
                server.most_running = max(server.running, server.most_running)
                try:
                    if answers is not None:
                        await answers.wait()
                    if not await complete(script(len(server.bodies) - 1), json.loads(body), send, answer):
                        return
                finally:
                    server.running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def complete(behaviour: str, body: dict[str, Any], send: Any, answer: Any) -> bool:
        if behaviour == "429":
            await answer("429 Too Many Requests", b'{"error":{"message":"queue full","code":"overloaded"}}')
            return True
        if behaviour == "die":
            server.dead = True
            listener.close()
            return False
        if behaviour == "silent":
            await asyncio.sleep(60)
        await send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        wanted = body["max_tokens"] - (1 if behaviour == "short" else 0)
        for index in range(wanted):
            if server.dead:
                return False
            if index == 1 and behaviour in ("error_event", "cut", "garbage"):
                if behaviour == "error_event":
                    await send(_chunk('{"error":{"message":"instance lost","code":"unavailable"}}'))
                elif behaviour == "garbage":
                    await send(_chunk("{not json"))
                if behaviour != "cut":
                    await send(_chunk("[DONE]") + b"0\r\n\r\n")
                return behaviour != "cut"
            finish = "length" if index == wanted - 1 else None
            await send(_chunk(json.dumps({"choices": [{"text": f"t{index} ", "finish_reason": finish}]})))
            await asyncio.sleep(gap_s)
        if behaviour != "no_usage":
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": wanted}
            await send(_chunk(json.dumps({"choices": [], "usage": usage})))
        await send(_chunk("[DONE]") + b"0\r\n\r\n")
        return True

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server = FakeServer(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield server
    finally:
        listener.close()
