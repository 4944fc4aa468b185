"""Requests that wait at the gateway: bounded, bound the moment an instance takes them, never for ever."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway import late_requests
from services.gateway.core import capacity
from services.gateway.tokenizer import ModelTokenizer
from shared import subjects
from shared.messages.load import QueueReport
from shared.messages.operations import ListScaleRecords, RefusedLoad, ScaleRecords, Unplanned
from shared.messages.registry import ModelRecord, ModelRoute, RouteChanges
from tests.services.gateway.cluster import FakeWorker
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_rate_limits import key, keys_file
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


@pytest.mark.parametrize(
    ("named", "order"), [(("", "", "", ""), "dbac"), (("x", "y", "x", "y"), "cdab")], ids=["without keys", "two keys"]
)
async def test_waiting_requests_of_a_key_go_by_priority(
    make_stack: StackFactory, named: tuple[str, ...], order: str, tmp_path: Path
) -> None:
    settings = {"keys_file": keys_file(tmp_path, key("x"), key("y"))} if any(named) else {}
    stack = await make_stack(1, **settings)
    [worker] = stack.workers
    worker.max_running, worker.pause_after = 1, 1
    await stack.gateway.refresh()

    async def ask(name: str, prompt: str, **extra: Any) -> int:
        headers = {"Authorization": f"Bearer sk-{name}"} if name else {}
        body = {"model": "tiny", "prompt": prompt, **extra}
        return (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask("y" if any(named) else "", "first"))
        await stack.until(lambda: worker.submits)
        # Of "a" to "d", which come in that order; null is 0.
        for number, priority in enumerate((None, -1, 1 if not any(named) else -1, -(2**63))):
            tasks.create_task(ask(named[number], "abcd"[number], priority=priority))
            await stack.until(lambda number=number: stack.gateway.dispatcher.num_active == number + 2)
        worker.resume.set()
    assert "".join(chr(submit.prompt_token_ids[-1]) for submit in worker.submits[1:]) == order


ASK = {"model": "tiny", "prompt": "a"}
PATIENT_S = 60.0


async def test_a_request_that_nobody_takes_in_time_gets_503(make_stack: StackFactory) -> None:
    stack = await make_stack(0, queue_timeout_s=0.2)
    response = await stack.http.post("/v1/completions", json=ASK)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["message"].endswith("it has none, and no worker is registered")


async def test_a_request_that_waited_in_vain_is_told_what_the_planner_knows_by_one_question(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_requests, "ASK_TIMEOUT_S", PATIENT_S)
    stack = await make_stack(1, queue_timeout_s=0.3)
    await sleeping(stack)
    asked: list[ListScaleRecords] = []
    release = asyncio.Event()

    async def records(message: ListScaleRecords) -> ScaleRecords:
        asked.append(message)
        await release.wait()
        return ScaleRecords(
            records=(),
            unplanned=(
                Unplanned(model="tiny", role="colocated", wanted=1, why="no worker is spare", for_s=1.0),
                Unplanned(model="other", role="colocated", wanted=1, why="something else", for_s=1.0),
            ),
            refused=(RefusedLoad(worker_id="w7", model="tiny", why="bad disk", for_s=1.0, failures=1),),
        )

    await stack.broker.bus("planner").respond(subjects.planner("records"), ListScaleRecords, records)
    asking = [asyncio.create_task(stack.http.post("/v1/completions", json=ASK)) for _ in range(3)]
    gone = asyncio.create_task(stack.http.post("/v1/completions", json=ASK | {"stream": True}))
    # None ends before the planner has answered.
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 4)
    await stack.until(lambda: asked)
    gone.cancel()
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 3)
    await stack.until(lambda: not stack.gateway.dispatcher.router.waiting())
    release.set()
    for answer in await asyncio.gather(*asking):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "unavailable")
        assert "no worker is spare (wanted: 1 colocated); worker w7 failed to load it: bad disk" in error["message"]
        assert "something else" not in error["message"]
    assert [message.models for message in asked] == [("tiny",)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_which_there_is_no_room_is_told_so_soon_and_not_to_come_again(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    # It waits longer here than the time after which a stream gets comments.
    monkeypatch.setattr("services.gateway.http.generation.HELD_COMMENT_EVERY_S", 3600.0)
    monkeypatch.setattr("services.gateway.dispatcher.LOOK_EVERY_S", 0.05)
    stack = await make_stack(1, queue_timeout_s=3600.0, no_room_timeout_s=0.2)
    await sleeping(stack)
    said: dict[str, Any] = {"for_s": 0.1}
    asked = 0

    async def records(_: ListScaleRecords) -> ScaleRecords:
        nonlocal asked
        asked += 1
        why = Unplanned(**{"model": "tiny", "role": "colocated", "wanted": 1, "why": "no worker is spare", **said})
        return ScaleRecords(records=(), unplanned=(why,))

    async def asked_again() -> None:
        before = asked
        await stack.until(lambda: asked > before + 1)

    await stack.broker.bus("planner").respond(subjects.planner("records"), ListScaleRecords, records)
    asking = asyncio.create_task(stack.http.post("/v1/completions", json=ASK | {"stream": stream}))
    # Not yet, not for good, not those that take requests, not of this model.
    for harmless in ({"for_s": 0.1}, {"coming": True}, {"role": "decode"}, {"model": "other"}):
        said = {"for_s": 9.0, **harmless}
        await asked_again()
        assert stack.gateway.dispatcher.num_active == 1
    said = {"for_s": 9.0}
    answer = await asking
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "no_capacity")
    assert "no worker is spare" in error["message"]
    assert (answer.headers["x-should-retry"], answer.headers["retry-after"]) == ("false", "60")


@pytest.mark.parametrize(("own_s", "said"), [(0.2, "for 0.2 s "), (0.0, "no instance")])
async def test_a_model_with_less_patience_than_the_gateway_ends_its_requests_sooner(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, own_s: float, said: str
) -> None:
    monkeypatch.setattr(capacity, "GRACE_S", math.inf)
    stack = await make_stack(1, queue_timeout_s=7200.0, no_room_timeout_s=3600.0)
    await sleeping(stack)
    await nothing_can_be_started(stack)
    waiting = asyncio.create_task(stack.http.post("/v1/completions", json=ASK))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    # What waits already ends, too.
    response = await stack.http.patch("/admin/models/tiny", json={"no_room_timeout_s": own_s})
    assert response.status_code == 200
    for answer in (await waiting, await stack.http.post("/v1/completions", json=ASK | {"stream": True})):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "no_capacity")
        assert error["message"].startswith(said)


async def test_a_model_with_more_patience_than_the_gateway_waits_until_it_has_the_gateways_again(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "GRACE_S", math.inf)
    stack = await make_stack(1, queue_timeout_s=7200.0, no_room_timeout_s=0.1)
    await stack.http.patch("/admin/models/tiny", json={"no_room_timeout_s": 3600})
    await sleeping(stack)
    asked = await nothing_can_be_started(stack)
    stack.pool.models.append(msgspec.structs.replace(stack.pool.models[0], name="other", no_room_timeout_s=None))
    await stack.gateway.refresh()
    waiting = asyncio.create_task(stack.http.post("/v1/completions", json=ASK))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    other = await stack.http.post("/v1/completions", json=ASK | {"model": "other"})
    assert (other.status_code, other.json()["error"]["code"]) == (503, "no_capacity")
    assert (stack.gateway.dispatcher.num_active, {name for names in asked for name in names}) == (1, {"other"})
    await stack.http.patch("/admin/models/tiny", json={"no_room_timeout_s": "default"})
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
    assert answer.json()["error"]["message"].startswith("for 0.1 s ")


async def nothing_can_be_started(stack: Stack) -> list[tuple[str, ...]]:
    """A planner says so of each model that it is asked about; those that it was asked about."""
    asked: list[tuple[str, ...]] = []

    async def records(message: ListScaleRecords) -> ScaleRecords:
        asked.append(message.models)
        why = "no worker is spare"
        said = [Unplanned(model=name, role="colocated", wanted=1, why=why, for_s=900.0) for name in message.models]
        return ScaleRecords(records=(), unplanned=tuple(said))

    await stack.broker.bus("planner").respond(subjects.planner("records"), ListScaleRecords, records)
    return asked


async def test_a_stream_that_waits_long_gets_comments_that_clients_skip(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.generation.HELD_COMMENT_EVERY_S", 0.05)
    stack = await make_stack(1, no_room_timeout_s=0.1)
    await sleeping(stack)
    official = asyncio.create_task(collect(stack))
    async with stack.http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
        stack.workers[0].state = "serving"
        await stack.gateway.refresh()
        events = [line async for line in lines if line.startswith("data: ")]
    assert (response.status_code, events[-1]) == (200, "data: [DONE]")
    assert await official == "hello"


async def test_an_error_behind_a_comment_is_an_event(make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.generation.HELD_COMMENT_EVERY_S", 0.05)
    stack = await make_stack(0, no_room_timeout_s=0.1, queue_timeout_s=1.0)
    answer = await stack.http.post("/v1/completions", json=ASK | {"stream": True})
    assert answer.status_code == 200
    assert answer.text.startswith(": waiting")
    assert '"code":"unavailable"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def sleeping(stack: Stack) -> None:
    """The workers have no instances (any more)."""
    for worker in stack.workers:
        worker.state = "loading"
    await stack.gateway.refresh()
    await stack.until(lambda: stack.gateway.dispatcher.router.sleeps("tiny"))


async def test_what_no_registered_worker_can_ever_hold_is_refused_at_once_and_what_waits_for_it_is_ended(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(1)
    await sleeping(stack)
    waiting = asyncio.create_task(stack.http.post("/v1/completions", json=ASK))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    await stack.gateway.refresh()
    assert stack.gateway.dispatcher.num_active == 1, "a larger worker may still come"
    monkeypatch.setattr(capacity, "GRACE_S", 0.0)
    await stack.gateway.refresh()
    for answer in (await waiting, await stack.http.post("/v1/completions", json=ASK)):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (503, "unservable", "server_error")
        assert "1000 bytes" in error["message"]
        assert (answer.headers["x-should-retry"], "retry-after" in answer.headers) == ("false", False)
    stack.workers[0].state = "serving"
    await stack.gateway.refresh()
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200, "what serves is asked"


async def test_a_model_without_instances_that_may_have_none_refuses_at_once(make_stack: StackFactory) -> None:
    stack = await make_stack(1)
    stack.pool.models[0] = msgspec.structs.replace(stack.pool.models[0], min_instances=0, max_instances=0)
    await stack.gateway.refresh()
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200, "it still has one"
    await sleeping(stack)
    error = (await stack.http.post("/v1/completions", json=ASK)).json()["error"]
    assert error["code"] == "unservable"
    assert "max_instances" in error["message"]


async def test_a_context_that_no_worker_can_ever_hold_is_the_callers_fault(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(1)
    kv_bytes = stack.pool.models[0].spec.kv_bytes_per_token
    stack.workers[0].arena_bytes, stack.workers[0].kv_bytes = 1000, 100 * kv_bytes
    monkeypatch.setattr(capacity, "GRACE_S", 0.0)
    await sleeping(stack)
    answer = await stack.http.post("/v1/completions", json=ASK | {"max_tokens": 150})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert (await stack.http.get("/v1/models/tiny")).json()["max_model_len"] == 100
    stack.workers[0].state = "serving"
    await stack.gateway.refresh()
    assert (await stack.http.post("/v1/completions", json=ASK | {"max_tokens": 150})).status_code == 200


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


async def of_other_weights(stack: Stack) -> None:
    """The model is removed, and its name registered anew with another checkpoint, in one change; it has an instance."""
    [record] = stack.pool.models
    record = stack.pool.models[0] = msgspec.structs.replace(record, model_hash="other")
    routes = tuple(ModelRoute(model=record.name, route=worker.route()) for worker in stack.workers)
    event = RouteChanges(publisher="p", sequence=1, removed_models=(record.name,), models=(record,), routes=routes)
    await stack.pool.bus.publish(subjects.route_changes(), event)
    await stack.until(lambda: stack.gateway.routes.models["tiny"].record.model_hash == "other")


async def with_an_instance(stack: Stack) -> FakeWorker:
    worker = FakeWorker(stack.broker, "w9")
    await worker.start()
    stack.workers.append(worker)
    return worker


async def test_what_waits_for_a_model_never_runs_on_other_weights_of_its_name(make_stack: StackFactory) -> None:
    stack = await make_stack(0)
    waiting = asyncio.create_task(stack.http.post("/v1/completions", json=ASK))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 1)
    worker = await with_an_instance(stack)
    await of_other_weights(stack)
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert worker.submits == []
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    assert [submit.model_hash for submit in worker.submits] == ["other"]


async def test_a_prompt_that_was_tokenized_for_the_weights_before_is_not_given_to_others(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(0)
    tokenizers = stack.gateway.tokenizers
    get, asked, go_on = tokenizers.get, asyncio.Event(), asyncio.Event()

    async def slowly(record: ModelRecord) -> ModelTokenizer:
        tokenizer = await get(record)
        asked.set()
        await go_on.wait()
        return tokenizer

    monkeypatch.setattr(tokenizers, "get", slowly)
    asking = asyncio.create_task(stack.http.post("/v1/completions", json=ASK))
    await asked.wait()
    worker = await with_an_instance(stack)
    await of_other_weights(stack)
    go_on.set()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert worker.submits == []


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
