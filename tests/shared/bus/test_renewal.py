"""Passwords that are replaced in their files, as a mounted Secret, while a process runs or before it is let in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.bus.renewal import CurrentAccess
from shared.errors import NoResponder, NotPermitted
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.permissions import grant
from shared.settings import Settings
from tests.mounted import Mounted
from tests.servers import Server, guarded_nats_server, password_of
from tests.wait_until import WAIT_S, eventually

CANCEL = Cancel(request_id="r", attempt=0)
CREDS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
SUA
------END USER NKEY SEED------
"""


@pytest.fixture(autouse=True)
def patient_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server refuses is heard, however late it answers."""
    monkeypatch.setattr("shared.bus.nats_link.ROUND_TRIP_S", WAIT_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = guarded_nats_server(tmp_path, others={"monitor-2": ("second", grant("monitor"))})
    server.start()
    yield server
    server.stop()


@pytest.fixture
def secret(tmp_path: Path) -> Mounted:
    mounted = Mounted(tmp_path / "secret")
    mounted.put(user="monitor", password=f"{password_of('monitor')}\n")
    return mounted


def access(secret: Mounted) -> NatsAccess:
    files = {"BLITZ_NATS_USER_FILE": str(secret / "user"), "BLITZ_NATS_PASSWORD_FILE": str(secret / "password")}
    return NatsAccess.from_env(Settings(files))


def server_wants(folder: Path, password: str, *, instead_of: str = password_of("monitor")) -> None:
    config = folder / "nats.conf"
    assert instead_of in config.read_text()
    config.write_text(config.read_text().replace(instead_of, password))


def said(caplog: pytest.LogCaptureFixture, words: str) -> Callable[[], bool]:
    return lambda: any(words in record.getMessage() for record in caplog.records)


Connect = Callable[..., "asyncio.Task[NatsBus]"]


@pytest.fixture
async def connect(server: Server, secret: Mounted) -> AsyncIterator[Connect]:
    tasks: list[asyncio.Task[NatsBus]] = []

    def connect() -> asyncio.Task[NatsBus]:
        making = NatsBus.connect(server.url, name="monitor", access=access(secret), connect_timeout_s=None)
        tasks.append(asyncio.create_task(making))
        return tasks[-1]

    yield connect
    for task in tasks:
        task.cancel()
        for made in await asyncio.gather(task, return_exceptions=True):
            if isinstance(made, NatsBus):
                await made.close()


async def works(bus: NatsBus) -> None:
    with pytest.raises(NoResponder):
        await bus.request(subjects.pool("snapshot"), CANCEL, Ack, timeout_s=60)


async def test_a_connection_whose_password_was_replaced_is_made_again_with_the_new_one(
    connect: Connect, server: Server, secret: Mounted, tmp_path: Path
) -> None:
    bus = await connect()
    since_s = bus.connected_since_s
    secret.put(user="monitor-2", password="second")
    server_wants(tmp_path, "nobody's")
    server.reload()
    await eventually(lambda: bus.connected_since_s not in (None, since_s))
    await works(bus)
    # What the server refuses now, it refuses to the new user.
    with pytest.raises(NotPermitted, match="user 'monitor-2' to answer on"):
        await bus.respond(subjects.pool("snapshot"), Cancel, lambda _: asyncio.sleep(0, Ack()))


async def test_a_password_that_arrives_after_the_server_that_wants_it_is_used(
    connect: Connect,
    server: Server,
    secret: Mounted,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.bus.nats_link.REFUSED_IN_FILES_S", WAIT_S)
    bus = await connect()
    await asyncio.to_thread(server.stop)
    server_wants(tmp_path, "third")
    await asyncio.to_thread(server.start)
    await eventually(said(caplog, "refuses user 'monitor' with this password"))
    assert bus.connected_since_s is None
    secret.put(user="monitor", password="third")
    await eventually(lambda: bus.connected_since_s is not None)
    await works(bus)


async def test_files_that_cannot_be_read_leave_what_they_held(
    connect: Connect, server: Server, secret: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await connect()
    since_s = bus.connected_since_s
    secret.put(user="monitor-2", password="")
    server.stop()
    server.start()
    await eventually(lambda: bus.connected_since_s not in (None, since_s))
    await works(bus)
    lines = [record.getMessage() for record in caplog.records if "PASSWORD_FILE" in record.getMessage()]
    problem = "the file is empty; what was read before stays in use"
    assert lines == [f"BLITZ_NATS_PASSWORD_FILE={str(secret / 'password')!r}: {problem}"]


async def test_what_a_server_does_not_know_yet_leaves_what_it_took_before(
    connect: Connect, server: Server, secret: Mounted
) -> None:
    """The files were replaced before the server read its own."""
    bus = await connect()
    since_s = bus.connected_since_s
    secret.put(user="monitor-2", password="third")
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    await eventually(lambda: bus.connected_since_s not in (None, since_s))
    await works(bus)


async def test_refusals_end_a_process_also_while_another_server_is_away(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shared.bus.nats_link.REFUSED_FOR_S", 2.0)
    plain = NatsAccess(user="monitor", password=password_of("monitor"))
    # Taken, and nobody listens.
    away = socket.socket()
    away.bind(("127.0.0.1", 0))
    bus = await NatsBus.connect(f"{server.url},nats://127.0.0.1:{away.getsockname()[1]}", name="monitor", access=plain)
    try:
        await asyncio.to_thread(server.stop)
        server_wants(tmp_path, "third")
        await asyncio.to_thread(server.start)
        assert "refuses user 'monitor'" in await asyncio.wait_for(bus.wait_lost(), WAIT_S)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == len(set(told))
    finally:
        await bus.close()
        away.close()


async def test_a_process_that_is_refused_at_its_start_waits_for_its_password(
    connect: Connect, secret: Mounted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.nats_link.REFUSED_IN_FILES_S", WAIT_S)
    secret.put(user="monitor", password="of yesterday")
    connecting = connect()
    await eventually(said(caplog, "waiting for NATS: the server refuses user 'monitor' with this password"))
    assert not connecting.done()
    secret.put(user="monitor", password=password_of("monitor"))
    await works(await asyncio.wait_for(connecting, WAIT_S))


async def test_but_not_for_ever(connect: Connect, secret: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.nats_link.REFUSED_IN_FILES_S", 0.5)
    secret.put(user="monitor", password="of yesterday")
    with pytest.raises(NotPermitted, match="refuses user 'monitor' with this password") as caught:
        await asyncio.wait_for(connect(), WAIT_S)
    assert "yesterday" not in caught.value.message


def test_a_pair_of_two_versions_is_read_again(secret: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = access(secret)
    read = Path.open
    secret_user = secret / "user"

    def swaps(path: Path, mode: str) -> object:
        opened = read(path, mode)
        if path == secret_user:
            monkeypatch.setattr(Path, "open", read)
            secret.put(user="monitor-2", password="second")
        return opened

    monkeypatch.setattr(Path, "open", swaps)
    assert pair.login() == ("monitor-2", "second")


def test_a_credentials_file_is_read_whenever_the_client_asks(tmp_path: Path) -> None:
    file = tmp_path / "monitor.creds"
    file.write_text(CREDS.format(jwt="first"))
    creds = CurrentAccess(NatsAccess.from_env(Settings({"BLITZ_NATS_CREDS_FILE": str(file)}))).creds()
    assert creds is not None
    assert "first" in creds.data
    file.write_text(CREDS.format(jwt="second"))
    assert "second" in creds.data
    file.write_text(CREDS.format(jwt="third")[:60])
    assert "second" in creds.data
