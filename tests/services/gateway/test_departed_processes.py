"""A real worker process ends under a stream, and a real NATS server tells."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.core.routes import RouteView
from services.gateway.dispatcher import Dispatcher
from services.gateway.metrics import GatewayMetrics
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.messages.registry import ModelRoute, RouteChanges
from tests.processes import INCARNATION
from tests.servers import Server, guarded_nats_server, password_of
from tests.services.gateway.checkpoint import model_record
from tests.services.gateway.cluster import FakeWorker
from tests.services.gateway.test_dispatcher import Ends, request
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually

WORKER = """
import asyncio, sys
from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.messages.common import Ack
from shared.messages.generation import Resend, Submit

async def main():
    url, password, incarnation = sys.argv[1:]
    me = subjects.Process("w0", incarnation)
    bus = await NatsBus.connect(
        url, name="worker", id=me.id, incarnation=incarnation, access=NatsAccess(user="worker", password=password)
    )
    async def accept(_):
        print("submitted", flush=True)
        return Ack()
    await bus.respond(subjects.worker_submit(me), Submit, accept)
    await bus.respond(subjects.worker_resend(me), Resend, accept)
    print("connected", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
NEVER_S = 600.0
"""Longer than the test: silence tells nothing here."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = guarded_nats_server(tmp_path)
    server.start()
    yield server
    server.stop()


def start_worker(server: Server) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, server.url, password_of("worker"), INCARNATION], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"connected\n"
    return process


@pytest.mark.parametrize("how", ["kill", "terminate"])
async def test_a_process_that_ends_is_known_to_without_a_silence(server: Server, checkpoint: Path, how: str) -> None:
    access = NatsAccess(user="gateway", password=password_of("gateway"))
    bus = await NatsBus.connect(server.url, name="gateway", access=access)
    process = start_worker(server)
    assert process.stdout is not None
    record, worker = model_record(checkpoint, "m"), FakeWorker(MemoryBroker(), "w0")
    routes = RouteView()
    found = (ModelRoute(model="m", route=worker.route()),)
    routes.apply_changes(RouteChanges(publisher="pool", sequence=1, models=(record,), routes=found))
    metrics = GatewayMetrics(routes)
    running = Dispatcher(
        bus,
        routes,
        metrics,
        GatewayConfig(
            gateway_id="gw-test",
            max_queued_requests=10,
            queue_timeout_s=NEVER_S,
            submit_timeout_s=NEVER_S,
            stall_s=NEVER_S,
            probe_s=NEVER_S,
            max_attempts=3,
        ),
    )
    running.router.set_routes("m", record.model_hash, [worker.route()])
    await bus.watch_departures(running.on_departure)
    stream, end = request("r"), Ends()
    stream.model_hash = record.model_hash
    running.start(stream, end)
    assert await asyncio.to_thread(process.stdout.readline) == b"submitted\n"
    getattr(process, how)()
    process.communicate()
    await eventually(lambda: metrics.resubmissions)
    assert metrics.resubmissions == {"closed": 1}
    assert (end.errors, running.num_active) == ([], 1)
    await running.close()
    await bus.close()
