"""The hostile clients, in a process of their own: ``python -m bench.hostile.clients < spec > result``.

The first line of its input is a ``HostileSpec``; it goes on until its input ends, and then says what it did.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine

import msgspec
import uvloop

from bench.stream_client import Endpoint, StreamClient, StreamFailed

STOP_TOKENS = 4_000_000
PROMPTS = 256
PROMPT_TOKENS = 16
SLOW_TOKENS = 3000
CONNECT_AT_ONCE = 100
TIMEOUT_S = 60.0


class HostileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to attack, and with what."""

    url: str
    api_key: str
    model: str
    idle_connections: int = 2000
    pause_s: float = 0.0
    """Between an answer and the same client's next request."""


class HostileResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, and how the gateway took it."""

    answers: dict[str, int]
    """Answers by client and status, as ``stop_tokens 413``."""
    idle_connections: int
    """Opened in all; a closed one is opened again."""
    slow_bytes: int
    """Read by the client that reads one byte per second."""


class HostileClients:
    """All of them at once, each its next request when the last one is answered."""

    def __init__(self, spec: HostileSpec) -> None:
        self._spec = spec
        self._endpoint = Endpoint.of(spec.url)
        self._answers: Counter[str] = Counter()
        self._idle = 0
        self._slow_bytes = 0
        self.all_connected = asyncio.Event()
        """Set once every idle connection was open for the first time."""

    async def run(self) -> None:
        """Attack until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connect_all())
            tasks.create_task(self._slow_reader())
            tasks.create_task(self._posts("stop_tokens", self._stop_tokens()))
            tasks.create_task(self._posts("prompts", self._prompts()))

    def result(self) -> HostileResult:
        return HostileResult(
            answers=dict(sorted(self._answers.items())), idle_connections=self._idle, slow_bytes=self._slow_bytes
        )

    def _stop_tokens(self) -> bytes:
        head = {"model": self._spec.model, "prompt": "a", "max_tokens": 1}
        return msgspec.json.encode(head)[:-1] + b',"stop_token_ids":[' + b"1," * (STOP_TOKENS - 1) + b"1]}"

    def _prompts(self) -> bytes:
        prompts = [[10 + (index + token) % 200 for token in range(PROMPT_TOKENS)] for index in range(PROMPTS)]
        return msgspec.json.encode({"model": self._spec.model, "prompt": prompts})

    async def _posts(self, name: str, body: bytes) -> None:
        client = StreamClient(self._endpoint, api_key=self._spec.api_key)
        while True:
            try:
                reply = await client.request("POST", "/v1/completions", body, timeout_s=TIMEOUT_S)
                self._answers[f"{name} {reply.status}"] += 1
            except StreamFailed as failure:
                self._answers[f"{name} {failure.kind}"] += 1
                await asyncio.sleep(0.05)
            await asyncio.sleep(self._spec.pause_s)

    async def _connect_all(self) -> None:
        opening = asyncio.Semaphore(CONNECT_AT_ONCE)
        open_now = 0

        async def stay() -> None:
            nonlocal open_now
            while True:
                async with opening:
                    reader, writer = await asyncio.open_connection(self._endpoint.host, self._endpoint.port)
                self._idle += 1
                open_now += 1
                if open_now >= self._spec.idle_connections:
                    self.all_connected.set()
                await _until_closed(reader)
                open_now -= 1
                writer.close()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._spec.idle_connections):
                tasks.create_task(_again(stay))

    async def _slow_reader(self) -> None:
        body = {
            "model": self._spec.model, "prompt": "a", "max_tokens": SLOW_TOKENS, "ignore_eos": True, "stream": True,
            "logprobs": 20,
        }  # fmt: skip
        content = msgspec.json.encode(body)
        head = (
            f"POST {self._endpoint.path}/v1/completions HTTP/1.1\r\nHost: {self._endpoint.host}\r\n"
            f"Authorization: Bearer {self._spec.api_key}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        while True:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, (self._endpoint.host, self._endpoint.port))
                await loop.sock_sendall(client, head.encode() + content)
                try:
                    while await loop.sock_recv(client, 1):
                        self._slow_bytes += 1
                        await asyncio.sleep(1.0)
                except OSError:
                    self._answers["slow_reader closed"] += 1


async def _until_closed(reader: asyncio.StreamReader) -> None:
    try:
        await reader.read()
    except OSError:
        return


async def _again(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """For ever, whatever becomes of the connection."""
    while True:
        try:
            await work()
        except OSError:
            await asyncio.sleep(0.2)


async def _main(spec: HostileSpec) -> HostileResult:
    clients = HostileClients(spec)
    attack = asyncio.create_task(clients.run())
    async with asyncio.timeout(TIMEOUT_S):
        await clients.all_connected.wait()
    print("attacking", flush=True)  # noqa: T201 - the process's answer
    await asyncio.to_thread(sys.stdin.buffer.read)
    attack.cancel()
    await asyncio.gather(attack, return_exceptions=True)
    return clients.result()


def main() -> None:
    """Read a spec, attack until the input ends, write the result."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostileSpec)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * spec.idle_connections + 256)), hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_main(spec))
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
