"""While two instances cooperate, requests go over from one to the other: their streams follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.gateway.core.bookings import InstanceLoad
from services.gateway.core.stream import StreamState
from shared import subjects
from shared.errors import NotFound, Unavailable
from shared.messages.common import Ack
from shared.messages.generation import Resend, Submit
from tests.processes import process
from tests.services.gateway.cluster import FakeWorker, say
from tests.services.gateway.conftest import Stack, StackFactory

TEXT = "the quick brown fox"


class Pair:
    """A gateway before a source and a target; ``w1``, the target, is live: it has a route and gets nothing by it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.source, self.target = stack.workers
        for worker in stack.workers:
            worker.script = say(TEXT)

    async def ask(self) -> str:
        options = {"model": "tiny", "prompt": "a", "max_tokens": 64, "stream": True}
        stream = await self.stack.openai.completions.create(**options)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def submitted(self, count: int = 1) -> Submit:
        await self.stack.until(lambda: len(self.source.submits) >= count)
        return self.source.submits[-1]

    def stream(self, submit: Submit) -> StreamState:
        return self.stack.gateway.dispatcher.requests[submit.request_id].stream

    async def has(self, submit: Submit, num_tokens: int) -> None:
        """Wait until the gateway has so many tokens."""
        await self.stack.until(lambda: len(self.stream(submit).output_token_ids) == num_tokens)

    async def follows(self, submit: Submit) -> None:
        """Wait until the gateway takes the target for the request's worker."""
        await self.stack.until(lambda: self.stream(submit).worker.id == self.target.name)

    def load(self, worker: FakeWorker) -> InstanceLoad:
        return self.stack.gateway.dispatcher.router.bookings.load_of(worker.instance_id)

    @property
    def failovers(self) -> int:
        return self.stack.gateway.metrics.of("tiny").failovers


@pytest.fixture
async def pair(make_stack: StackFactory) -> AsyncIterator[Pair]:
    # Who is asked is up to the test: it takes less time than a silence of which the gateway asks.
    stack = await make_stack(2, probe_s=2.0)
    made = Pair(stack)
    made.target.state = "live"
    await stack.pool.publish()
    view = stack.gateway.routes
    await stack.until(lambda: view.models["tiny"].routes["w1-i"].state == "live")
    yield made
    for worker in stack.workers:
        worker.resume.set()


async def test_the_new_worker_says_so_before_its_first_token_and_the_stream_goes_on(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    assert (pair.load(pair.source).unstarted_requests, pair.load(pair.target).unstarted_requests) == (1, 0)
    await pair.target.take_over(submit, pair.source)
    await pair.follows(submit)
    assert pair.stream(submit).instance_id == pair.target.instance_id
    assert (pair.load(pair.source).inflight_requests, pair.load(pair.target).inflight_requests) == (0, 1)
    assert (pair.load(pair.source).unstarted_requests, pair.load(pair.target).unstarted_requests) == (0, 1)
    pair.target.resume.set()
    assert await answer == TEXT
    assert pair.failovers == 0
    assert pair.target.submits == []
    await pair.stack.until(lambda: pair.target.acks)
    assert pair.source.acks == []
    assert pair.load(pair.target) == pair.load(pair.source) == InstanceLoad()
    (moved,) = pair.stack.gateway.dispatcher.move_counts.take()
    assert (moved.model, moved.source, moved.target, moved.requests) == ("tiny", "w0", "w1", 1)


async def test_the_stream_follows_in_its_middle_and_late_tokens_do_not_take_it_back(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 4
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    await pair.has(submit, 4)
    await pair.target.take_over(submit, pair.source)
    await pair.has(submit, 8)
    late = [pair.source.part(submit, 0, list(TEXT[:4].encode())), pair.source.part(submit, 8, [])]
    await pair.source.send(submit.gateway, *late)
    # A part of the target's behind them: by then they have been judged.
    await pair.target.send(submit.gateway, pair.target.part(submit, 8, list(TEXT[8:9].encode())))
    await pair.has(submit, 9)
    assert pair.stream(submit).worker.id == pair.target.name
    assert pair.load(pair.target).inflight_requests == 1
    pair.target.resume.set()
    assert await answer == TEXT


async def test_when_its_first_word_is_lost_the_new_worker_is_asked_for_it(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    await pair.target.take_over(submit, pair.source, silently=True)
    key = (submit.request_id, submit.attempt)
    await pair.stack.until(lambda: key in pair.target.sent)
    sent = [pair.target.part(submit, offset, [ord(TEXT[offset])]) for offset in range(2)]
    pair.target.sent[key].extend(sent)
    await pair.target.send(submit.gateway, sent[1])
    await pair.has(submit, 2)
    assert (len(pair.target.resends), pair.source.resends) == (1, [])
    assert pair.stream(submit).worker.id == pair.target.name
    pair.target.resume.set()
    assert await answer == TEXT


async def test_the_old_instance_has_room_for_the_next_request(make_stack: StackFactory) -> None:
    stack = await make_stack(2)
    pair = Pair(stack)
    pair.target.state = "live"
    pair.source.max_running = 1
    await stack.pool.publish()
    await stack.until(lambda: stack.gateway.routes.models["tiny"].routes["w1-i"].state == "live")
    pair.source.pause_after = pair.target.pause_after = 0
    answers = [asyncio.create_task(pair.ask()) for _ in range(2)]
    first = await pair.submitted()
    await stack.until(lambda: stack.gateway.dispatcher.router.queued("tiny")[0] == 1)
    await pair.target.take_over(first, pair.source)
    second = await pair.submitted(2)
    assert second.request_id != first.request_id
    for worker in stack.workers:
        worker.resume.set()
    assert await asyncio.gather(*answers) == [TEXT] * 2


async def test_a_cancel_goes_to_the_worker_that_has_the_request(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    await pair.target.take_over(submit, pair.source)
    await pair.follows(submit)
    answer.cancel()
    await pair.stack.until(lambda: pair.target.cancels)
    assert (pair.target.cancels[0].request_id, pair.target.cancels[0].attempt) == (submit.request_id, submit.attempt)
    assert pair.source.cancels == []
    assert pair.load(pair.target) == InstanceLoad()


async def test_a_worker_that_took_over_what_is_cancelled_is_told_at_once(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    answer.cancel()
    await pair.stack.until(lambda: pair.source.cancels)
    # Its own cancel may have crossed with the take-over.
    await pair.target.take_over(submit, pair.source)
    await pair.stack.until(lambda: pair.target.cancels)


async def test_when_the_new_worker_dies_the_request_continues_from_its_last_token(pair: Pair) -> None:
    pair.source.pause_after = 2
    pair.target.pause_after = 5
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    await pair.has(submit, 2)
    await pair.target.take_over(submit, pair.source)
    await pair.has(submit, 7)
    pair.source.pause_after = None
    await pair.target.stop()
    assert await answer == TEXT
    again = pair.source.submits[-1]
    assert (again.request_id, again.attempt) == (submit.request_id, submit.attempt + 1)
    assert bytes(again.output_token_ids).decode() == TEXT[:7]
    assert pair.failovers == 1
    assert pair.load(pair.target).inflight_requests == 0


async def test_the_death_of_the_old_worker_is_none_of_the_streams_business(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    await pair.target.take_over(submit, pair.source)
    await pair.follows(submit)
    pair.stack.workers.remove(pair.source)
    await pair.stack.pool.publish()
    await pair.source.stop()
    # More than the patience with a silent worker: the target is asked, and lives.
    await pair.stack.until(lambda: pair.target.resends)
    pair.target.resume.set()
    assert await answer == TEXT
    assert pair.failovers == 0


async def test_the_loss_of_the_new_instances_route_asks_the_new_worker(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    await pair.target.take_over(submit, pair.source)
    await pair.follows(submit)
    pair.stack.workers.remove(pair.target)
    await pair.stack.pool.publish()
    await pair.stack.until(lambda: pair.target.resends)
    assert pair.source.resends == []
    pair.target.resume.set()
    assert await answer == TEXT
    await pair.target.stop()


async def test_a_worker_that_forgot_what_it_gave_away_while_it_was_asked_breaks_nothing(pair: Pair) -> None:
    pair.source.pause_after = pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    submit = await pair.submitted()
    asked, reply = asyncio.Event(), asyncio.Event()

    async def slow(resend: Resend) -> Ack:
        asked.set()
        await reply.wait()
        raise NotFound("no such stream")

    pair.source.on_resend = slow  # type: ignore[method-assign]
    await pair.source.subscriptions[1].close()
    await pair.source.bus.respond(subjects.worker_resend(process(pair.source.name)), Resend, slow)
    dispatcher = pair.stack.gateway.dispatcher
    dispatcher.silence_watch.ask(dispatcher.requests[submit.request_id])
    await asked.wait()
    await pair.target.take_over(submit, pair.source)
    await pair.follows(submit)
    reply.set()
    await pair.stack.until(lambda: not dispatcher.requests[submit.request_id].asking)
    pair.target.resume.set()
    assert await answer == TEXT
    assert pair.failovers == 0


async def test_a_submit_whose_answer_is_lost_is_accepted_if_another_worker_took_over(pair: Pair) -> None:
    received: list[Submit] = []
    reply = asyncio.Event()

    async def no_answer(submit: Submit) -> Ack:
        pair.source.sent[submit.request_id, submit.attempt] = []
        pair.source.tasks[submit.request_id, submit.attempt] = asyncio.create_task(reply.wait())  # type: ignore[arg-type]
        received.append(submit)
        await reply.wait()
        raise Unavailable("gone by now")

    await pair.source.subscriptions[0].close()
    await pair.source.bus.respond(subjects.worker_submit(process(pair.source.name)), Submit, no_answer)
    pair.target.pause_after = 0
    answer = asyncio.create_task(pair.ask())
    await pair.stack.until(lambda: received)
    await pair.target.take_over(received[0], pair.source)
    await pair.follows(received[0])
    assert not pair.stack.gateway.dispatcher.requests[received[0].request_id].submitting
    reply.set()
    # The refusal has arrived when the gateway has nothing under way any more.
    await pair.stack.until(lambda: not pair.stack.gateway.dispatcher.tasks)
    pair.target.resume.set()
    assert await answer == TEXT
    assert pair.failovers == 0
