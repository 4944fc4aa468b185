"""Each service, as a process, at a NATS server that does not know it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from compose.ports import free_port
from shared.permissions import KINDS
from tests.servers import Server, guarded_nats_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = guarded_nats_server(tmp_path_factory.mktemp("guarded"))
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_credentials_are_one_clear_line_and_code_1(server: Server, kind: str) -> None:
    environment = {
        **os.environ,
        "BLITZ_NATS_URL": server.url,
        "BLITZ_NATS_USER": kind,
        "BLITZ_NATS_PASSWORD": "of somebody else",
        "BLITZ_GATEWAY_PORT": str(free_port()),
        "BLITZ_WORKER_ENGINE": "mock",
    }
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{kind}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"NATS at {server.url} refuses user {kind!r} with this password" in last
    assert "Traceback" not in ended.stderr
    assert "of somebody else" not in ended.stderr
