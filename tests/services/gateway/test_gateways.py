"""Several gateways in front of the same instances."""

from __future__ import annotations

import asyncio
import math

import pytest
from msgspec import structs

from services.gateway.core import bookings
from shared import subjects
from shared.errors import Overloaded
from shared.messages.generation import GatewayHeartbeat
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.core.routing import load_report
from tests.services.gateway.http.test_metrics import scrape
from tests.services.gateway.test_failover import collect


@pytest.fixture(autouse=True)
def nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported once counts until the test ends, however long the machine takes for it."""
    for name in ("FRESH_S", "FRESH_QUEUES_S"):
        monkeypatch.setattr(bookings, name, math.inf)


async def test_seats_that_another_gateways_requests_have_are_not_booked_again(make_stack: StackFactory) -> None:
    first = await make_stack(1)
    [worker] = first.workers
    worker.max_running, worker.pause_after = 4, 1
    await first.gateway.refresh()
    second = await make_stack(0, broker=first.broker, record=first.pool.models[0], gateway_id="gw-other")
    # One pool answers for both.
    second.pool.workers.append(worker)
    await second.gateway.refresh()
    mine = [asyncio.create_task(collect(first)) for _ in range(4)]
    await first.until(lambda: len(worker.submits) == 4)
    router = second.gateway.dispatcher.router
    await second.until(lambda: router.others.about("tiny").num_gateways == 2)
    report = structs.replace(load_report(worker.instance_id, running=4), model="tiny")
    await worker.bus.publish(subjects.load(), report)
    await second.until(lambda: router.bookings.load_of(worker.instance_id).foreign.requests == 4)
    theirs = [asyncio.create_task(collect(second)) for _ in range(4)]
    await second.until(lambda: second.gateway.dispatcher.num_active == 4)
    await second.until(lambda: len(worker.submits) >= 6)
    await asyncio.sleep(0.2)
    # Its share of the slots, whatever the other has; the rest waits here.
    assert len(worker.submits) == 6
    worker.resume.set()
    assert await asyncio.gather(*mine, *theirs) == ["hello"] * 8


async def test_refusals_are_counted_and_asked_for_less_and_less_often(stack: Stack) -> None:
    [worker] = stack.workers
    worker.script = say("x")
    worker.refuse_with = Overloaded("full")
    answer = asyncio.create_task(collect(stack))
    # The first one was not to wait there: it says no more than that no slot is free.
    await stack.until(lambda: len(worker.submits) == 6)
    load = stack.gateway.dispatcher.router.bookings.load_of(worker.instance_id)
    assert load.refusals >= 4
    worker.refuse_with = None
    assert await answer == "x"
    assert (await scrape(stack))['blitz_gateway_refusals_total{model_name="tiny"}'] == 6
    assert load.refusals == 0


async def test_requests_say_which_process_of_the_gateway_waits_for_them(stack: Stack) -> None:
    beats: list[GatewayHeartbeat] = []
    await stack.broker.bus("listener").subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, beats.append)
    assert await collect(stack) == "hello"
    await stack.until(lambda: beats)
    [submit] = stack.workers[0].submits
    assert submit.gateway_incarnation == beats[0].incarnation != ""


async def test_a_seat_that_another_gateway_took_a_moment_ago_sends_the_request_to_another_instance(
    make_stack: StackFactory,
) -> None:
    first = await make_stack(2)
    taken, free = first.workers
    for worker in first.workers:
        worker.max_running, worker.pause_after = 1, 1
    await first.gateway.refresh()
    second = await make_stack(0, broker=first.broker, record=first.pool.models[0], gateway_id="gw-other")
    second.pool.workers += first.workers
    await second.gateway.refresh()
    # Nothing is reported in between: to the second one both instances are idle.
    mine = asyncio.create_task(collect(first))
    await first.until(lambda: len(taken.submits) == 1)
    theirs = asyncio.create_task(collect(second))
    await second.until(lambda: len(free.submits) == 1)
    assert [submit.may_wait for submit in taken.submits] == [False, False]
    assert (taken.num_running, free.num_running) == (1, 1)
    assert not second.gateway.dispatcher.router.bookings.load_of(taken.instance_id).refusals, (
        "it is left alone for no time"
    )
    third = asyncio.create_task(collect(second))
    await second.until(lambda: len(taken.submits) + len(free.submits) == 4)
    for worker in first.workers:
        worker.resume.set()
    assert await asyncio.gather(mine, theirs, third) == ["hello"] * 3
    scraped = await scrape(second)
    assert scraped['blitz_gateway_refusals_total{model_name="tiny"}'] == 1
    assert scraped.get('blitz_gateway_failovers_total{model_name="tiny"}', 0.0) == 0.0, "no attempt is spent"
