from __future__ import annotations

import asyncio

import pytest

from bench.prefix.load import Answered, Load, first_error, sustained_per_s
from bench.prefix.workload import Planned
from bench.stream_client import Endpoint, StreamClient, StreamFailed
from shared.errors import Internal
from tests.bench.fake_server import FakeServer, Script, fake_server

TOKEN_OF = {character: 100 + index for index, character in enumerate("t 0123456789")}
"""Of what the server answers with: t0 t1 t2 ..."""
ANSWERED = tuple(TOKEN_OF[character] for character in "t0 t1 ")


def turn(number: int, at_s: float, *, after: int | None = None) -> Planned:
    return Planned(number, at_s, (number + 1, number + 1), 2, after)


async def asked(
    *plan: Planned, script: Script = lambda n: "ok", gap_s: float = 0.0
) -> tuple[tuple[Answered, ...], FakeServer]:
    async with fake_server(script, gap_s=gap_s) as server:
        client = StreamClient(Endpoint.of(server.url))
        try:
            return await Load(client, "fake", plan, TOKEN_OF).run(), server
        finally:
            client.close()


@pytest.mark.asyncio
async def test_a_turn_is_asked_with_all_that_was_said_before_it() -> None:
    answers, server = await asked(turn(0, 0.0), turn(1, 0.01), turn(2, 0.1, after=0), turn(3, 0.2, after=2))
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert prompts == [
        (1, 1),
        (2, 2),
        (1, 1, *ANSWERED, 3, 3),
        (1, 1, *ANSWERED, 3, 3, *ANSWERED, 4, 4),
    ]
    assert [one.planned.number for one in answers] == [0, 1, 2, 3]
    assert [one.streamed.usage.prompt_tokens for one in answers if one.streamed.usage] == [len(p) for p in prompts]
    assert not any(one.late for one in answers)


@pytest.mark.asyncio
async def test_what_is_slow_keeps_nobody_waiting_but_its_own_conversation() -> None:
    answers, _ = await asked(turn(0, 0.0), turn(1, 0.05), turn(2, 0.1, after=0), gap_s=0.2)
    first, other, next_turn = (one.streamed for one in answers)
    assert other.sent_s - first.sent_s == pytest.approx(0.05, abs=0.04)
    assert next_turn.sent_s - first.sent_s >= 0.4
    assert [one.late for one in answers] == [False, False, True]


@pytest.mark.asyncio
async def test_what_fails_is_kept_and_its_conversation_goes_on_with_what_was_said() -> None:
    answers, server = await asked(
        turn(0, 0.0),
        turn(1, 0.1, after=0),
        turn(2, 0.2, after=1),
        script=lambda n: ("429", "error_event", "ok")[n],
    )
    assert ["429" in one.streamed.error or "lost" in one.streamed.error for one in answers] == [True, True, False]
    assert tuple(server.bodies[1]["prompt"]) == (1, 1, 2, 2)
    assert tuple(server.bodies[2]["prompt"]) == (1, 1, 2, 2, *(TOKEN_OF[one] for one in "t0 "), 3, 3)


@pytest.mark.asyncio
async def test_what_is_sustained_is_counted_after_a_while() -> None:
    async with fake_server(gap_s=0.02) as server:
        client = StreamClient(Endpoint.of(server.url))
        plan = (turn(0, 0.0), turn(1, 0.0))
        per_s = await sustained_per_s(client, "fake", plan, ((1,), (2,)), at_a_time=3, settle_s=0.2, seconds=0.8)
        client.close()
    # Three at a time, of 40 ms and a little more each.
    assert 15 < per_s <= 3 / 0.04
    assert server.most_running == 3
    assert len(server.bodies) > per_s * 0.8
    assert {tuple(body["prompt"]) for body in server.bodies} == {(1,), (2,)}


@pytest.mark.asyncio
async def test_nothing_is_sustained_where_requests_fail() -> None:
    async with fake_server(lambda n: "429") as server:
        client = StreamClient(Endpoint.of(server.url))
        with pytest.raises(StreamFailed, match="429"):
            await sustained_per_s(client, "fake", (turn(0, 0.0),), ((1,),), at_a_time=2, settle_s=0.1, seconds=0.2)
        client.close()


@pytest.mark.asyncio
async def test_of_several_tasks_one_error_is_raised() -> None:
    async def fail() -> None:
        raise Internal("no instance")

    async def fail_twice() -> None:
        with first_error():
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(fail())

    with pytest.raises(Internal, match="no instance"):
        await fail_twice()
