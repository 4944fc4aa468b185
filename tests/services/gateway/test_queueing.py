"""Requests that wait at the gateway: bounded, bound the moment an instance takes them, never for ever."""

from __future__ import annotations

import asyncio

import pytest

from shared import subjects
from shared.messages.load import QueueReport
from tests.services.gateway.cluster import FakeWorker
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.test_failover import collect


async def test_a_full_queue_refuses_with_retry_after(make_stack: StackFactory) -> None:
    stack = await make_stack(1, max_queued_requests=1)
    worker = stack.workers[0]
    worker.max_running = 1
    worker.pause_after = 1
    await stack.gateway.refresh()
    body = {"model": "tiny", "prompt": "a"}
    tasks = [asyncio.create_task(stack.http.post("/v1/completions", json=body)) for _ in range(2)]
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 2)
    response = await stack.http.post("/v1/completions", json=body)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    worker.resume.set()
    assert [(await task).status_code for task in tasks] == [200, 200]


async def test_waiting_requests_go_to_a_new_instance_the_moment_its_route_comes(make_stack: StackFactory) -> None:
    stack = await make_stack(0, queue_timeout_s=60.0)
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    worker = FakeWorker(stack.broker, "w9")
    await worker.start()
    stack.workers.append(worker)
    await stack.pool.publish()
    assert await answer == "hello"


async def test_the_first_request_for_a_model_that_sleeps_is_reported_at_once(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.service.QUEUE_REPORT_EVERY_S", 3600.0)
    stack = await make_stack(0, queue_timeout_s=60.0)
    held: list[int] = []

    def heard(report: QueueReport) -> None:
        held.extend(queue.queued_requests for queue in report.models)

    await stack.broker.bus("monitor").subscribe(subjects.queue(), QueueReport, heard)
    asking = [asyncio.create_task(collect(stack))]
    await stack.until(lambda: held)
    asking.append(asyncio.create_task(collect(stack)))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 2)
    await asyncio.sleep(0.1)
    assert held == [1], "the monitor is awake: the others are in the next report"
    worker = FakeWorker(stack.broker, "w9")
    await worker.start()
    stack.workers.append(worker)
    await stack.pool.publish()
    assert await asyncio.gather(*asking) == ["hello", "hello"]


async def test_a_request_that_nobody_takes_in_time_gets_503(make_stack: StackFactory) -> None:
    stack = await make_stack(0, queue_timeout_s=0.2)
    response = await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_a_removed_models_waiting_requests_get_404_and_running_ones_finish(stack: Stack) -> None:
    worker = stack.workers[0]
    worker.max_running = 1
    worker.pause_after = 1
    await stack.gateway.refresh()
    running = asyncio.create_task(collect(stack))
    await stack.until(lambda: worker.submits)
    waiting = asyncio.create_task(stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 2)
    assert (await stack.http.delete("/admin/models/tiny")).status_code == 200
    assert (await waiting).json()["error"]["code"] == "model_not_found"
    worker.resume.set()
    assert await running == "hello"


async def test_a_chat_that_came_before_any_instance_gets_what_the_first_instance_holds(
    make_stack: StackFactory,
) -> None:
    stack = await make_stack(0)
    waiting = asyncio.create_task(
        stack.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
    )
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    worker = FakeWorker(stack.broker, "w9", context_tokens=100)
    await worker.start()
    stack.workers.append(worker)
    await stack.pool.publish()
    assert (await waiting).status_code == 200
    [submit] = worker.submits
    assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 100


async def test_a_request_that_no_instance_can_hold_is_told_the_limit_and_the_next_one_is_served(
    make_stack: StackFactory,
) -> None:
    stack = await make_stack(0)
    long = asyncio.create_task(
        stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 150})
    )
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    short = asyncio.create_task(collect(stack))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 2)
    worker = FakeWorker(stack.broker, "w9", context_tokens=100)
    await worker.start()
    stack.workers.append(worker)
    await stack.pool.publish()
    refused = await long
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "100 tokens" in refused.json()["error"]["message"]
    assert await short == "hello"
