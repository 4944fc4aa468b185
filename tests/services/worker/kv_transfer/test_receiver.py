"""The decode side: who gets room for a request that another worker computes the prompt of, and who does not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.worker.device.completion import Completion
from services.worker.engine.base import Activation
from services.worker.engine.mock.mock_engine import MockEngine
from shared.errors import BadRequest, Conflict, Overloaded
from shared.messages.generation import TokenLogprobs
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.decode_side import calls_to, decoded, held, reservations_of, used_blocks
from tests.services.worker.kv_transfer.fakes import PROMPT, FakePrefill, clean
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import WAIT_S, eventually

# --- reservations --------------------------------------------------------------------------------


async def test_a_request_arrives_and_is_decoded_here(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    assert await used_blocks(alone) == 7
    await prefill.send_all(reserved, request)
    for _ in range(3):
        await prefill.begin(request)  # repeated, it is acknowledged, and nothing more
    await decoded(alone, request)
    await prefill.begin(request)
    with pytest.raises(Conflict, match="already"):
        await prefill.reserve(request)
    load = (await alone.stats()).load
    assert load.prefill_tokens_total == 0, "the other worker computed it"
    assert load.decode_tokens_total == 7
    first = alone.gateway.parts["r", 1][0]
    assert first.token_ids, "the gateway may not have the token of the other worker"
    assert first.offset == 0


async def test_a_continuation_arrives(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request(attempt=2, output=expected_tokens(3, PROMPT))
    await prefill.arrive(request)
    await prefill.begin(request)
    await decoded(alone, request)


async def test_the_first_tokens_logprobs_come_along(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    logprobs = TokenLogprobs(logprob=-0.5, top=((1, -0.5), (2, -0.75)))
    await prefill.begin(request, logprobs=logprobs)
    await alone.gateway.end_of("r")
    assert alone.gateway.parts["r", 1][0].logprobs == (logprobs,)


async def test_a_repeated_reservation_is_one(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    answers = await asyncio.gather(*(prefill.reserve(request) for _ in range(5)))
    answers.append(await prefill.reserve(request))
    assert len({a.ticket for a in answers}) == 1
    assert await used_blocks(alone) == 7
    other = await prefill.reserve(prefill.request("other"))
    assert other.ticket != answers[0].ticket
    await prefill.release(prefill.request("other"))
    await prefill.release(request)
    assert await used_blocks(alone) == 0, "it is free when the release is answered"
    again = await prefill.reserve(request)
    assert again.ticket != answers[0].ticket, "KV of the first one may still come"
    await prefill.release(request)


async def test_two_at_once_get_their_own_room(alone: LoneWorker, prefill: FakePrefill) -> None:
    requests = [prefill.request(f"r{i}", prompt=PROMPT[i : 20 + 3 * i]) for i in range(4)]
    reserved = await asyncio.gather(*(prefill.reserve(r) for r in requests))
    for answer, request in reversed(list(zip(reserved, requests, strict=True))):
        await prefill.send_all(answer, request)
    for request in requests:
        await prefill.begin(request)
    for request in requests:
        await decoded(alone, request)


async def test_what_cannot_be_decoded_here_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    limit = alone.worker.serving.scheduler.limit_tokens
    with pytest.raises(Conflict):
        await prefill.reserve(prefill.request(instance_id="another"))
    for prompt in ((), (5,) * limit):
        with pytest.raises(BadRequest):
            await prefill.reserve(prefill.request(prompt=prompt))
    for lease_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BadRequest):
            await prefill.reserve(prefill.request(), lease_s=lease_s)
    alone.worker.service.parts.inbox.admitting = False
    with pytest.raises(Conflict):
        await prefill.reserve(prefill.request())
    assert await used_blocks(alone) == 0
    assert len(alone.worker.service.parts.inbox.streams) == 0


async def test_no_seat_is_taken_twice(alone: LoneWorker, prefill: FakePrefill) -> None:
    seats = alone.worker.config.max_running_requests
    requests = [prefill.request(f"r{i}", prompt=PROMPT[:8]) for i in range(seats + 1)]
    for request in requests[:-1]:
        await prefill.reserve(request)
    with pytest.raises(Overloaded):
        await prefill.reserve(requests[-1])
    await prefill.reserve(requests[0])  # repeated, it needs no other seat
    await prefill.release(requests[0])
    await prefill.reserve(requests[-1])
    for request in requests:
        await prefill.release(request)


async def test_an_instance_that_drains_takes_no_more_and_waits_for_what_it_promised(
    alone: LoneWorker, prefill: FakePrefill
) -> None:
    promised, late = prefill.request("promised"), prefill.request("late")
    reserved = await prefill.reserve(promised)
    await alone.drain(alone.worker.serving.instance_id)
    await eventually(lambda: alone.worker.serving.state == "draining")
    with pytest.raises(Conflict):
        await prefill.reserve(late)
    await prefill.send_all(reserved, promised)
    await prefill.begin(promised)
    await decoded(alone, promised)
    await eventually(lambda: alone.worker.instance is None)


async def test_an_instance_does_not_go_while_a_reservation_is_on_its_way(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is kept on the engine's thread; whoever asks for it hears so a moment later."""
    engine, go = alone.worker.serving.engine, await held(alone)
    asked = calls_to(engine, monkeypatch)
    asking = asyncio.create_task(prefill.reserve(prefill.request()))
    await eventually(lambda: asked)
    instance = alone.worker.serving
    instance.drain()
    idle = asyncio.create_task(instance.idle())
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait({asking, idle}, return_when=asyncio.FIRST_COMPLETED)
    kept = asking.done() and asking.exception() is None
    await asyncio.wait({asking}, timeout=60)
    if asking.exception() is None:
        assert kept, "room was given in an instance that was found idle before"
        assert not idle.done()
        await prefill.release(prefill.request())
    await idle


@pytest.mark.parametrize("begun", [False, True], ids=["reserved", "begun"])
async def test_a_newer_attempt_takes_the_place_of_an_older_one(
    alone: LoneWorker, prefill: FakePrefill, begun: bool
) -> None:
    first, second = prefill.request(attempt=1, max_tokens=3000), prefill.request(attempt=2)
    reserved = await prefill.arrive(first)
    await alone.pause()
    if begun:
        await prefill.begin(first)
    newer = await prefill.reserve(second)
    assert set(reservations_of(alone)) == {("r", 2)}
    load = (await alone.stats()).load
    assert (load.running_requests, load.kv_blocks_used) == (0, 7), "nobody reads the older attempt"
    alone.resume()
    with pytest.raises(Conflict):
        await prefill.renew(first, reserved)
    if not begun:
        with pytest.raises(Conflict):
            await prefill.begin(first)
    await prefill.release(first)  # late
    await prefill.send_all(newer, second)
    await prefill.begin(second)
    await decoded(alone, second)
    assert all(p.finish_reason is None for p in alone.gateway.parts.get(("r", 1), []))


@pytest.mark.parametrize("newer", ["reserved", "begun", "submitted"])
async def test_an_older_attempt_that_comes_after_a_newer_one_is_refused(
    alone: LoneWorker, prefill: FakePrefill, newer: str
) -> None:
    first, second = prefill.request(attempt=1), prefill.request(attempt=2)
    if newer == "submitted":
        await alone.submit(second.instance_id, "r", attempt=2, prompt=PROMPT)
    else:
        await prefill.arrive(second)
    if newer == "begun":
        await prefill.begin(second)
    with pytest.raises(Conflict, match="attempt 2"):
        await prefill.reserve(first)
    assert ("r", 1) not in reservations_of(alone)
    if newer == "reserved":
        await prefill.begin(second)
    await decoded(alone, second)


async def test_a_newer_attempt_that_is_submitted_here_ends_the_reservation_of_an_older_one(
    alone: LoneWorker, prefill: FakePrefill
) -> None:
    first = prefill.request(attempt=1)
    reserved = await prefill.reserve(first)
    await alone.submit(first.instance_id, "r", attempt=2, prompt=PROMPT)
    await eventually(lambda: not reservations_of(alone))
    with pytest.raises(Conflict):
        await prefill.renew(first, reserved)
    await decoded(alone, prefill.request(attempt=2))


# --- many at once --------------------------------------------------------------------------------


async def test_reservations_that_come_during_one_step_are_all_made_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lone_worker(max_running_requests=64) as alone:
        prefill = FakePrefill(alone, await alone.serve())
        engine = alone.worker.serving.engine
        steps = StepGate(alone)
        await alone.submit(alone.worker.serving.instance_id, "other", max_tokens=900)
        steps.open(2)
        await eventually(lambda: steps.num_begun == 3)  # from the second on its steps are decode steps
        requests = [prefill.request(f"r{i}", prompt=PROMPT[: 10 + i]) for i in range(40)]
        asked = calls_to(engine, monkeypatch)
        asking = [asyncio.create_task(prefill.reserve(request)) for request in requests]
        await eventually(lambda: len(asked) == len(requests))
        assert not any(task.done() for task in asking)
        steps.open(1)  # and the next one is held again
        answers = await asyncio.gather(*asking)
        assert len({answer.ticket for answer in answers}) == len(requests)
        steps.open(10**6)
        await alone.gateway.cancel("w0", "other")
        for request in requests:
            await prefill.release(request)
        await clean(alone)
        await prefill.close()


class StepGate:
    """Lets the engine run a step only when it is opened for one."""

    def __init__(self, alone: LoneWorker) -> None:
        engine = alone.worker.serving.engine.loop.engine
        assert isinstance(engine, MockEngine)
        self.num_begun = 0
        self._steps = threading.Semaphore(0)
        real = engine.run_layers

        def run_layers(activation: Activation, first: int, last: int) -> Completion[None]:
            if first == 0:
                self.num_begun += 1
                assert self._steps.acquire(timeout=WAIT_S)
            return real(activation, first, last)

        engine.run_layers = run_layers  # type: ignore[method-assign]

    def open(self, steps: int) -> None:
        self._steps.release(steps)
