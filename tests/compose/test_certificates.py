"""Certificates of the servers, as TLS and real NATS servers take them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nats
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from nats.js import JetStreamContext

from compose.certificates import make_authority, read_authority
from compose.credentials import make
from compose.passwords import password_file
from compose.ports import free_port
from compose.secrets_yaml import MOUNTED_AT
from compose.server_conf import POD_NAME, NatsCluster, nats_conf
from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.errors import NoResponder, NotPermitted
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.permissions import USERS, inbox_prefix
from tests.compose.test_secrets_yaml import secrets
from tests.servers import Server, binary, password_of
from tests.wait_until import eventually

NAMESPACE = "prod"
NATS_NAMES = [
    "nats",
    "nats.prod",
    "nats.prod.svc",
    "nats.prod.svc.cluster.local",
    "nats-7.nats.prod.svc",
    "nats-7.nats.prod.svc.cluster.local",
    "nats-0.nats",
    "nats-1.nats",
    "nats-2.nats",
    "bus.example",
    "localhost",
    "127.0.0.1",
]
REDIS_NAMES = ["redis", "redis.prod", "redis.prod.svc", "redis.prod.svc.cluster.local", "localhost", "127.0.0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With each Secret of servers below it, as a pod finds it."""
    made = tmp_path_factory.mktemp("credentials")
    make(made, renew=False, cluster=("bus.example:6222",), kubernetes=True, namespace=NAMESPACE, days=30)
    found = secrets(made)
    for server in ("nats", "redis"):
        (made / server).mkdir()
        for name, text in found[server].items():
            (made / server / name).write_text(text)
    return made


def shake_hands(folder: Path, host: str, *, ca: Path) -> None:
    """One TLS handshake in memory. Raises ``ssl.SSLError``."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    asking = ssl.create_default_context(cafile=ca)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        asking.wrap_bio(to_client, to_server, server_hostname=host),
        serving.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


@pytest.mark.parametrize(
    ("server", "host"),
    [*(("nats", name) for name in NATS_NAMES), *(("redis", name) for name in REDIS_NAMES)],
)
def test_a_server_is_trusted_by_each_of_its_names(folder: Path, server: str, host: str) -> None:
    shake_hands(folder / server, host, ca=folder / "ca.crt")


@pytest.mark.parametrize(("server", "host"), [("nats", "redis"), ("redis", "nats"), ("nats", "nats.other.svc")])
def test_a_server_is_not_trusted_by_another_name(folder: Path, server: str, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="ostname"):
        shake_hands(folder / server, host, ca=folder / "ca.crt")


def test_what_another_authority_signed_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text(make_authority().pem.certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(folder / "nats", "nats", ca=tmp_path / "ca.crt")


def test_certificates_are_valid_for_as_long_as_was_asked_and_no_longer_than_the_authority(folder: Path) -> None:
    certificate = x509.load_pem_x509_certificate((folder / "nats" / "tls.crt").read_bytes())
    lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert timedelta(days=30) <= lasts < timedelta(days=31)
    authority = make_authority()
    ca = x509.load_pem_x509_certificate(authority.pem.certificate.encode())
    assert ca.not_valid_after_utc - datetime.now(UTC) > timedelta(days=3649)
    issued = authority.issue("x", ["x"], valid=timedelta(days=10_000))
    longest = x509.load_pem_x509_certificate(issued.certificate.encode())
    assert longest.not_valid_after_utc == ca.not_valid_after_utc


def test_only_nats_servers_may_connect_to_each_other_by_their_certificates(folder: Path) -> None:
    uses = {}
    for server in ("nats", "redis"):
        certificate = x509.load_pem_x509_certificate((folder / server / "tls.crt").read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        uses[server] = set(found)
    assert uses == {
        "nats": {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH},
        "redis": {ExtendedKeyUsageOID.SERVER_AUTH},
    }


def start(folder: Path, conf: str, name: str) -> Server:
    port, path = free_port(), folder / f"{name}.conf"
    path.write_text(conf)
    where = ["-a", "127.0.0.1", "-p", str(port), "-sd", str(folder / name)]
    command = ["env", f"{POD_NAME}={name}", binary("nats-server"), "-c", str(path), *where]
    server = Server(command, port, "tls", lambda port: False)
    server.start(wait_for_greeting=False)
    return server


def start_one(folder: Path, where: Path) -> Server:
    """With a pod's configuration, but one server, and other places."""
    conf = (folder / "nats" / "nats.conf").read_text()
    head, _, rest = conf.partition("cluster {")
    conf = head + rest.partition("\n}\n")[2]
    conf = conf.replace(MOUNTED_AT, str(folder / "nats")).replace("127.0.0.1:8222", f"127.0.0.1:{free_port()}")
    return start(where, conf, "one")


@pytest.fixture
def cluster(folder: Path, tmp_path: Path) -> Iterator[tuple[list[Server], list[int]]]:
    """Three servers with the certificates of one Secret, and where they listen for each other."""
    routes = [free_port() for _ in range(3)]
    members = tuple(f"127.0.0.1:{port}" for port in routes)
    servers = []
    for number, member in enumerate(members):
        conf = nats_conf(
            {user: password_of(user) for user in USERS},
            cluster=NatsCluster(members, "cluster-password", listen=member),
            certificates=str(folder / "nats"),
        )
        servers.append(start(tmp_path, conf, f"nats-{number}"))
    yield servers, routes
    for server in servers:
        server.stop()


def access(folder: Path, user: str, password: str) -> NatsAccess:
    return NatsAccess(user=user, password=password, ca_file=folder / "ca.crt")


@pytest.mark.stack
async def test_a_pods_configuration_serves_over_tls(folder: Path, tmp_path: Path) -> None:
    server = start_one(folder, tmp_path)
    try:
        password = (folder / password_file("gateway")).read_text().strip()
        bus = await NatsBus.connect(server.url, name="gateway", access=access(folder, "gateway", password))
        with pytest.raises(NoResponder):
            await bus.request(subjects.pool("snapshot"), Cancel(request_id="r", attempt=0), Ack, timeout_s=60)
        await bus.close()
    finally:
        server.stop()


@pytest.mark.stack
async def test_who_starts_while_the_certificate_is_over_connects_once_it_is_replaced(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = read_authority(folder, folder / "secrets.yaml")
    assert authority is not None
    good = (folder / "nats" / "tls.crt").read_text(), (folder / "nats" / "tls.key").read_text()
    over = authority.issue("nats", ["127.0.0.1"], valid=timedelta(seconds=-1))
    (folder / "nats" / "tls.crt").write_text(over.certificate)
    (folder / "nats" / "tls.key").write_text(over.key)
    server = start_one(folder, tmp_path)
    try:
        password = (folder / password_file("gateway")).read_text().strip()
        shown = access(folder, "gateway", password)
        connect = NatsBus.connect(server.url, name="gateway", access=shown, connect_timeout_s=None)
        connecting = asyncio.create_task(connect)
        await eventually(lambda: "certificate has expired" in caplog.text)
        (folder / "nats" / "tls.crt").write_text(good[0])
        (folder / "nats" / "tls.key").write_text(good[1])
        server.reload()
        async with asyncio.timeout(60):
            bus = await connecting
        # The same where a connection is lost meanwhile.
        server.stop()
        (folder / "nats" / "tls.crt").write_text(over.certificate)
        (folder / "nats" / "tls.key").write_text(over.key)
        caplog.clear()
        server.start(wait_for_greeting=False)
        await eventually(lambda: "certificate has expired" in caplog.text)
        (folder / "nats" / "tls.crt").write_text(good[0])
        (folder / "nats" / "tls.key").write_text(good[1])
        server.reload()
        await eventually(lambda: bus.connected_since_s is not None)
        await bus.close()
    finally:
        server.stop()


@pytest.mark.stack
async def test_three_servers_are_one_bus_over_tls(folder: Path, cluster: tuple[list[Server], list[int]]) -> None:
    servers, routes = cluster
    client = await nats.connect(
        servers[0].url,
        user="planner",
        password=password_of("planner"),
        inbox_prefix=inbox_prefix("planner"),
        tls=access(folder, "", "").tls(),
        tls_handshake_first=True,
    )
    async with asyncio.timeout(90):
        while not await has_three_replicas(client.jetstream()):
            await asyncio.sleep(0.1)
    await client.close()
    with pytest.raises(ssl.SSLError, match="certificate required"):
        first_byte_of_a_route(routes[0], folder / "ca.crt")


@pytest.mark.stack
async def test_servers_of_a_cluster_read_their_configuration_again(
    folder: Path, cluster: tuple[list[Server], list[int]], tmp_path: Path
) -> None:
    servers, _ = cluster
    for number, server in enumerate(servers):
        conf = tmp_path / f"nats-{number}.conf"
        conf.write_text(conf.read_text().replace(password_of("monitor"), "another"))
        server.reload()
    for server in servers:

        async def takes(server: Server = server) -> bool:
            try:
                bus = await NatsBus.connect(server.url, name="monitor", access=access(folder, "monitor", "another"))
            except NotPermitted:
                return False
            await bus.close()
            return True

        await eventually(takes)


def first_byte_of_a_route(port: int, ca: Path) -> bytes:
    """What a server says over TLS to one who comes without a certificate."""
    context, raw = ssl.create_default_context(cafile=ca), socket.create_connection(("127.0.0.1", port), timeout=60)
    with raw, context.wrap_socket(raw, server_hostname="127.0.0.1") as tls:
        return tls.recv(1)


async def has_three_replicas(jetstream: JetStreamContext) -> bool:
    """Not before the servers have found each other, and a leader."""
    try:
        await jetstream.add_stream(name=subjects.PLAN_STREAM, subjects=[subjects.plans()], num_replicas=3)
        info = await jetstream.stream_info(subjects.PLAN_STREAM)
    except nats.errors.Error:
        return False
    others = (info.cluster.replicas or []) if info.cluster is not None else []
    return len([one for one in others if one.current]) == 2
