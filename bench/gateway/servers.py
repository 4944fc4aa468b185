"""The two things that are measured: the real stack with a mock engine, and the bare sketch."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.replay.runner import choose_model
from bench.stream_client import Endpoint, StreamClient
from compose.children import nats_server
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.die_with_parent import die_with_parent
from compose.ports import free_port
from compose.stack import Stack
from shared.errors import Unavailable

_READY_S = 60.0


@asynccontextmanager
async def mock_stack(folder: Path, *, max_running: int, step_ms: float) -> AsyncIterator[str]:
    """The whole stack with one worker whose engine takes ``step_ms`` per step and nothing else; gives its URL."""
    config = StackConfig(
        models=(ensure_demo_model(folder),),
        state_dir=folder / "state",
        workers=1,
        port=0,
        engine="mock",
        log_level="error",
        service_env={
            "worker": {
                "BLITZ_MOCK_LAYER_BASE_MS": "0",
                "BLITZ_MOCK_LAYER_PER_TOKEN_US": "0",
                "BLITZ_MOCK_STEP_MS": str(step_ms),
                "BLITZ_WORKER_MAX_RUNNING": str(max_running),
            }
        },
    )
    async with Stack(config) as stack:
        await stack.wait_ready(_READY_S)
        yield stack.url


async def _answers(url: str) -> None:
    """Wait until ``url`` serves a model. Raises ``Unavailable``."""
    deadline_s = time.monotonic() + _READY_S
    while True:
        client = StreamClient(Endpoint.of(url))
        try:
            await choose_model(client, None, timeout_s=2.0)
            return
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.1)
        finally:
            client.close()


async def _ready(producer: asyncio.subprocess.Process) -> None:
    """Wait until it hears of jobs. Raises ``Unavailable``."""
    assert producer.stdout is not None
    try:
        async with asyncio.timeout(_READY_S):
            said = await producer.stdout.readline()
    except TimeoutError:
        said = b""
    if not said:
        raise Unavailable("the sketch's producer does not begin")


@asynccontextmanager
async def sketch() -> AsyncIterator[str]:
    """A NATS server, the sketch's endpoint and its producer; gives the URL."""
    nats_port, port = free_port(), free_port()
    nats_url = f"nats://127.0.0.1:{nats_port}"
    module = (sys.executable, "-m", "bench.gateway.sketch")
    processes: list[asyncio.subprocess.Process] = []

    async def start(*command: str, stdout: int | None = None) -> asyncio.subprocess.Process:
        started = await asyncio.create_subprocess_exec(*command, stdout=stdout, preexec_fn=die_with_parent())
        processes.append(started)
        return started

    try:
        await start(str(nats_server()), "--addr", "127.0.0.1", "--port", str(nats_port), "--log", "/dev/null")
        await asyncio.sleep(0.3)
        await _ready(await start(*module, "producer", nats_url, stdout=asyncio.subprocess.PIPE))
        await start(*module, "app", nats_url, str(port))
        url = f"http://127.0.0.1:{port}"
        await _answers(url)
        yield url
    finally:
        for process in reversed(processes):
            if process.returncode is None:
                process.kill()
            await process.wait()
