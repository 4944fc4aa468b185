"""NATS over TLS, with certificates made by the commands that the documentation gives."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.errors import NoResponder, Unavailable
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.settings import Settings
from tests.servers import Server, guarded_nats_server, password_of

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
CANCEL = Cancel(request_id="r", attempt=0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documentation's commands make, for this machine's loopback address."""
    folder = tmp_path_factory.mktemp("certificates")
    (script,) = re.findall(r"```sh\n([^`]*openssl req -x509[^`]*)```", OPERATIONS.read_text(encoding="utf-8"))
    assert "IP:10.0.0.5" in script
    script = script.replace("IP:10.0.0.5", "IP:127.0.0.1")
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True, capture_output=True)
    return folder


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, certificates: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def start(*, first: bool = True, verify: bool = False) -> Server:
        server = guarded_nats_server(tmp_path)
        config = tmp_path / "nats.conf"
        lines = [f"  cert_file: {certificates}/server.crt", f"  key_file: {certificates}/server.key"]
        lines += ["  handshake_first: true"] * first
        lines += [f"  ca_file: {certificates}/ca.crt", "  verify: true"] * verify
        config.write_text("\n".join([config.read_text(), "tls {", *lines, "}", ""]))
        servers.append(server)
        # It greets nobody who has not shown TLS: ask whether it listens.
        server.start(wait_for_greeting=not first)
        return server

    yield start
    for server in servers:
        server.stop()


def access(**files: Path) -> NatsAccess:
    variables = {f"BLITZ_NATS_{name.upper()}_FILE": str(path) for name, path in files.items()}
    return NatsAccess.from_env(
        Settings({"BLITZ_NATS_USER": "gateway", "BLITZ_NATS_PASSWORD": password_of("gateway"), **variables})
    )


async def asks(url: str, by: NatsAccess, *, patience_s: float = 20.0) -> None:
    bus = await NatsBus.connect(url, name="gateway", access=by, connect_timeout_s=patience_s)
    try:
        with pytest.raises(NoResponder):
            await bus.request(subjects.pool("snapshot"), CANCEL, Ack, timeout_s=60)
    finally:
        await bus.close()


@pytest.mark.parametrize(("scheme", "first"), [("tls", True), ("nats", False)])
async def test_a_server_whose_certificate_is_signed_is_trusted(
    start: Start, certificates: Path, scheme: str, first: bool
) -> None:
    await asks(f"{scheme}://127.0.0.1:{start(first=first).port}", access(ca=certificates / "ca.crt"))


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_server_that_nobody_vouches_for_is_refused(start: Start, scheme: str) -> None:
    server = start(first=scheme == "tls")
    with pytest.raises(Unavailable, match=r"(?i)certificate verify failed"):
        await asks(f"{scheme}://127.0.0.1:{server.port}", access(), patience_s=4.0)


async def test_over_tls_nothing_is_said_to_a_server_without_it(tmp_path: Path, certificates: Path) -> None:
    server = guarded_nats_server(tmp_path)
    server.start()
    try:
        with pytest.raises(Unavailable):
            await asks(f"tls://127.0.0.1:{server.port}", access(ca=certificates / "ca.crt"), patience_s=2.0)
    finally:
        server.stop()


async def test_a_server_that_does_not_go_on_with_the_handshake_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and reads nothing
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable, match=r"within 0\.2 s"):
                await asks(f"tls://127.0.0.1:{silent.getsockname()[1]}", access(), patience_s=0.2)


async def test_a_server_may_want_to_see_certificates_too(start: Start, certificates: Path) -> None:
    url = f"tls://127.0.0.1:{start(verify=True).port}"
    ca = certificates / "ca.crt"
    await asks(url, access(ca=ca, cert=certificates / "client.crt", key=certificates / "client.key"))
    with pytest.raises(Unavailable):
        await asks(url, access(ca=ca), patience_s=2.0)
