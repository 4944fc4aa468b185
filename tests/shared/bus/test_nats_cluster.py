"""Several NATS servers as one bus, of which one stands still: its connections stay open, and nobody answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.errors import DeadlineExceeded, Unavailable
from shared.messages.common import Ack
from shared.messages.registry import GetSnapshot
from tests.servers import Server, holds_connection, nats_cluster, password_of
from tests.wait_until import eventually


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    servers = nats_cluster(tmp_path, 3)
    yield servers
    for server in servers:
        server.resume()
        server.stop()


async def connect(kind: str, *servers: Server) -> NatsBus:
    access = NatsAccess(user=kind, password=password_of(kind))
    return await NatsBus.connect(",".join(server.url for server in servers), name=kind, access=access)


async def test_a_server_that_stands_still_takes_no_request_to_a_process_that_has_left_it(
    servers: list[Server],
) -> None:
    for server in servers:
        server.start()
    third = servers[2]
    there = await connect("pool", *servers[:2])
    here = await connect("worker", third)  # a server gives its own clients precedence over those of others
    first = next(server for server in servers[:2] if holds_connection(server, "pool"))
    subject = subjects.pool("snapshot")

    async def acknowledge(_: GetSnapshot) -> Ack:
        return Ack()

    await there.respond(subject, GetSnapshot, acknowledge)
    await eventually_heard(here, subject)
    connected_since_s = there.connected_since_s
    first.pause()
    await eventually(lambda: there.connected_since_s not in (None, connected_since_s))
    # Servers tell each other of subscriptions in their order: when the second hears this one, it hears the first.
    await there.respond(subjects.pool("retire_copy"), GetSnapshot, acknowledge)
    await eventually_heard(here, subjects.pool("retire_copy"))
    # Until the others miss it, about ten seconds later, they send it what it is known to have listeners for.
    for _ in range(40):
        assert await here.request(subject, GetSnapshot(), Ack, timeout_s=60) == Ack()
    first.resume()
    for bus in (here, there):
        await bus.close()


async def eventually_heard(bus: NatsBus, subject: str) -> None:
    """Servers tell each other of subscriptions in their own time."""
    while True:
        try:
            await bus.request(subject, GetSnapshot(), Ack, timeout_s=1.0)
        except (Unavailable, DeadlineExceeded):
            continue
        return
