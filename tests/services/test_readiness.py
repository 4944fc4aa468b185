"""Every service as a process: ready while it is subscribed and connected; at its end once its bus is gone for good."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from compose.ports import free_port
from tests.servers import Server, nats_server, redis_server
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx]

SERVICES = ("pool", "planner", "monitor", "gateway", "worker")
REFUSAL = b"-ERR 'Authorization Violation'\r\n"


class Proxy:
    """Passes NATS on, and may say something to every client on the server's behalf."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._clients: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._clients.append(writer)
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    def say(self, words: bytes) -> None:
        for client in self._clients:
            client.write(words)

    async def close(self) -> None:
        self._listener.close()
        for client in self._clients:
            client.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


class Processes:
    """The five services, each with its port for health."""

    def __init__(self, folder: Path, redis: Server) -> None:
        self._folder = folder
        self._redis = redis
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}

    def start(self, nats_url: str) -> None:
        for name in SERVICES:
            self._ports[name] = port = free_port()
            environment = {
                **os.environ,
                "BLITZ_NATS_URL": nats_url,
                "BLITZ_REDIS_URL": self._redis.url,
                "BLITZ_DIE_WITH_PARENT": "1",
                "BLITZ_WORKER_ENGINE": "mock",
                "BLITZ_WORKER_ARENA_MIB": "16",
                "BLITZ_WORKER_KV_MIB": "16",
                "BLITZ_GATEWAY_PORT" if name == "gateway" else "BLITZ_HEALTH_PORT": str(port),
            }
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", f"services.{name}"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=(self._folder / name).open("wb"),
            )

    def is_ready(self, name: str) -> bool:
        try:
            return (
                httpx.get(f"http://127.0.0.1:{self._ports[name]}/ready", verify=False, timeout=5.0).status_code == 200
            )
        except httpx.TransportError:
            return False  # it does not listen yet

    async def become(self, ready: bool, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while wrong := [n for n in SERVICES if await asyncio.to_thread(self.is_ready, n) is not ready]:
            assert time.monotonic() < deadline_s, f"{wrong}: ready is not {ready} after {timeout_s} s"
            assert all(process.poll() is None for process in self.running.values())
            await asyncio.sleep(0.05)

    def said(self, name: str) -> str:
        return (self._folder / name).read_text()

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Server]:
    server = nats_server(tmp_path / "js")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "redis").mkdir()
    redis = redis_server(tmp_path / "redis")
    redis.start()
    made = Processes(tmp_path, redis)
    yield made
    made.stop()
    redis.stop()


async def test_a_service_waits_for_its_bus_is_ready_with_it_and_not_without(nats: Server, processes: Processes) -> None:
    nats.stop()
    processes.start(nats.url)
    await eventually(lambda: all("waiting for NATS" in processes.said(name) for name in SERVICES))
    nats.start()
    await processes.become(True, 120.0)
    nats.stop()
    await processes.become(False, 10.0)
    nats.start()
    await processes.become(True, 30.0)
    # A server that hangs is as good as none.
    nats.pause()
    await processes.become(False, 10.0)
    nats.resume()
    await processes.become(True, 30.0)


async def test_a_service_that_waits_for_its_bus_ends_when_it_is_told_to(nats: Server, processes: Processes) -> None:
    nats.stop()
    processes.start(nats.url)
    await eventually(lambda: all("waiting for NATS" in processes.said(name) for name in SERVICES))
    for process in processes.running.values():
        process.terminate()
    for name, process in processes.running.items():
        await asyncio.to_thread(process.wait, 60.0)
        # The code is 0 unless the machine is so busy that the interpreter does not end within its two seconds.
        assert re.search(r"stopped$", processes.said(name), re.MULTILINE), processes.said(name)


async def test_a_service_whose_bus_is_gone_for_good_ends_and_says_so(nats: Server, processes: Processes) -> None:
    proxy = Proxy(nats.port)
    processes.start(await proxy.start())
    await processes.become(True, 60.0)
    proxy.say(REFUSAL)
    for name, process in processes.running.items():
        assert await asyncio.to_thread(process.wait, 20.0) == 1, name
        # On a machine that is very busy the stacks of what did not end in time may follow.
        why = [line for line in processes.said(name).splitlines() if "gone for good" in line]
        assert why, processes.said(name)
        assert "authorization failed" in why[-1], name
    await proxy.close()
