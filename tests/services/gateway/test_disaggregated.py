"""A prefill instance computes the first token, a decode instance goes on behind it: one stream to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from services.gateway.core.bookings import InstanceLoad
from services.gateway.core.stream import StreamState
from shared import subjects
from shared.errors import Unavailable
from shared.messages.generation import Cancel, DecodePlace, Submit, TokenBatch
from tests.processes import INCARNATION, process
from tests.services.gateway.cluster import FakeWorker, say
from tests.services.gateway.conftest import Stack, StackFactory

TEXT = "the quick brown fox"


class Disaggregated:
    """A gateway before a prefill worker and two decode workers, of which ``near`` is chosen first."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.prefill, self.near, self.far = stack.workers
        for worker in stack.workers:
            worker.script = say(TEXT)
        self.prefill.pause_after = 1
        self.tokens_heard: set[tuple[str, int]] = set()
        """(worker, offset) of the parts with tokens that have reached the gateway."""

    async def ask(self) -> str:
        options = {"model": "tiny", "prompt": "a", "max_tokens": 64, "stream": True}
        stream = await self.stack.openai.completions.create(**options)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def first_token(self) -> Submit:
        """Wait until the gateway has the newest request's first token."""
        await self.stack.until(lambda: self.prefill.submits)
        submit = self.prefill.submits[-1]
        await self.has(submit, len(submit.output_token_ids) + 1)
        return submit

    async def has(self, submit: Submit, num_tokens: int) -> None:
        await self.stack.until(lambda: len(self.stream(submit).output_token_ids) == num_tokens)

    async def hears(self, worker: FakeWorker, offset: int) -> None:
        """Wait until the gateway has judged that worker's part with tokens at that offset."""
        await self.stack.until(lambda: (worker.name, offset) in self.tokens_heard)

    def stream(self, submit: Submit) -> StreamState:
        return self.stack.gateway.dispatcher.requests[submit.request_id].stream

    def load(self, worker: FakeWorker) -> InstanceLoad:
        return self.stack.gateway.dispatcher.router.bookings.load_of(worker.instance_id)

    @property
    def failovers(self) -> int:
        return self.stack.gateway.metrics.of("tiny").failovers


def place(worker: FakeWorker) -> DecodePlace:
    return DecodePlace(worker_id=worker.name, incarnation=INCARNATION, instance_id=worker.instance_id)


async def roles(stack: Stack) -> None:
    stack.workers[0].role = "prefill"
    for worker in stack.workers[1:]:
        worker.role = "decode"
    await stack.pool.publish()
    routes = stack.gateway.routes.models["tiny"].routes
    await stack.until(lambda: stack.gateway.routes.models["tiny"].routes is not routes)


@pytest.fixture
async def served(make_stack: StackFactory) -> AsyncIterator[Disaggregated]:
    stack = await make_stack(3, stall_s=5.0, probe_s=2.0)
    await roles(stack)
    made = Disaggregated(stack)

    def listen(batch: TokenBatch) -> None:
        made.tokens_heard |= {(batch.worker_id, part.offset) for part in batch.parts if part.token_ids}

    # Behind the gateway's own subscription: what is heard here, it has judged.
    listening = await stack.broker.bus("listener").subscribe(subjects.tokens(process("gw-test")), TokenBatch, listen)
    yield made
    await listening.close()
    for worker in (made.prefill, made.near, made.far):
        worker.resume.set()


async def test_the_decode_worker_repeats_the_first_token_and_its_next_one_takes_the_stream_over(
    served: Disaggregated,
) -> None:
    served.near.pause_after = 1
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    assert submit.decode_at == place(served.near)
    assert (served.load(served.prefill).inflight_requests, served.load(served.near).promised_requests) == (1, 1)
    served.near.decode(submit, served.prefill)
    await served.hears(served.near, 0)
    assert served.stream(submit).worker.id == served.prefill.name
    assert len(served.stream(submit).output_token_ids) == 1
    served.near.pause_after = 3
    served.near.resume.set()
    assert await answer == TEXT
    assert served.near.submits == served.far.submits == []
    assert served.failovers == 0
    await served.stack.until(lambda: served.near.acks)
    assert served.prefill.acks == []
    assert served.load(served.prefill) == served.load(served.near) == InstanceLoad()
    assert served.stack.gateway.dispatcher.move_counts.take() == (), "that is the way of every request"


async def test_the_request_counts_at_the_decode_instance_once_it_is_there(served: Disaggregated) -> None:
    served.near.pause_after = 2
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    tokens = served.load(served.near).promised_tokens
    served.near.decode(submit, served.prefill)
    await served.has(submit, 2)
    assert served.stream(submit).worker.id == served.near.name
    assert served.load(served.prefill) == InstanceLoad()
    assert served.load(served.near) == InstanceLoad(inflight_requests=1, outstanding_tokens=tokens, accepted_requests=1)
    second = asyncio.create_task(served.ask())
    await served.stack.until(lambda: len(served.prefill.submits) == 2)
    assert served.prefill.submits[1].decode_at == place(served.far)
    served.near.resume.set()
    served.prefill.resume.set()
    assert [await answer, await second] == [TEXT, TEXT]


async def test_a_first_token_that_was_lost_comes_from_the_decode_worker(served: Disaggregated) -> None:
    served.prefill.pause_after = 0
    served.near.pause_after = 1
    answer = asyncio.create_task(served.ask())
    await served.stack.until(lambda: served.prefill.submits)
    submit = served.prefill.submits[0]
    key = (submit.request_id, submit.attempt)
    await served.stack.until(lambda: key in served.prefill.sent)
    first = served.prefill.part(submit, 0, list(TEXT[:1].encode()))
    served.prefill.sent[key].append(first)
    served.near.decode(submit, served.prefill)
    await served.has(submit, 1)
    assert served.stream(submit).worker.id == served.near.name
    # The prefill worker's was only late.
    await served.prefill.send(submit.gateway, first)
    await served.hears(served.prefill, 0)
    assert served.stream(submit).worker.id == served.near.name
    assert served.load(served.near).unstarted_requests == 0
    served.near.resume.set()
    assert await answer == TEXT


async def test_a_cancel_before_the_gateway_knows_reaches_the_decode_worker_through_the_prefill_worker(
    served: Disaggregated,
) -> None:
    served.near.pause_after = 1
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    served.near.decode(submit, served.prefill)
    await served.hears(served.near, 0)
    answer.cancel()
    await served.stack.until(lambda: served.near.cancels)
    assert served.prefill.cancels == served.near.cancels
    assert served.near.cancels == [Cancel(request_id=submit.request_id, attempt=submit.attempt)]
    assert served.load(served.prefill) == served.load(served.near) == InstanceLoad()


async def test_a_question_before_the_gateway_knows_does_too_and_its_answer_tells(served: Disaggregated) -> None:
    served.near.pause_after = 1
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    served.near.decode(submit, served.prefill)
    await served.hears(served.near, 0)
    dispatcher = served.stack.gateway.dispatcher
    dispatcher.silence_watch.ask(dispatcher.requests[submit.request_id])
    # Nothing new: an empty part at the next offset, but from another worker.
    await served.stack.until(lambda: served.stream(submit).worker.id == served.near.name)
    assert (len(served.prefill.resends), len(served.near.resends)) == (1, 1)
    assert served.load(served.near).inflight_requests == 1
    answer.cancel()
    await served.stack.until(lambda: served.near.cancels)
    assert served.prefill.cancels == []


async def test_when_the_decode_worker_dies_the_request_continues_by_a_prefill_and_another_decode_instance(
    served: Disaggregated,
) -> None:
    served.near.pause_after = 5
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    served.near.decode(submit, served.prefill)
    await served.has(submit, 5)
    await served.near.stop()
    await served.stack.until(lambda: len(served.prefill.submits) == 2)
    again = await served.first_token()
    assert (again.request_id, again.attempt) == (submit.request_id, submit.attempt + 1)
    assert bytes(again.output_token_ids).decode() == TEXT[:5]
    assert again.decode_at == place(served.far)
    assert served.stream(submit).avoid == {served.near.instance_id}
    served.far.decode(again, served.prefill)
    assert await answer == TEXT
    assert served.failovers == 1
    assert served.load(served.near).inflight_requests == served.load(served.near).promised_requests == 0


async def test_a_decode_worker_that_dies_before_the_gateway_knows_is_avoided_too(make_stack: StackFactory) -> None:
    stack = await make_stack(3)
    await roles(stack)
    served = Disaggregated(stack)
    served.near.pause_after = 0
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    served.near.decode(submit, served.prefill)
    await served.near.stop()
    # The prefill worker, asked for more, says that nobody answers for it.
    await stack.until(lambda: len(served.prefill.submits) == 2)
    assert served.prefill.submits[1].decode_at == place(served.far)
    assert served.prefill.submits[1].attempt == submit.attempt + 1
    served.prefill.resume.set()
    assert await answer == TEXT
    assert served.failovers == 1


async def test_the_loss_of_the_decode_instance_of_a_request_still_at_the_prefill_worker_is_not_the_gateways_business(
    served: Disaggregated,
) -> None:
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    served.stack.workers.remove(served.near)
    await served.stack.pool.publish()
    view = served.stack.gateway.routes
    await served.stack.until(lambda: served.near.instance_id not in view.models["tiny"].routes)
    await served.near.stop()
    served.stack.gateway.dispatcher.router.prune(now_s=0.0)
    assert served.load(served.near).promised_requests == 1
    served.prefill.resume.set()
    assert await answer == TEXT
    assert served.prefill.submits == [submit]
    assert served.prefill.resends == served.near.resends == []
    assert served.failovers == 0
    assert served.load(served.near) == InstanceLoad()


async def test_requests_at_a_draining_decode_instance_finish_there_and_new_ones_go_elsewhere(
    served: Disaggregated,
) -> None:
    served.near.pause_after = 4
    answer = asyncio.create_task(served.ask())
    submit = await served.first_token()
    served.near.decode(submit, served.prefill)
    await served.has(submit, 4)
    served.near.state = "draining"
    await served.stack.pool.publish()
    view = served.stack.gateway.routes
    await served.stack.until(lambda: view.models["tiny"].routes[served.near.instance_id].state == "draining")
    served.prefill.pause_after = None
    assert await served.ask() == TEXT
    assert served.prefill.submits[-1].decode_at == place(served.far)
    # Its route may go before its last request does: its worker is asked, and answers.
    served.stack.workers.remove(served.near)
    await served.stack.pool.publish()
    await served.stack.until(lambda: served.near.resends)
    served.near.resume.set()
    assert await answer == TEXT
    assert served.failovers == 0
    await served.near.stop()


async def test_without_a_decode_instance_the_prefill_instance_is_told_of_none(served: Disaggregated) -> None:
    served.near.state = served.far.state = "draining"
    await served.stack.pool.publish()
    view = served.stack.gateway.routes
    await served.stack.until(lambda: view.models["tiny"].routes[served.far.instance_id].state == "draining")
    served.prefill.pause_after = None
    assert await served.ask() == TEXT
    assert served.prefill.submits[0].decode_at is None


async def test_decode_instances_alone_take_no_requests(make_stack: StackFactory) -> None:
    stack = await make_stack(3, queue_timeout_s=0.2)
    stack.workers[0].state = "draining"
    await roles(stack)
    with pytest.raises(openai.APIStatusError, match="took the request") as caught:
        await Disaggregated(stack).ask()
    assert caught.value.status_code == 503
    assert [worker.submits for worker in stack.workers] == [[], [], []]


async def test_a_refused_request_leaves_no_promise_behind(make_stack: StackFactory) -> None:
    stack = await make_stack(3, max_attempts=1)
    await roles(stack)
    served = Disaggregated(stack)
    served.prefill.refuse_with = Unavailable("draining")
    with pytest.raises(openai.APIStatusError):
        await served.ask()
    assert served.prefill.submits[0].decode_at == place(served.near)
    assert served.load(served.near) == InstanceLoad()
