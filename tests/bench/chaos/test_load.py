from __future__ import annotations

import asyncio

from bench.chaos.answer import Answer
from bench.chaos.gateways import Gateways
from bench.chaos.injected_fault import InjectedFault, now_s
from bench.chaos.load import Load
from bench.chaos.question import Question
from tests.bench.fake_server import FakeServer, fake_server

QUESTION = Question(0, (5, 6), 3, (("temperature", 0.0),))
EXPECTED = {"fake": {0: Answer("t0 t1 t2 ", "length", 2, 3)}}


def load_on(gateways: Gateways, *, silence_s: float = 20.0) -> Load:
    # Streams only: what the fake speaks.
    return Load(gateways, ("fake",), (QUESTION,), EXPECTED, seed=0, silence_s=silence_s, streamed_share=1.0)


async def until_sent(server: FakeServer, count: int) -> None:
    while len(server.bodies) < count:
        await asyncio.sleep(0.005)


async def verdicts(script: str, *, silence_s: float = 20.0) -> set[str]:
    async with fake_server(lambda n: script) as server:
        gateways = Gateways({"gateway": server.url})
        load, quiet = load_on(gateways, silence_s=silence_s), asyncio.Event()
        running = asyncio.create_task(load.run(2, quiet))
        while len(load.records) < 4:
            await asyncio.sleep(0.005)
        quiet.set()
        await running
        gateways.close()
        # Nothing is sent again in secret. What is given up soon may not have come.
        assert len(server.bodies) <= len(load.records)
        return {record.outcome.verdict for record in load.records}


async def test_right_answers_are_right() -> None:
    assert await verdicts("ok") == {"right"}


async def test_everything_else_has_failed_or_differs() -> None:
    for script in ("429", "error_event", "cut", "garbage", "no_usage"):
        assert await verdicts(script) == {"failed"}, script
    assert await verdicts("silent", silence_s=0.05) == {"failed"}
    assert await verdicts("short") == {"different"}


async def test_while_the_only_gateway_is_down_nothing_is_sent_and_it_is_counted() -> None:
    async with fake_server(gap_s=0.2) as server:
        gateways = Gateways({"gateway": server.url})
        load, quiet = load_on(gateways), asyncio.Event()
        running = asyncio.create_task(load.run(3, quiet))
        await until_sent(server, 3)
        gateways.fault_injected(InjectedFault("gateway", "gateway", "KILL", now_s()))
        while load.unsent < 3:
            await asyncio.sleep(0.005)
        sent = len(server.bodies)
        await asyncio.sleep(0.1)
        assert len(server.bodies) == sent
        gateways["gateway"].down = False
        quiet.set()
        await running
        gateways.close()
        assert {record.outcome.verdict for record in load.records} == {"right"}
        assert load.unsent == 3


async def test_a_stopped_gateway_is_asked_all_the_same() -> None:
    async with fake_server() as server:
        gateways = Gateways({"gateway": server.url})
        gateways.fault_injected(InjectedFault("gateway", "gateway", "STOP", now_s()))
        load, quiet = load_on(gateways), asyncio.Event()
        running = asyncio.create_task(load.run(1, quiet))
        await until_sent(server, 1)
        quiet.set()
        await running
        gateways.close()
        assert load.unsent == 0
