"""Workers that are gone, that hang, and that only seem to: who is asked, and whose requests go on elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from shared import subjects
from shared.bus.departures import Departure
from shared.messages.load import HostLoad, LoadReport
from tests.processes import INCARNATION
from tests.services.gateway.cluster import FakeWorker
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_metrics import scrape
from tests.services.gateway.test_failover import TEXT, busy, collect, two_workers

NEVER_S = 60.0
"""A silence that nobody asks about within a test."""


async def begun(stack: Stack) -> tuple[asyncio.Task[str], FakeWorker, FakeWorker]:
    """A stream that stands still behind seven tokens: it, its worker, and the other one."""
    for worker in stack.workers:
        worker.pause_after = 7
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    first = busy(stack)
    second = next(w for w in stack.workers if w is not first)
    second.pause_after = None
    await stack.received(7)
    return answer, first, second


def departs(stack: Stack, worker: FakeWorker, reason: str, *, kind: str = "worker") -> None:
    stack.broker.depart(Departure(kind, worker.name, INCARNATION, reason))


def load(worker: FakeWorker) -> LoadReport:
    return LoadReport(
        worker_id=worker.name,
        incarnation=INCARNATION,
        instance_id=worker.instance_id,
        model="tiny",
        state="serving",
        role="colocated",
        queued_requests=0,
        queued_tokens=0,
        running_requests=1,
        running_tokens=10,
        prefill_tokens_total=0,
        decode_tokens_total=0,
        busy_s_total=0.0,
        kv_blocks_total=10,
        kv_blocks_used=1,
        kv_block_tokens=16,
    )


async def resubmissions(stack: Stack) -> dict[str, float]:
    name = "blitz_gateway_resubmissions_total"
    return {row: value for row, value in (await scrape(stack)).items() if row.startswith(name)}


@pytest.mark.parametrize("reason", ["Client Closed", "Read Error", "Write Error"])
async def test_streams_of_a_worker_whose_connection_was_closed_go_on_without_a_silence(
    make_stack: StackFactory, reason: str
) -> None:
    stack = await two_workers(make_stack, probe_s=NEVER_S, stall_s=NEVER_S)
    answer, first, second = await begun(stack)
    await first.stop()
    departs(stack, first, reason)
    assert await answer == TEXT
    [again] = second.submits
    assert bytes(again.output_token_ids).decode() == TEXT[:7]
    assert again.attempt == first.submits[0].attempt + 1
    assert await resubmissions(stack) == {'blitz_gateway_resubmissions_total{reason="closed"}': 1}


async def test_a_departure_may_be_told_before_the_server_has_taken_the_subscriptions_away(
    make_stack: StackFactory,
) -> None:
    stack = await two_workers(make_stack, probe_s=NEVER_S, stall_s=NEVER_S)
    answer, first, _ = await begun(stack)
    first.hang()
    departs(stack, first, "Client Closed")
    await stack.until(lambda: first.resends)
    first.bus.go_down()
    assert await answer == TEXT


async def test_a_worker_that_is_back_at_once_keeps_its_streams(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack, probe_s=NEVER_S, stall_s=NEVER_S)
    answer, first, second = await begun(stack)
    departs(stack, first, "Client Closed")
    await stack.until(lambda: first.resends)
    first.resume.set()
    assert await answer == TEXT
    assert (second.submits, first.cancels, await resubmissions(stack)) == ([], [], {})


@pytest.mark.parametrize("reason", ["Stale Connection", "Slow Consumer (Pending Bytes)", "Server Shutdown"])
async def test_a_worker_that_the_server_cut_off_is_only_asked(make_stack: StackFactory, reason: str) -> None:
    stack = await two_workers(make_stack, probe_s=1.0, stall_s=NEVER_S)
    answer, first, second = await begun(stack)
    first.bus.go_down()
    departs(stack, first, reason)
    # Nobody listens, and is said to: it may be on its way back.
    await stack.until(lambda: stack.gateway.metrics.of("tiny").resends)
    await asyncio.sleep(0.1)
    first.bus.go_up()
    await stack.until(lambda: first.resends)
    first.resume.set()
    assert await answer == TEXT
    assert (second.submits, first.cancels) == ([], [])


async def test_departures_of_others_ask_nobody(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack, probe_s=NEVER_S, stall_s=NEVER_S)
    answer, first, second = await begun(stack)
    departs(stack, first, "Client Closed", kind="monitor")
    departs(stack, second, "Client Closed")
    await asyncio.sleep(0.1)
    assert first.resends == second.resends == []
    first.resume.set()
    assert await answer == TEXT


async def test_a_worker_that_hangs_is_given_up_after_several_questions_and_its_return_is_told(
    make_stack: StackFactory, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await two_workers(make_stack, probe_s=0.2, stall_s=NEVER_S)
    answer, first, second = await begun(stack)
    first.hang()
    with caplog.at_level(logging.WARNING):
        assert await answer == TEXT
        assert await resubmissions(stack) == {'blitz_gateway_resubmissions_total{reason="silent"}': 1}
        assert stack.gateway.metrics.of("tiny").resends >= 3
        assert bytes(second.submits[0].output_token_ids).decode() == TEXT[:7]
        # It goes on: what it still sends is an older attempt's, and cancelled.
        first.resume.set()
        await stack.until(lambda: first.cancels)
        await first.bus.publish(subjects.load(), load(first))
        await stack.until(lambda: f"worker {first.name} is alive" in caplog.text)


@pytest.mark.parametrize("together", [False, True])
async def test_a_worker_that_reports_its_load_is_not_given_up(make_stack: StackFactory, together: bool) -> None:
    stack = await two_workers(make_stack, probe_s=0.2, stall_s=NEVER_S)
    answer, first, second = await begun(stack)
    first.hang()
    rounds = 0
    while (rounds := rounds + 1) <= 40 or stack.gateway.metrics.of("tiny").resends < 3:
        report = load(first)
        if together:
            await second.bus.publish(subjects.host_load(), HostLoad(host="h", reports=(load(second), report)))
        else:
            await first.bus.publish(subjects.load(), report)
        await asyncio.sleep(0.05)
    assert (second.submits, await resubmissions(stack)) == ([], {})
    first.resume.set()
    assert await answer == TEXT


@pytest.mark.parametrize(("probe_s", "stall_s"), [(0.3, NEVER_S), (NEVER_S, 0.7)], ids=["worker", "stream"])
async def test_nobody_is_given_up_by_a_gateway_that_stood_still(
    make_stack: StackFactory, probe_s: float, stall_s: float
) -> None:
    stack = await two_workers(make_stack, probe_s=probe_s, stall_s=stall_s)
    answer, first, second = await begun(stack)
    for _ in range(3):
        time.sleep(1.5)  # noqa: ASYNC251 - all of the process, as if it were stopped
        await asyncio.sleep(0.06)
    assert (second.submits, first.cancels) == ([], [])
    first.resume.set()
    assert await answer == TEXT


async def test_a_stopped_server_is_no_workers_death(make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = await two_workers(make_stack, probe_s=0.2, stall_s=NEVER_S)
    answer, first, second = await begun(stack)
    # Connected, as far as anybody knows; but nothing comes through.
    monkeypatch.setattr(stack.broker, "publish_raw", lambda *_: None)
    monkeypatch.setattr(stack.broker, "request_raw", lambda *_: True)
    await asyncio.sleep(2.0)
    monkeypatch.undo()
    assert (second.submits, first.cancels, await resubmissions(stack)) == ([], [], {})
    first.resume.set()
    assert await answer == TEXT
