"""What a pair's source has at the target: handed over in order, and back in its queue whatever happens."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings

import pytest

from services.worker import link
from services.worker.core.live.machine import Lost
from services.worker.core.live.source_words import BeginBatch, KeepAlive
from services.worker.live import links
from shared.errors import BadRequest, BlitzError, DeadlineExceeded, NotFound, Overloaded, PayloadTooLarge
from shared.messages.codec import Message
from shared.messages.live import HandOver, Pull, Seal, Taken
from tests.services.worker.live.ends import Ends, SourceEnd, running_ends
from tests.services.worker.live.members import NUM_LAYERS, expected, request
from tests.wait_until import WAIT_S, eventually

NAMES = "abcd"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RETRY_S", 0.001)
    monkeypatch.setattr(link, "ASK_TIMEOUT_S", WAIT_S)  # a busy machine answers late, and is asked once
    monkeypatch.setattr(links, "LAST_WORD_S", 0.001)


async def _source(ends: Ends, names: str = NAMES) -> SourceEnd:
    """Requests wait, of as many tokens as a batch takes, and are handed over. The source gets none back."""
    before = ends.before

    async def never(message: Message) -> None:
        await before(message)
        if isinstance(message, Pull):
            await asyncio.Event().wait()

    ends.before = never
    source = SourceEnd(ends)
    await source.begin(*(request(name, 9) for name in names))
    return source


def _handed(ends: Ends) -> list[tuple[str, int]]:
    """(request, serial) as they were handed over."""
    return [(m.requests[0].request_id, m.serial) for m in ends.told(HandOver)]


def _is_of(message: Message, name: str) -> bool:
    return isinstance(message, HandOver) and message.requests[0].request_id == name


async def _all_computed_here(ends: Ends, *, without: str = "") -> None:
    await ends.source.idle()
    names = [name for name in NAMES if name not in without]
    assert {n: t for n, t in ends.source.tokens().items() if t} == {n: expected(request(n, 9)) for n in names}


async def test_everything_that_waits_is_handed_over_in_order_with_its_hidden_states() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.has_handed_over()
        assert _handed(ends) == [(name, number) for number, name in enumerate(NAMES)]
        assert [m.count for m in ends.told(Seal)] == [4]
        await ends.load(1)
        await ends.ran(4)
        await source.end()
        await _all_computed_here(ends)


async def test_short_prompts_go_together() -> None:
    async with running_ends() as ends:
        source = await _source(ends)
        await source.has_handed_over()
        assert [[r.request_id for r in m.requests] for m in ends.told(HandOver)] == [list(NAMES)]
        await source.end()
        await _all_computed_here(ends)


@pytest.mark.parametrize("error", [Overloaded("no room"), BadRequest("too long"), PayloadTooLarge("too much")])
async def test_what_the_target_refuses_waits_here_before_what_comes_behind_it(error: BlitzError) -> None:
    async with running_ends(batch_tokens=9) as ends:
        ends.refusals = {HandOver: [error]}
        source = await _source(ends)
        await source.has_handed_over()
        assert _handed(ends) == [("a", 0)]
        assert [m.count for m in ends.told(Seal)] == [0]
        assert ends.target.num_used == 0
        source.live.arrived()
        await eventually(lambda: len(_handed(ends)) == 5)
        assert _handed(ends)[1:] == [(name, number) for number, name in enumerate(NAMES)]
        await source.end()
        await _all_computed_here(ends)


async def test_handing_over_stops_when_the_pair_parts() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source, parts = SourceEnd(ends), asyncio.Event()

        async def hold(message: Message) -> None:
            if _is_of(message, "b"):
                await eventually(lambda: source.machine.is_ending)
            elif isinstance(message, Pull):
                await parts.wait()

        ends.before = hold
        await source.begin()
        await source.has_handed_over()
        await ends.source.on_engine(lambda loop: [loop.add(request(name, 9)) for name in NAMES])
        source.live.arrived()
        await eventually(lambda: len(_handed(ends)) == 2)
        parting = asyncio.create_task(source.part())
        await asyncio.sleep(0)
        parts.set()
        assert (await parting).outcome == "dissolved"
        assert _handed(ends) == [("a", 0), ("b", 1)]
        await _all_computed_here(ends)


async def test_a_question_whose_answer_was_lost_is_one_batch() -> None:
    async with running_ends(batch_tokens=9) as ends:
        ends.refusals = {HandOver: [DeadlineExceeded("no answer in time")]}
        source = await _source(ends)
        await source.has_handed_over()
        assert [name for name, _ in _handed(ends)] == ["a", *NAMES]
        for message in ends.told(HandOver):
            await ends.pair.on_hand_over(message)
        assert ends.target.num_used == 4 * 3
        await source.end()
        await _all_computed_here(ends)


@pytest.mark.parametrize("number", range(4))
async def test_a_target_that_is_lost_on_the_way_leaves_every_request_here(number: int) -> None:
    async with running_ends(batch_tokens=9) as ends:

        async def lose(message: Message) -> None:
            if _is_of(message, NAMES[number]):
                raise NotFound("no such pair")

        ends.before = lose
        source = await _source(ends)
        report = await source.over()
        assert (report.outcome, report.reason) == ("failed", "the target has no such pair: no such pair")
        await _all_computed_here(ends)


async def test_signs_of_life_that_end_before_the_first_are_cancelled_without_a_trace() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.has_handed_over()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for on in (False, True, False, True):
                source.live.carry_out[KeepAlive](KeepAlive(on))
            await asyncio.sleep(0)
            gc.collect()
        assert not warned
        await source.end()
        await _all_computed_here(ends)


@pytest.mark.parametrize("when", ["waits", "is asked about", "is there", "is there, and the scheduler knows"])
async def test_cancelled_a_request_is_handed_over_no_more_or_the_target_is_told(when: str) -> None:
    async with running_ends(batch_tokens=9) as ends:

        async def cancel(message: Message) -> None:
            if _is_of(message, {"waits": "a", "is asked about": "b"}.get(when, "")):
                await ends.source.on_engine(lambda loop: loop.scheduler.cancel("b", 1))

        ends.before = cancel
        source = await _source(ends)
        await source.has_handed_over()
        if when == "is there":
            source.live.cancel("b", 2)  # another attempt
            source.live.cancel("b", 1)
            await ends.source.on_engine(lambda loop: loop.scheduler.cancel("b", 1))
        if when == "is there, and the scheduler knows":
            await ends.source.on_engine(lambda loop: loop.scheduler.cancel("b", 1))
            source.live.cancel("b", 1)
        if when == "waits":
            assert [name for name, _ in _handed(ends)] == ["a", "c", "d"]
        else:
            await eventually(lambda: ends.cancelled)
        assert [(c.request_id, c.attempt) for c in ends.cancelled] == ([] if when == "waits" else [("b", 1)])
        await source.end()
        await _all_computed_here(ends, without="b")
        assert ends.source.finish_reasons()["b"] == "cancelled"


async def test_a_request_that_came_and_was_cancelled_inside_one_layer_ends_with_it_and_stays_here() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.has_handed_over()
        go_on = [threading.Event() for _ in range(NUM_LAYERS)]
        entered = [threading.Event() for _ in range(NUM_LAYERS)]

        def inside(layer: int) -> None:
            entered[layer].set()
            assert go_on[layer].wait(WAIT_S)

        alone = request("z", 6, 1)
        alone.alone_tokens = 1  # it is computed here
        ends.source.watched.inside = inside
        ends.source.engine.submit(alone)
        await eventually(entered[0].is_set)
        ends.source.engine.submit(request("e", 9))
        cancelled = ends.source.engine.cancel("e", 1)
        source.live.cancel("e", 1)
        source.live.arrived()
        go_on[0].set()
        assert await asyncio.wrap_future(cancelled)
        assert not any(event.is_set() for event in go_on[1:])
        for event in go_on:
            event.set()
        await source.end()
        await ends.source.idle()
        assert ends.source.finish_reasons()["e"] == "cancelled"
        assert [name for name, _ in _handed(ends)] == list(NAMES)


async def test_at_the_end_requests_wait_at_their_old_places_before_what_came_later() -> None:
    async with running_ends(batch_tokens=9) as ends:

        async def hold(message: Message) -> None:
            if _is_of(message, "c"):
                await asyncio.Event().wait()

        ends.before = hold
        source = await _source(ends)
        await eventually(lambda: len(_handed(ends)) == 3)
        await ends.source.on_engine(lambda loop: loop.add(request("e", 9)))
        ran_before = len(ends.source.watched.ran)
        await source.end()
        await ends.source.idle()
        assert ran_before == 0, "what waits is lent, and begun nowhere"
        order = [o.request_id for o in ends.source.outputs if o.offset == 0]
        assert order == [*NAMES, "e"]


async def test_what_the_target_may_own_ends_with_an_error_and_what_it_gave_back_does_not() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source, blocks = SourceEnd(ends), list[int]()

        async def before(message: Message) -> None:
            if _is_of(message, "d"):
                raise Overloaded("no room")
            if isinstance(message, Pull):  # there is no room for what it brings
                blocks.extend(await ends.source.on_engine(lambda loop: loop.scheduler.pool.allocate(63)))

        ends.before = before
        await source.begin(*(request(name, 9) for name in NAMES))
        await eventually(lambda: source.has_landed(BeginBatch, "pair-0", result=False))
        await source.live.on_taken(Taken(pair_id="pair", batch_ids=(), loaded=True))
        for _ in range(2):
            source.live.lose("who knows")
        await source.over()
        await ends.source.on_engine(lambda loop: loop.scheduler.pool.free(blocks))
        await ends.source.idle()
        assert {n for n, r in ends.source.finish_reasons().items() if r == "error"} == {"b", "c"}
        assert {n: t for n, t in ends.source.tokens().items() if t} == {n: expected(request(n, 9)) for n in "ad"}


async def test_the_end_can_come_twice() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.has_handed_over()
        await source.end()
        await source.end()
        await eventually(ends.pair.ended.is_set)
        assert sum(isinstance(event, Lost) for _, event in ends.pair.machine.log) == 1, "the target is told once"
        await _all_computed_here(ends)
