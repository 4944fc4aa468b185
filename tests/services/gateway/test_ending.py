"""A gateway that is stopped ends, and so do the streams that outlast its drain."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from services.gateway.http.app import GatewayApp
from services.gateway.server import Server, listen
from services.gateway.service import Gateway
from shared import subjects
from shared.messages.generation import GOODBYE_S, GatewayHeartbeat
from shared.process import ProcessState
from tests.plain_http import http_client
from tests.services.gateway.checkpoint import model_record
from tests.services.gateway.cluster import FakePool, FakeWorker, say
from tests.services.gateway.conftest import CONFIG
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually


async def test_what_does_not_finish_within_the_drain_ends_with_an_error_and_the_gateway_with_it(
    checkpoint: Path,
) -> None:
    broker = MemoryBroker()
    said: list[GatewayHeartbeat] = []
    await broker.bus("listener").subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, said.append)
    worker = FakeWorker(broker, "w0", script=say("hello world"))
    worker.pause_after = 5
    await worker.start()
    await FakePool(broker, [model_record(checkpoint)], [worker]).start()
    # A worker that says nothing is given up later than this.
    gateway = Gateway(broker.bus("gateway"), replace(CONFIG, drain_timeout_s=0.3, stall_s=3600.0, probe_s=3600.0))
    listener = listen("127.0.0.1", 0)
    server = Server(GatewayApp(gateway), drain_timeout_s=60.0, limits=gateway.connection_limits(10))
    process = ProcessState()
    serving = asyncio.create_task(gateway.serve(server, listener, process))
    port = listener.getsockname()[1]
    async with http_client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http:
        await eventually(lambda: gateway.routes.ready and server.started)
        body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 64}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert "h" in await anext(lines)
            process.stopping.set()
            rest = [line async for line in lines if line]
        assert '"message":"the gateway is shutting down"' in rest[-2]
        async with asyncio.timeout(WAIT_S):
            await serving
    # Workers need not find out by its silence.
    await eventually(lambda: said and said[-1].lease_s == GOODBYE_S)
    await eventually(lambda: worker.cancels)
    await worker.stop()
    listener.close()
