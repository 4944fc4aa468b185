"""Requests survive their instances: no token lost, none repeated, one end each."""

from __future__ import annotations

import asyncio
import time

import msgspec
import openai
import pytest

from services.gateway.core import failover
from shared import subjects
from shared.errors import BadRequest, Overloaded, SentBack, Unavailable
from shared.messages.common import Ack, ErrorInfo
from shared.messages.generation import Submit
from tests.processes import process
from tests.services.gateway.cluster import FakeWorker, say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.wait_until import WAIT_S, eventually

TEXT = "the quick brown fox"


async def collect(stack: Stack, **extra: object) -> str:
    stream = await stack.openai.completions.create(model="tiny", prompt="a", max_tokens=64, stream=True, **extra)
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


def busy(stack: Stack) -> FakeWorker:
    return next(w for w in stack.workers if w.submits)


async def two_workers(make_stack: StackFactory, **settings: object) -> Stack:
    stack = await make_stack(2, **settings)
    for worker in stack.workers:
        worker.script = say(TEXT)
    return stack


async def test_a_dead_workers_stream_continues_elsewhere_exactly_behind_its_last_token(
    make_stack: StackFactory,
) -> None:
    stack = await two_workers(make_stack)
    for worker in stack.workers:
        worker.pause_after = 7
    answer = asyncio.create_task(collect(stack, seed=3, stop=["nothing"]))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    first = busy(stack)
    second = next(w for w in stack.workers if w is not first)
    second.pause_after = None
    await stack.received(7)
    await first.stop()
    assert await answer == TEXT
    [again] = second.submits
    assert bytes(again.output_token_ids).decode() == TEXT[:7]
    assert again.attempt == first.submits[0].attempt + 1
    assert again.sampling == first.submits[0].sampling


async def test_a_stream_never_continues_on_other_weights_of_the_same_name(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack)
    for worker in stack.workers:
        worker.pause_after = 7
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    first = busy(stack)
    second = next(w for w in stack.workers if w is not first)
    stack.pool.models[:] = [msgspec.structs.replace(m, model_hash="other") for m in stack.pool.models]
    await stack.pool.publish()
    await first.stop()
    with pytest.raises(openai.APIError, match="removed"):
        await answer
    assert second.submits == []


async def test_usage_counts_tokens_of_all_attempts_once(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack)
    for worker in stack.workers:
        worker.pause_after = 4
    answer = asyncio.create_task(stack.openai.completions.create(model="tiny", prompt="a", max_tokens=64))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    first = busy(stack)
    await stack.received(4)
    for worker in stack.workers:
        worker.pause_after = None
    await first.stop()
    result = await answer
    assert result.choices[0].text == TEXT
    assert result.usage is not None
    assert result.usage.completion_tokens == len(TEXT)


async def test_a_refused_submit_goes_to_another_instance(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack)
    stack.workers[0].refuse_with = Unavailable("draining")
    assert [await collect(stack) for _ in range(3)] == [TEXT] * 3


async def test_a_full_instance_is_asked_again_later(stack: Stack) -> None:
    worker = stack.workers[0]
    worker.script = say(TEXT)
    worker.refuse_with = Overloaded("full")
    answer = asyncio.create_task(collect(stack))
    # More refusals than there are attempts: being full is no fault.
    await stack.until(lambda: len(worker.submits) > 6)
    worker.refuse_with = None
    assert await answer == TEXT


async def test_what_the_worker_finds_wrong_with_the_request_is_the_clients_error(stack: Stack) -> None:
    stack.workers[0].refuse_with = BadRequest("no such token", param="logit_bias")
    with pytest.raises(openai.BadRequestError) as caught:
        await collect(stack)
    assert caught.value.param == "logit_bias"
    assert len(stack.workers[0].submits) == 1


async def test_after_enough_failed_attempts_the_client_gets_a_typed_error(make_stack: StackFactory) -> None:
    stack = await make_stack(3, max_attempts=3)
    for worker in stack.workers:
        worker.refuse_with = Unavailable("broken")
    with pytest.raises(openai.APIStatusError) as caught:
        await collect(stack)
    assert caught.value.status_code == 503
    assert sum(len(w.submits) for w in stack.workers) == 3


async def test_a_broken_stream_ends_with_an_error_event_and_done(make_stack: StackFactory) -> None:
    stack = await make_stack(1, max_attempts=1)
    worker = stack.workers[0]
    worker.script = say("abc")
    worker.end_reason = "error"
    body = {"model": "tiny", "prompt": "a", "stream": True}
    response = await stack.http.post("/v1/completions", json=body)
    events = [line for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert '"error"' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert [e for e in events if '"text":"a"' in e]


async def test_an_attempt_that_ends_in_error_continues_elsewhere(make_stack: StackFactory) -> None:
    stack = await make_stack(2)
    stack.workers[0].script = stack.workers[1].script = say(TEXT)
    answer_from = {w.name: w for w in stack.workers}
    stack.workers[0].script = say(TEXT[:5])
    stack.workers[0].end_reason = "error"
    assert [await collect(stack) for _ in range(2)] == [TEXT] * 2
    assert len(answer_from["w1"].submits) == 2


async def test_a_request_that_an_instance_sends_back_goes_on_elsewhere_and_nothing_failed(
    make_stack: StackFactory,
) -> None:
    stack = await two_workers(make_stack)
    for worker in stack.workers:
        worker.pause_after = 7
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    first = busy(stack)
    second = next(w for w in stack.workers if w is not first)
    await stack.received(7)
    (submit,) = first.submits
    goes = ErrorInfo.of(SentBack("the instance goes"))
    await first.send(
        submit.gateway, msgspec.structs.replace(first.part(submit, 7, []), finish_reason="error", error=goes)
    )
    await stack.until(lambda: second.submits)
    (request,) = stack.gateway.dispatcher.requests.all()
    assert (request.stream.failures, request.stream.deaths.counted) == (0, 0)
    second.resume.set()
    assert await answer == TEXT
    assert bytes(second.submits[0].output_token_ids).decode() == TEXT[:7]
    metrics = stack.gateway.metrics.of("tiny")
    assert (metrics.failovers, metrics.sent_back) == (0, 1)
    first.resume.set()


async def test_a_request_that_is_sent_back_again_and_again_before_anybody_takes_it_ends(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody says that an instance drains: no pool leads, or it has not heard of it."""
    monkeypatch.setattr(failover, "SUSPECT_PAUSE_S", 0.02)
    stack = await make_stack(1, queue_timeout_s=WAIT_S)
    stack.workers[0].refuse_with = SentBack("it drains")
    began_s = time.monotonic()
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: stack.gateway.metrics.of("tiny").sent_back > 2)
    # Its time, which counts from its beginning, is over now.
    skipped_s = began_s + WAIT_S - time.monotonic()
    monkeypatch.setattr(stack.gateway.dispatcher, "_clock", lambda: time.monotonic() + skipped_s)
    with pytest.raises(openai.APIStatusError) as raised:
        async with asyncio.timeout(WAIT_S):
            await answer
    assert raised.value.status_code == 503


async def test_a_silent_instance_is_asked_and_then_given_up(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack, stall_s=0.4)
    for worker in stack.workers:
        worker.pause_after = 5
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    first = busy(stack)
    second = next(w for w in stack.workers if w is not first)
    second.pause_after = None
    assert await answer == TEXT
    assert first.resends
    await stack.until(lambda: first.cancels)


async def test_a_lost_part_is_asked_for_and_a_repeated_one_dropped(make_stack: StackFactory) -> None:
    stack = await make_stack(probe_s=WAIT_S)  # nothing is asked because the worker is silent
    worker = stack.workers[0]
    held: list[Submit] = []

    async def on_submit(submit: Submit) -> Ack:
        held.append(submit)
        return Ack()

    await worker.stop()
    await worker.bus.respond(subjects.worker_submit(process("w0")), Submit, on_submit)
    asked: list[int] = []

    async def on_resend(resend: object) -> Ack:
        asked.append(resend.offset)  # type: ignore[attr-defined]
        await worker.send(process("gw-test"), worker.part(held[0], 1, list(b"bc")))
        return Ack()

    from shared.messages.generation import Resend

    await worker.bus.respond(subjects.worker_resend(process("w0")), Resend, on_resend)
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: held)
    submit = held[0]
    part = worker.part
    await worker.send(process("gw-test"), part(submit, 0, list(b"a")))
    await worker.send(process("gw-test"), part(submit, 0, list(b"a")))
    await worker.send(process("gw-test"), part(submit, 2, list(b"c")))
    await stack.until(lambda: asked)
    assert asked == [1]
    # Overlaps what came again; then a part of no attempt of ours; then the end.
    await worker.send(process("gw-test"), part(submit, 2, list(b"cd")))
    from msgspec.structs import replace

    await worker.send(process("gw-test"), replace(part(submit, 4, list(b"X")), attempt=submit.attempt + 1))
    await worker.send(process("gw-test"), part(submit, 4, list(b"e"), "stop"))
    assert await answer == "abcde"


async def test_disconnecting_cancels_at_the_worker(stack: Stack) -> None:
    worker = stack.workers[0]
    worker.pause_after = 2
    body = {"model": "tiny", "prompt": "a", "stream": True}
    async with stack.http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            break
    await stack.until(lambda: worker.cancels)
    assert worker.cancels[0].request_id == worker.submits[0].request_id
    assert stack.gateway.dispatcher.num_active == 0


async def test_disconnecting_before_the_first_token_cancels_too(stack: Stack) -> None:
    worker = stack.workers[0]
    worker.pause_after = 0
    answer = asyncio.create_task(stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}))
    await stack.until(lambda: worker.submits)
    answer.cancel()
    await stack.until(lambda: worker.cancels)


async def test_requests_on_a_draining_instance_continue_there(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack)
    for worker in stack.workers:
        worker.pause_after = 3
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    first = busy(stack)
    second = next(w for w in stack.workers if w is not first)
    first.state = "draining"
    await stack.pool.publish()
    # Even a route that is gone says nothing about a worker that answers.
    stack.workers.remove(first)
    await stack.pool.publish()
    await asyncio.sleep(0.1)
    first.resume.set()
    assert await answer == TEXT
    assert not second.submits
    second.pause_after = None
    assert await collect(stack) == TEXT
    assert len(second.submits) == 1
    await first.stop()


async def test_a_bus_outage_is_not_taken_for_a_death(make_stack: StackFactory) -> None:
    stack = await two_workers(make_stack, stall_s=0.4)
    for worker in stack.workers:
        worker.pause_after = 6
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    await stack.received(6)
    first = busy(stack)
    stack.broker.disconnect()
    # Longer than any patience with a silent worker; tokens of this time are lost or late.
    first.resume.set()
    await asyncio.sleep(1.2)
    stack.broker.reconnect()
    assert await answer == TEXT
    assert sum(len(w.submits) for w in stack.workers) == 1


async def test_malformed_messages_change_nothing(stack: Stack) -> None:
    for subject in (
        subjects.tokens(process("gw-test")),
        subjects.route_changes(),
        subjects.load(),
        subjects.host_load(),
    ):
        stack.broker.publish_raw(subject, b"\xc1 not msgpack")
        stack.broker.publish_raw(subject, b"\x81\xa4kind\xa9tokens.v9")
    stack.workers[0].script = say(TEXT)
    assert await collect(stack) == TEXT


async def test_draining_finishes_streams_and_refuses_new_requests(make_stack: StackFactory) -> None:
    stack = await make_stack(drain_timeout_s=WAIT_S)
    worker = stack.workers[0]
    worker.pause_after = 2
    answer = asyncio.create_task(collect(stack))
    await stack.until(lambda: worker.submits)
    draining = asyncio.create_task(stack.gateway.drain())

    async def refuses() -> bool:
        return (await stack.http.get("/health")).status_code == 503

    await eventually(refuses)
    assert (await stack.http.get("/live")).status_code == 200
    refused = await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert refused.status_code == 503
    assert not draining.done()
    worker.resume.set()
    assert await answer == "hello"
    await draining
