"""Workers die with requests in them: who caused it is ended by the third death, the others do not notice."""

from __future__ import annotations

import asyncio
import logging

import httpx
import msgspec
import pytest

from shared.errors import NotFound
from shared.messages.common import Ack, ErrorInfo
from shared.messages.generation import Resend, Submit
from tests.services.gateway.cluster import FakeWorker, Script, say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.wait_until import WAIT_S

TEXT = "the quick brown fox jumps over the lazy dog"
POISON = "z"


def is_poison(submit: Submit) -> bool:
    return ord(POISON) in submit.prompt_token_ids


def mortal(worker: FakeWorker, *, lasts: int = 0) -> Script:
    """A worker that dies of poison, once it has said ``lasts`` tokens of its text."""

    async def die(submit: Submit) -> None:
        start = len(submit.output_token_ids)
        await asyncio.sleep(0.02)
        while (at := start + len(worker.sent[submit.request_id, submit.attempt])) < lasts:
            await asyncio.sleep(0.005)
        if submit.alone_tokens:
            await worker.send(submit.gateway, msgspec.structs.replace(worker.part(submit, at, []), computing=True))
        await worker.stop()

    def script(submit: Submit) -> list[int]:
        if is_poison(submit):
            dying = asyncio.get_running_loop().create_task(die(submit))
            worker_tasks.add(dying)
            return list(TEXT.encode()) if lasts else []
        return list(TEXT.encode())

    return script


worker_tasks: set[asyncio.Task[None]] = set()
"""Keeps them from being collected."""


async def mortals(make_stack: StackFactory, count: int, *, lasts: int = 0, **settings: object) -> Stack:
    stack = await make_stack(count, **settings)
    for worker in stack.workers:
        worker.script = mortal(worker, lasts=lasts)
        worker.step_s = 0.02
    await stack.until(lambda: stack.gateway.dispatcher.silence_watch.is_settled)
    return stack


async def ask(stack: Stack, prompt: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 100}
    return await stack.http.post("/v1/completions", json=body, timeout=WAIT_S)


def dead(stack: Stack) -> list[FakeWorker]:
    return [worker for worker in stack.workers if not worker.subscriptions]


async def test_a_poison_prompt_is_ended_after_three_workers_and_the_others_are_answered(
    make_stack: StackFactory, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await mortals(make_stack, 5)
    with caplog.at_level(logging.WARNING):
        others = [asyncio.create_task(ask(stack, "a")) for _ in range(8)]
        await stack.until(lambda: sum(len(w.submits) for w in stack.workers) == 8)
        answer = await ask(stack, POISON)
        texts = [(await other).json()["choices"][0]["text"] for other in others]
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "poison_request")
    assert "3 workers that died" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false", "or the client's library would kill three more"
    assert texts == [TEXT] * 8
    assert len(dead(stack)) == 3
    submits = [s for w in stack.workers for s in w.submits if is_poison(s)]
    assert sorted((s.attempt, s.alone_tokens > 0) for s in submits) == [(1, False), (2, False), (3, True)]
    # Of this gateway: what other tests left behind may be found just now, and is an error of asyncio's.
    gateways = [r for r in caplog.records if r.name.startswith("services.gateway")]
    (named,) = [r.getMessage() for r in gateways if r.levelno == logging.ERROR]
    assert submits[0].request_id in named
    assert all(worker.name in named for worker in dead(stack))


async def test_one_that_kills_in_the_middle_of_its_text_is_found_as_well(make_stack: StackFactory) -> None:
    stack = await mortals(make_stack, 5, lasts=30)
    answer = await ask(stack, POISON)
    assert answer.json()["error"]["code"] == "poison_request"
    assert len(dead(stack)) == 3


async def test_workers_that_die_of_something_else_cost_no_attempt(make_stack: StackFactory) -> None:
    stack = await mortals(make_stack, 6, max_attempts=2)
    for worker in stack.workers:
        worker.pause_after = 5
    answer = asyncio.create_task(ask(stack, "a"))
    for round_ in range(1, 5):
        await stack.until(lambda round_=round_: sum(len(w.submits) for w in stack.workers) == round_)
        holder = next(w for w in stack.workers if w.submits and w not in dead(stack))
        await stack.received(5 * round_)
        if round_ == 4:
            for worker in stack.workers:
                worker.pause_after = None
        await holder.stop()
    assert (await answer).json()["choices"][0]["text"] == TEXT
    assert len(dead(stack)) == 4


async def test_an_engine_that_breaks_counts_as_a_death(make_stack: StackFactory) -> None:
    stack = await make_stack(4)
    for worker in stack.workers:
        worker.end_reason = "error"
        worker.part = broken(worker)  # type: ignore[method-assign]
    answer = await ask(stack, "a")
    assert answer.json()["error"]["code"] == "poison_request"
    assert sum(len(w.submits) for w in stack.workers) == 3


def broken(worker: FakeWorker):  # type: ignore[no-untyped-def]
    """Its parts: the first one says that the engine broke, in a step of the request's own."""
    real = worker.part

    def part(submit: Submit, offset: int, token_ids: list[int], reason: object = None):  # type: ignore[no-untyped-def]
        ends = msgspec.structs.replace(real(submit, len(submit.output_token_ids), []), finish_reason="error")
        error = ErrorInfo(code="engine_broken", message="the device is gone")
        return msgspec.structs.replace(ends, error=error, computing=True)

    return part


async def test_a_worker_that_was_told_to_leave_did_not_die(make_stack: StackFactory) -> None:
    stack = await mortals(make_stack, 2)
    answer = asyncio.create_task(ask(stack, "a"))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    holder = next(w for w in stack.workers if w.submits)
    holder.state = "draining"
    await stack.pool.publish()
    await stack.until(lambda: stack.gateway.routes.models["tiny"].routes[holder.instance_id].state == "draining")
    (request,) = stack.gateway.dispatcher.requests.all()
    await holder.stop()
    await stack.until(lambda: request.stream.attempt == 2)
    assert request.stream.deaths.counted == request.stream.failures == 0
    assert (await answer).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_worker_that_was_started_again_had_died_if_its_instance_is_gone(
    make_stack: StackFactory, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await mortals(make_stack, 2)
    for worker in stack.workers:
        worker.pause_after = 3
    answer = asyncio.create_task(ask(stack, "a"))
    await stack.until(lambda: any(w.submits for w in stack.workers))
    holder = next(w for w in stack.workers if w.submits)
    await stack.received(3)
    (request,) = stack.gateway.dispatcher.requests.all()
    for task in holder.tasks.values():
        task.cancel()
    holder.tasks.clear()  # it answers, and knows nothing of what it had
    if not is_known:
        await stack.pool.publish()
        stack.workers.remove(holder)
        await stack.pool.publish()
    next(worker for worker in stack.workers if worker is not holder).pause_after = None
    await stack.until(lambda: request.stream.attempt == 2)
    assert (request.stream.deaths.counted, request.stream.failures) == ((0, 1) if is_known else (1, 0))
    assert (await answer).json()["choices"][0]["text"] == TEXT
    await holder.stop()


async def test_a_submit_whose_answer_is_lost_is_asked_for(make_stack: StackFactory) -> None:
    stack = await make_stack(1, submit_timeout_s=0.5)
    worker = stack.workers[0]
    worker.script = say(TEXT)
    worker.pause_after = 0
    real = worker.begin

    def begin(submit: Submit) -> None:
        real(submit)
        raise asyncio.CancelledError  # taken, and never answered

    worker.begin = begin  # type: ignore[method-assign]
    answer = asyncio.create_task(ask(stack, "a"))
    await stack.until(lambda: worker.resends)
    worker.resume.set()
    assert (await answer).json()["choices"][0]["text"] == TEXT
    assert len(worker.submits) == 1


async def test_a_submit_that_never_came_to_the_worker_is_a_failed_attempt(make_stack: StackFactory) -> None:
    stack = await make_stack(2, submit_timeout_s=0.5)
    for worker in stack.workers:
        worker.script = say(TEXT)
    deaf, over = stack.workers[0], asyncio.Event()

    async def never(submit: Submit) -> Ack:
        deaf.submits.append(submit)
        await over.wait()
        return Ack()

    async def unknown(resend: Resend) -> Ack:
        raise NotFound("no such stream")

    for subscription, responder in zip(deaf.subscriptions, (never, unknown), strict=False):
        subscription.responder = responder  # type: ignore[attr-defined]
    answer = asyncio.create_task(ask(stack, "a"))
    await stack.until(lambda: deaf.submits)
    (request,) = stack.gateway.dispatcher.requests.all()
    assert (await answer).json()["choices"][0]["text"] == TEXT
    assert (request.stream.failures, request.stream.deaths.counted) == (1, 0)
    over.set()
