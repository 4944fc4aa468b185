"""NATS over TLS, with certificates made by the commands that the documentation gives."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.bus.renewal import CurrentAccess, RenewingClient
from shared.errors import NoResponder, Unavailable
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.settings import Settings
from tests.servers import Server, guarded_nats_server, password_of
from tests.wait_until import eventually

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
DAY_S = 24 * 3600.0
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


@pytest.mark.parametrize(("scheme", "first"), [("tls", True), ("nats", False)])
async def test_a_server_that_ends_the_connection_is_no_warning_of_the_event_loop(
    start: Start, certificates: Path, scheme: str, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader of the connection knows that it is one over TLS: else it would not hold a server back, either."""
    server, by = start(first=first), access(ca=certificates / "ca.crt")
    bus = await NatsBus.connect(f"{scheme}://127.0.0.1:{server.port}", name="gateway", access=by)
    try:
        server.stop()
        await eventually(lambda: bus.connected_since_s is None)
    finally:
        await bus.close()
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []


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


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A certificate that vouches for itself, with its key beside it."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "10", "-subj", "/CN=other", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", "other.key", "-out", "other.crt"], cwd=tmp_path, check=True)
    return tmp_path / "other.crt"


async def test_certificates_that_are_replaced_are_used_at_the_next_connection(
    start: Start, certificates: Path, other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = tmp_path / "ca.crt"
    ca.write_bytes((certificates / "ca.crt").read_bytes())
    server = start()
    bus = await NatsBus.connect(f"tls://127.0.0.1:{server.port}", name="gateway", access=access(ca=ca))
    try:
        server.stop()
        config = tmp_path / "nats.conf"
        config.write_text(config.read_text().replace(f"{certificates}/server", str(other.with_suffix(""))))
        server.start(wait_for_greeting=False)
        await eventually(lambda: "certificate verify failed" in caplog.text.lower())
        assert bus.connected_since_s is None
        ca.write_text("half a certif")
        await eventually(lambda: "BLITZ_NATS_CA_FILE" in caplog.text)
        shutil.copy(other, ca)
        await eventually(lambda: bus.connected_since_s is not None)
    finally:
        await bus.close()


async def test_a_certificate_that_ends_soon_is_told_of(
    start: Start, certificates: Path, other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = "blitz_nats_certificate_end_timestamp_seconds"
    server = start()
    await asks(f"tls://127.0.0.1:{server.port}", access(ca=certificates / "ca.crt"))
    assert "certificate is valid" not in caplog.text
    later_unix_s = REGISTRY.get_sample_value(ends)
    server.stop()
    config = tmp_path / "nats.conf"
    config.write_text(config.read_text().replace(f"{certificates}/server", str(other.with_suffix(""))))
    server.start(wait_for_greeting=False)
    await asks(f"tls://127.0.0.1:{server.port}", access(ca=other))
    sooner_unix_s = REGISTRY.get_sample_value(ends)
    assert later_unix_s is not None
    assert sooner_unix_s is not None
    assert later_unix_s - sooner_unix_s > 300 * DAY_S
    (left_h,) = re.findall(r"certificate is valid for another (\d+) h", caplog.text)
    assert 9 * 24 <= int(left_h) <= 10 * 24


def test_certificates_are_read_again_only_when_they_have_changed(
    certificates: Path, other: Path, tmp_path: Path
) -> None:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_bytes((certificates / "client.crt").read_bytes())
    key.write_bytes((certificates / "client.key").read_bytes())
    current = CurrentAccess(access(cert=cert, key=key))
    before = current.tls()
    assert before is not None
    assert current.tls() is before
    cert.write_bytes(other.read_bytes())
    assert current.tls() is before  # it does not fit the key
    key.write_bytes(other.with_suffix(".key").read_bytes())
    after = current.tls()
    assert after is not before
    assert current.tls() is after


async def test_until_when_a_certificate_is_valid_is_known_once_it_was_shown(start: Start, certificates: Path) -> None:
    client = RenewingClient(CurrentAccess(access(ca=certificates / "ca.crt")))
    assert client.server_certificate_ends_unix_s is None
    await client.connect(
        f"tls://127.0.0.1:{start().port}", user="gateway", password=password_of("gateway"), tls_handshake_first=True
    )
    assert client.server_certificate_ends_unix_s is not None
    await client.close()


def test_a_transport_that_is_half_gone_shows_no_certificate(certificates: Path) -> None:
    class Gone:
        def get_extra_info(self, name: str) -> object:
            raise AttributeError(name)

    client = RenewingClient(CurrentAccess(access(ca=certificates / "ca.crt")))
    vars(client)["_transport"] = SimpleNamespace(_io_writer=Gone())
    assert client.server_certificate_ends_unix_s is None
