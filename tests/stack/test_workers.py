"""``python -m compose.workers``: the workers of a second host, as one process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from compose.children import nats_access
from compose.ports import free_port
from compose.stack import Stack
from tests.stack.conftest import FAST, READY_S, mock_config
from tests.wait_until import eventually, eventually_sync

pytestmark = [pytest.mark.stack, pytest.mark.ucx]

HOST = "host-b"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(mock_config(tmp_path_factory.mktemp("stack"), workers=1)) as made:
        await made.wait_ready(READY_S)
        yield made


def start(stack: Stack, log: Path, **env: str) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        **FAST,
        "BLITZ_WORKER_HOST_CACHE_MIB": "64",
        "BLITZ_WORKER_ENGINE": "mock",
        "BLITZ_WORKER_HOST": HOST,
        "BLITZ_NATS_URL": stack.addresses.nats_url,
        **nats_access(stack.state_dir, "worker"),
        **env,
    }
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "compose.workers"], env=environ, stdout=out, stderr=out)


def health(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


async def ids(stack: Stack) -> set[str]:
    return {worker.id for worker in (await stack.admin.status()).workers if worker.host == HOST}


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


@pytest.mark.asyncio(loop_scope="module")
async def test_one_process_is_all_workers_of_a_host(stack: Stack, tmp_path: Path) -> None:
    """They register under the host's name, one that dies comes back, and SIGTERM drains all of them."""
    port, log = free_ports(3), tmp_path / "log"
    process = start(stack, log, BLITZ_WORKERS="2", BLITZ_HEALTH_PORT=str(port))
    try:
        await eventually(lambda: health(port) == 200)
        assert await ids(stack) == {f"{HOST}-0", f"{HOST}-1"}
        assert [health(port + 1), health(port + 2)] == [200, 200]

        def is_seen_dead() -> bool:
            # On a busy machine it may be back before anybody has looked: then again.
            if health(port + 2) == 200:
                children = psutil.Process(process.pid).children()
                next(p for p in children if p.name() == f"{HOST}-1").kill()
            return health(port) == 503

        await eventually(is_seen_dead)
        await eventually(lambda: health(port) == 200)
        assert await ids(stack) == {f"{HOST}-0", f"{HOST}-1"}

        process.send_signal(signal.SIGTERM)
        eventually_sync(lambda: process.poll() is not None)
        assert process.returncode == 0, log.read_text()

        async def all_left() -> bool:
            return not await ids(stack)

        await eventually(all_left)
    finally:
        process.kill()
        process.wait()


@pytest.mark.asyncio(loop_scope="module")
async def test_killed_it_takes_its_workers_along(stack: Stack, tmp_path: Path) -> None:
    port = free_ports(2)
    process = start(stack, tmp_path / "log", BLITZ_HEALTH_PORT=str(port))
    try:
        await eventually(lambda: health(port) == 200)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    eventually_sync(lambda: not any(child.is_running() for child in children))


def test_when_no_worker_can_be_kept_running_it_ends_and_says_why(stack: Stack, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(stack, log, BLITZ_WORKERS="2", BLITZ_WORKER_NIC="none-of-that-name")
    try:
        eventually_sync(lambda: process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    last = log.read_text().splitlines()[-1]
    assert "no worker can be kept running" in last, log.read_text()
    assert "none-of-that-name" in log.read_text()
