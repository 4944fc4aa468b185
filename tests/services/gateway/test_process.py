"""The gateway as a process, over a real NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from compose.ports import free_port
from services.gateway.config import GatewayConfig
from shared.bus.nats import NatsBus
from shared.settings import SettingsError
from tests.plain_http import http_client
from tests.servers import nats_server
from tests.services.gateway.checkpoint import model_record
from tests.services.gateway.cluster import FakePool, FakeWorker, say
from tests.wait_until import eventually

START_S = 60.0
"""For a process to start, or to end, on a machine that is very busy."""


class NatsBroker:
    """Hands out real buses that were connected before."""

    def __init__(self, buses: list[NatsBus]) -> None:
        self._buses = buses

    def bus(self, name: str) -> NatsBus:
        return self._buses.pop()


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    server = nats_server(tmp_path)
    server.start()
    yield server.url
    server.stop()


def environment(nats_url: str, port: int) -> dict[str, str]:
    return {**os.environ, "BLITZ_NATS_URL": nats_url, "BLITZ_GATEWAY_PORT": str(port), "BLITZ_DIE_WITH_PARENT": "1"}


def said(stderr: str) -> list[str]:
    """A process's lines, without the stacks that follow on a very busy machine, where it did not end in time."""
    return re.split(r"^Timeout \(", stderr, maxsplit=1, flags=re.MULTILINE)[0].strip().splitlines()


@pytest.mark.stack
async def test_sigterm_finishes_streams_and_exits_cleanly(nats_url: str, checkpoint: Path) -> None:
    port = free_port()
    buses = [await NatsBus.connect(nats_url, name="test") for _ in range(2)]
    broker = NatsBroker(list(buses))
    worker = FakeWorker(broker, "w0", script=say("hello world"))  # type: ignore[arg-type]
    worker.pause_after = 5
    await worker.start()
    pool = FakePool(broker, [model_record(checkpoint)], [worker])  # type: ignore[arg-type]
    await pool.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=environment(nats_url, port), stderr=subprocess.PIPE
    )
    try:
        async with http_client(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as http:

            async def health() -> int:
                with contextlib.suppress(httpx.TransportError):
                    return (await http.get("/health")).status_code
                return 0

            async def serves() -> bool:
                return await health() == 200

            async def drains() -> bool:
                return await health() == 503

            await eventually(serves, START_S)
            body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 64}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                assert "h" in await anext(lines)
                process.terminate()
                await eventually(drains, START_S)
                worker.resume.set()
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert '"finish_reason":"stop"' in rest[-2]
        errors = (await asyncio.wait_for(process.communicate(), START_S))[1].decode()
        # On a very busy machine it is ended, with another code, once it has said that it stopped.
        assert process.returncode == 0 or "\nTimeout (" in errors, errors
        assert "INFO gateway: stopped" in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()
        for bus in buses:
            await bus.close()


@pytest.mark.stack
def test_a_port_in_use_is_one_clear_line_and_code_1(nats_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "services.gateway"],
            env=environment(nats_url, port),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    assert result.returncode == 1
    [line] = said(result.stderr)
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


def test_settings_come_from_the_environment() -> None:
    config = GatewayConfig.from_env(
        {"BLITZ_API_KEYS": "a, b", "BLITZ_GATEWAY_PORT": "81", "BLITZ_GATEWAY_ID": "g1", "BLITZ_GATEWAY_STALL_S": "3"}
    )
    assert (config.api_keys, config.port, config.gateway_id, config.stall_s) == (("a", "b"), 81, "g1", 3.0)
    assert GatewayConfig.from_env({}).gateway_id != GatewayConfig.from_env({}).gateway_id


@pytest.mark.parametrize(
    ("key", "value"),
    [("BLITZ_GATEWAY_PORT", "99999"), ("BLITZ_GATEWAY_ID", "a.b"), ("BLITZ_GATEWAY_MAX_QUEUED", "0")],
)
def test_wrong_settings_name_the_variable(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=key):
        GatewayConfig.from_env({key: value})


@pytest.mark.stack
async def test_a_second_gateway_of_an_id_is_one_clear_line_and_code_1_until_the_first_is_killed(nats_url: str) -> None:
    async def start() -> tuple[asyncio.subprocess.Process, str]:
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.gateway",
            env=environment(nats_url, port) | {"BLITZ_GATEWAY_ID": "gw-one", "BLITZ_LOG_LEVEL": "error"},
            stderr=subprocess.PIPE,
        )
        return process, f"http://127.0.0.1:{port}/live"

    async def lives(process: asyncio.subprocess.Process, url: str) -> bool:
        async with http_client() as http, asyncio.timeout(START_S):
            while process.returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    return (await http.get(url)).status_code == 200
                await asyncio.sleep(0.05)
        return False

    started = [await start()]
    try:
        assert await lives(*started[0])
        started.append(await start())
        _, errors = await asyncio.wait_for(started[1][0].communicate(), START_S)
        assert started[1][0].returncode == 1
        lines = said(errors.decode())
        assert len(lines) == 1, lines
        assert "gateway id 'gw-one' is held by " in lines[0]
        started[0][0].kill()
        await started[0][0].wait()
        started.append(await start())
        assert await lives(*started[2])
    finally:
        for process, _ in started:
            if process.returncode is None:
                process.kill()
                await process.wait()
