"""Two gateways with one id."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from services.gateway import service
from services.gateway.http.app import GatewayApp
from services.gateway.server import Server, listen
from services.gateway.service import Gateway
from shared import identity, subjects
from shared.errors import DuplicateId
from shared.messages.generation import GatewayHeartbeat
from shared.messages.identity import GetHolder, Holder
from shared.process import ProcessState
from shared.subjects import Process
from tests.services.gateway.conftest import CONFIG, Stack
from tests.services.gateway.test_failover import collect
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds an id, and lives, answers, however busy the machine is."""
    for module in (identity, service):
        monkeypatch.setattr(module, "ASK_TIMEOUT_S", WAIT_S)


async def serve(broker: MemoryBroker, gateway_id: str) -> None:
    gateway = Gateway(broker.bus("twin"), replace(CONFIG, gateway_id=gateway_id))
    listener = listen("127.0.0.1", 0)
    try:
        async with asyncio.timeout(WAIT_S):
            server = Server(GatewayApp(gateway), drain_timeout_s=1, limits=gateway.connection_limits(100))
            await gateway.serve(server, listener, ProcessState())
    finally:
        listener.close()


async def test_a_gateway_whose_id_is_held_ends_and_the_other_ones_streams_go_on(stack: Stack) -> None:
    [worker] = stack.workers
    worker.pause_after = 2
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: worker.submits)
    with pytest.raises(DuplicateId, match="gateway id 'gw-test' is held by process"):
        await serve(stack.broker, "gw-test")
    worker.resume.set()
    assert await answer == "hello"
    assert worker.cancels == []


async def test_what_workers_send_to_an_earlier_start_does_not_reach_the_next(stack: Stack) -> None:
    [worker] = stack.workers
    worker.pause_after = 2
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: worker.submits)
    [submit] = worker.submits
    await stack.received(2)
    for name, gateway in (("theirs", Process("gw-test", "0")), ("mine", submit.gateway)):
        await worker.send(gateway, worker.part(msgspec.structs.replace(submit, request_id=name), 0, [1]))
        if name == "theirs":
            await worker.send(gateway, worker.part(submit, 2, list(b"X")))
    await stack.until(lambda: worker.cancels)
    assert [cancel.request_id for cancel in worker.cancels] == ["mine"], "it tells of what came to it, and nobody wants"
    worker.resume.set()
    assert await answer == "hello"


FIRST, LAST = "0000000000001-abc", "zzzzzzzzzzzzz-abc"
"""Names before and behind all others."""


async def heard(broker: MemoryBroker, incarnation: str, *, held_s: float | None = None) -> asyncio.Task[None]:
    """A gateway that serves under an id, and heard another one of that id, which answers for it if it lives, and has
    held it for so long."""
    other, beats = broker.bus("other"), list[GatewayHeartbeat]()
    listening = await other.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, beats.append)
    serving = asyncio.create_task(serve(broker, "gw-a"))
    await eventually(lambda: beats)
    await listening.close()
    if held_s is not None:

        async def answer(_: GetHolder) -> Holder:
            return Holder(incarnation=incarnation, host="elsewhere", pid=1, held_s=held_s)

        await other.respond(subjects.gateway_holder("gw-a", incarnation), GetHolder, answer)
    for gateway_id in ("gw-b", "gw-a"):
        heartbeat = GatewayHeartbeat(gateway_id=gateway_id, lease_s=5.0, incarnation=incarnation)
        await other.publish(subjects.gateway_heartbeat(), heartbeat)
        await asyncio.sleep(0.05)
    return serving


async def stays(serving: asyncio.Task[None]) -> None:
    await asyncio.sleep(0.1)
    assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("name", [FIRST, LAST])
async def test_a_gateway_that_hears_one_that_has_held_its_id_for_longer_ends(name: str) -> None:
    with pytest.raises(DuplicateId, match="BLITZ_GATEWAY_ID"):
        await (await heard(MemoryBroker(), name, held_s=3600.0))


@pytest.mark.parametrize("name", [FIRST, LAST])
async def test_a_gateway_that_hears_one_that_has_held_its_id_for_less_time_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "TIE_S", 0.0)
    await stays(await heard(MemoryBroker(), name, held_s=0.0))


@pytest.mark.parametrize("name", [FIRST, LAST, "", "no name"])
async def test_a_gateway_does_not_end_for_a_heartbeat_of_nobody(name: str) -> None:
    await stays(await heard(MemoryBroker(), name))
