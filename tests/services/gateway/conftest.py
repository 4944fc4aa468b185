from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.config import GatewayConfig
from services.gateway.http.app import GatewayApp
from services.gateway.server import ConnectionLimits, Server, listen
from services.gateway.service import Gateway
from shared.messages.registry import ModelRecord
from tests.plain_http import http_client, openai_client
from tests.processes import INCARNATION
from tests.services.gateway.checkpoint import model_record, write_checkpoint
from tests.services.gateway.cluster import FakePool, FakeWorker
from tests.shared.bus.memory import MemoryBroker, MemoryBus
from tests.wait_until import eventually

CONFIG = GatewayConfig(
    gateway_id="gw-test",
    queue_timeout_s=20.0,
    submit_timeout_s=5.0,
    stall_s=20.0,
    probe_s=0.2,
    drain_timeout_s=3.0,
)


@dataclass
class Stack:
    """A gateway over a memory bus, with its pool, workers and an HTTP client."""

    broker: MemoryBroker
    bus: MemoryBus
    gateway: Gateway
    pool: FakePool
    workers: list[FakeWorker]
    url: str
    http: httpx.AsyncClient
    openai: Any
    """An ``AsyncOpenAI``; its overloads do not take plain dictionaries."""
    server: Server
    limits: ConnectionLimits
    """Of the server's connections."""

    def forget(self) -> None:
        """Drop what the doubles remember."""
        for worker in self.workers:
            worker.forget()
        self.pool.added.clear()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something to become true."""
        await eventually(condition)

    async def received(self, num_tokens: int) -> None:
        """Wait until the gateway has so many tokens of every request."""
        requests = self.gateway.dispatcher.requests
        await eventually(lambda: all(len(r.stream.output_token_ids) == num_tokens for r in requests.all()))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


StackFactory = Callable[..., Awaitable[Stack]]


@asynccontextmanager
async def _stack(record: ModelRecord, num_workers: int, broker: MemoryBroker, **settings: Any) -> AsyncIterator[Stack]:
    config = replace(CONFIG, **settings)
    context_tokens = record.spec.max_position
    workers = [FakeWorker(broker, f"w{index}", context_tokens=context_tokens) for index in range(num_workers)]
    for worker in workers:
        await worker.start()
    pool = FakePool(broker, [record], workers)
    await pool.start()
    bus = broker.bus("gateway")
    gateway = Gateway(bus, config, incarnation=INCARNATION)
    listener = listen("127.0.0.1", 0)
    limits = gateway.connection_limits(config.max_connections)
    server = Server(GatewayApp(gateway), drain_timeout_s=1, limits=limits)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    bus_side = asyncio.create_task(gateway.run())
    http_side = asyncio.create_task(server.serve(sockets=[listener]))
    async with http_client(base_url=url, timeout=60) as http:
        stack = Stack(
            broker, bus, gateway, pool, workers, url, http,
            openai_client(url, timeout_s=60), server, limits,
        )  # fmt: skip
        await stack.until(lambda: gateway.routes.ready and server.started)
        try:
            yield stack
        finally:
            await stack.openai.close()
            server.stop()
            await http_side
            bus_side.cancel()
            await asyncio.gather(bus_side, return_exceptions=True)
            for worker in workers:
                await worker.stop()
            # Whatever a test did, nothing may be left behind.
            assert gateway.dispatcher.num_active == 0
            listener.close()


@pytest.fixture
async def make_stack(checkpoint: Path) -> AsyncIterator[StackFactory]:
    """Start a gateway; keyword arguments are settings."""
    async with AsyncExitStack() as running:

        async def make(
            num_workers: int = 1,
            *,
            record: ModelRecord | None = None,
            broker: MemoryBroker | None = None,
            **settings: Any,
        ) -> Stack:
            context = _stack(record or model_record(checkpoint), num_workers, broker or MemoryBroker(), **settings)
            return await running.enter_async_context(context)

        yield make


@pytest.fixture
async def stack(make_stack: StackFactory) -> Stack:
    """One gateway, one worker."""
    return await make_stack()
