"""What a pair's source has at the target: handed over in order, and back in its queue whatever happens."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.worker import link
from services.worker.link import LinkLost
from services.worker.live import links
from shared.errors import BadRequest, BlitzError, DeadlineExceeded, NotFound, Overloaded, PayloadTooLarge
from shared.messages.codec import Message
from shared.messages.common import ErrorInfo
from shared.messages.live import HandOver
from tests.services.worker.live.ends import Ends, SourceEnd, running_ends
from tests.services.worker.live.members import NUM_LAYERS, expected, request
from tests.wait_until import WAIT_S, eventually

NAMES = "abcd"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RETRY_S", 0.001)
    monkeypatch.setattr(link, "ASK_TIMEOUT_S", WAIT_S)  # a busy machine answers late, and is asked once
    monkeypatch.setattr(links, "LAST_WORD_S", 0.001)


async def _source(ends: Ends) -> SourceEnd:
    """Four requests wait, of as many tokens as a batch takes."""
    await ends.answer()
    source = SourceEnd(ends)
    await source.begin(*(request(name, 9) for name in NAMES))
    return source


def _handed(ends: Ends) -> list[tuple[str, int]]:
    """(request, serial) as they were handed over."""
    return [(m.requests[0].request_id, m.serial) for m in ends.asked if isinstance(m, HandOver)]


async def _all_computed_here(ends: Ends, source: SourceEnd, *, without: str = "") -> None:
    await ends.source.idle()
    names = [name for name in NAMES if name not in without]
    assert ends.source.tokens() == {name: expected(request(name, 9)) for name in names}


async def test_everything_that_waits_is_handed_over_in_order_with_its_hidden_states() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.hand_over()
        assert _handed(ends) == [(name, number) for number, name in enumerate(NAMES)]
        assert source.handed.queue.num_handed == 4
        assert [b.sequences[0].request_id for b in source.handed.queue.handed.values()] == list(NAMES)
        await ends.load(1)
        await ends.ran(4)
        assert all(source.handed.queue.holds(name, 1) for name in NAMES)
        assert not source.handed.queue.holds("a", 2)
        await source.end()
        await _all_computed_here(ends, source)


async def test_short_prompts_go_together() -> None:
    async with running_ends() as ends:
        await ends.answer()
        source = SourceEnd(ends)
        await source.begin(*(request(name, 9) for name in NAMES))
        await source.hand_over()
        assert [[r.request_id for r in m.requests] for m in ends.asked if isinstance(m, HandOver)] == [list(NAMES)]
        await source.end()
        await _all_computed_here(ends, source)


@pytest.mark.parametrize("error", [Overloaded("no room"), BadRequest("too long"), PayloadTooLarge("too much")])
async def test_what_the_target_refuses_waits_here_before_what_comes_behind_it(error: BlitzError) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        ends.refusals = [error]
        await source.hand_over()
        assert _handed(ends) == [("a", 0)]
        assert (source.handed.queue.handed, source.handed.queue.num_handed) == ({}, 0)
        assert [b.sequences[0].request_id for b in source.handed.queue.backlog] == list(NAMES)
        assert ends.target.num_used == 0
        await source.hand_over()
        assert _handed(ends)[1:] == [(name, number) for number, name in enumerate(NAMES)]
        await source.end()
        await _all_computed_here(ends, source)


async def test_handing_over_stops_when_it_is_told_to() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.handed.hand_over(
            ends.source_tensors, behind_seal=True, until=lambda: source.handed.queue.num_handed == 2
        )
        assert _handed(ends) == [("a", 0), ("b", 1)]
        assert len(source.handed.queue.backlog) == 2
        await source.end()
        await _all_computed_here(ends, source)


async def test_a_question_whose_answer_was_lost_is_one_batch() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        ends.refusals = [DeadlineExceeded("no answer in time")]
        await source.hand_over()
        assert [name for name, _ in _handed(ends)] == ["a", *NAMES]
        for message in [m for m in ends.asked if isinstance(m, HandOver)]:
            await ends.pair.on_hand_over(message)
        assert ends.target.num_used == 4 * 3
        await source.end()


@pytest.mark.parametrize("number", range(4))
async def test_a_target_that_is_lost_on_the_way_leaves_every_request_here(number: int) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.handed.hand_over(
            ends.source_tensors, behind_seal=False, until=lambda: source.handed.queue.num_handed == number
        )
        ends.refusals = [NotFound("no such pair")]
        with pytest.raises(LinkLost):
            await source.hand_over()
        await source.end()
        await _all_computed_here(ends, source)


@pytest.mark.parametrize("when", ["waits", "is asked about", "is there"])
async def test_cancelled_a_request_is_handed_over_no_more_or_the_target_is_told(when: str) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        if when == "is there":
            await source.hand_over()

        async def cancel(message: Message | None = None) -> None:
            if not isinstance(message, HandOver) or message.requests[0].request_id == "b":
                await ends.source.on_engine(lambda loop: loop.scheduler.cancel("b", 1))

        if when == "is asked about":
            ends.before = cancel
        else:
            await cancel()
        if when != "is there":
            await source.hand_over()
        alive = asyncio.create_task(source.link.keep_alive())
        if when == "is asked about":
            await eventually(lambda: [c.request_id for c in ends.cancelled] == ["b"])
        if when == "waits":
            assert [name for name, _ in _handed(ends)] == ["a", "c", "d"]
        alive.cancel()
        await asyncio.wait({alive})
        await source.end()
        await ends.source.idle()
        assert {n: r for n, r in ends.source.finish_reasons().items() if n == "b"} == {"b": "cancelled"}
        assert {n: t for n, t in ends.source.tokens().items() if t} == {
            name: expected(request(name, 9)) for name in NAMES if name != "b"
        }


async def test_of_a_request_that_came_and_was_cancelled_inside_one_layer_the_target_is_told() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
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
        ends.source.engine.cancel("e", 1)
        source.handed.cancelled("e", 1)
        lent = asyncio.create_task(source.handed.lend())
        await asyncio.sleep(0)
        go_on[0].set()
        await lent
        await source.hand_over()
        assert [name for name, _ in _handed(ends)] == [*NAMES, "e"]
        alive = asyncio.create_task(source.link.keep_alive())
        for event in go_on:
            event.set()
        await eventually(lambda: [c.request_id for c in ends.cancelled] == ["e"])
        alive.cancel()
        await asyncio.wait({alive})
        await source.end()
        await ends.source.idle()
        assert ends.source.finish_reasons()["e"] == "cancelled"


async def test_at_the_end_requests_wait_at_their_old_places_before_what_came_later() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.handed.hand_over(
            ends.source_tensors, behind_seal=False, until=lambda: source.handed.queue.num_handed == 2
        )
        await source.member.on_engine(lambda loop: loop.add(request("e", 9)))
        ran_before = len(ends.source.watched.ran)
        await source.end()
        await ends.source.idle()
        assert ran_before == 0, "what waits is lent, and begun nowhere"
        order = [o.request_id for o in ends.source.outputs if o.offset == 0]
        assert order == [*NAMES, "e"]


async def test_what_the_target_may_own_ends_with_an_error_and_what_it_gave_back_does_not() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.handed.hand_over(
            ends.source_tensors, behind_seal=False, until=lambda: source.handed.queue.num_handed == 3
        )
        first = next(iter(source.handed.queue.handed))
        source.handed.queue.pulled.add(first)
        doubt = ErrorInfo(code="unavailable", message="who knows")
        await source.handed.end(doubt)
        await source.handed.end(doubt)
        await ends.source.idle()
        assert {n for n, r in ends.source.finish_reasons().items() if r == "error"} == {"b", "c"}
        assert {n: t for n, t in ends.source.tokens().items() if t} == {n: expected(request(n, 9)) for n in "ad"}


async def test_the_end_can_come_twice() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends)
        await source.hand_over()
        await source.end()
        await source.handed.end()
        await _all_computed_here(ends, source)
