"""The source's line to the target: what is asked again, and when the target is given up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from services.worker import link
from services.worker.link import LinkLost
from services.worker.live import links
from services.worker.live.links import LinkToTarget
from services.worker.live.tensors import PairTensors
from shared import subjects
from shared.errors import BlitzError, Conflict, Internal, NotFound, Overloaded
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.messages.live import LiveOffer, PairEnded, Seal, Settle
from tests.processes import process
from tests.services.worker.live.members import assignment
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually

SEAL = Seal(pair_id="pair", count=3)
SHORT_S, NEVER_S = 0.05, 1e6


class Line:
    """A link at w0, and a bus where w1 may answer."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.target = self.broker.bus("w1")
        self.source = self.broker.bus("w0")
        self.asked: list[object] = []
        self.answers: list[BlitzError | Awaitable[object] | None] = []
        """What the next questions get: an error, an answer once this is done, or an answer. Then only answers."""

    def link(self, silence_s: float = NEVER_S) -> LinkToTarget:
        return LinkToTarget(self.source, process("w1"), "pair", silence_s=silence_s)

    async def respond(self, *operations: str) -> None:
        kinds: dict[str, type[Message]] = {"seal": Seal, "settle": Settle, "offer": LiveOffer}
        for operation in operations:
            await self.target.respond(subjects.worker_live(process("w1"), operation), kinds[operation], self._answer)

    async def _answer(self, message: object) -> Ack:
        self.asked.append(message)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, BlitzError):
            raise answer
        if answer is not None:
            await answer
        return Ack()


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Short times, but nobody is given up for them."""

    def change(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(link if hasattr(link, name) else links, name, value)

    change(ASK_TIMEOUT_S=SHORT_S, RETRY_S=0.001, KEEP_ALIVE_S=SHORT_S, GONE_S=NEVER_S)
    return change


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_a_question_is_asked_until_it_is_answered(line: Line) -> None:
    await line.respond("seal")
    line.answers = [never(), never()]
    assert await line.link().ask_pair("seal", SEAL, Ack) == Ack()
    assert line.asked == [SEAL] * 3


async def test_a_target_that_comes_back_in_time_is_not_given_up(line: Line) -> None:
    asking = asyncio.create_task(line.link().ask_pair("seal", SEAL, Ack))
    await asyncio.sleep(SHORT_S)
    assert not asking.done()
    await line.respond("seal")
    assert await asking == Ack()


async def test_a_question_may_take_long_on_purpose(line: Line) -> None:
    await line.respond("seal")
    line.answers = [asyncio.sleep(3 * SHORT_S)]
    await line.link().ask_pair("seal", SEAL, Ack, wait_s=100.0)
    assert line.asked == [SEAL], "asked once"


async def test_nobody_answers_to_the_targets_name_for_too_long(line: Line, quick: Callable[..., None]) -> None:
    quick(GONE_S=SHORT_S)
    with pytest.raises(LinkLost, match="nobody answers"):
        await line.link().ask_pair("seal", SEAL, Ack)


async def test_a_cut_connection_and_nobody_there_needs_no_patience(line: Line) -> None:
    pair, tensors = line.link(), SimpleNamespace(peer_is_lost=False)
    pair.watch(cast(PairTensors, tensors))
    asking = asyncio.create_task(pair.ask_pair("seal", SEAL, Ack))
    await asyncio.sleep(SHORT_S)
    assert not asking.done(), "its line is there: it may only be slow"
    tensors.peer_is_lost = True
    with pytest.raises(LinkLost):
        await asyncio.wait_for(asking, 10)


async def test_a_target_that_is_there_and_says_nothing_is_given_up(line: Line) -> None:
    await line.respond("seal")
    line.answers = [never() for _ in range(1000)]
    with pytest.raises(LinkLost, match=r"silent for 1 s"):
        await line.link(silence_s=1.0).ask_pair("seal", SEAL, Ack)
    assert len(line.asked) > 1


async def test_an_outage_of_our_own_bus_is_not_the_targets_silence(line: Line, quick: Callable[..., None]) -> None:
    quick(GONE_S=1.0)
    await line.respond("seal")
    line.broker.disconnect()
    asking = asyncio.create_task(line.link(silence_s=1.0).ask_pair("seal", SEAL, Ack))
    await asyncio.sleep(1.2)
    assert not asking.done()
    line.broker.reconnect()
    assert await asyncio.wait_for(asking, 10) == Ack()


@pytest.mark.parametrize("error", [Conflict("another pair"), NotFound("no pair")])
async def test_a_target_without_such_a_pair_is_lost(line: Line, error: BlitzError) -> None:
    await line.respond("seal")
    line.answers = [error]
    with pytest.raises(LinkLost, match=str(error)):
        await line.link().ask_pair("seal", SEAL, Ack)


@pytest.mark.parametrize("error", [Overloaded("no room"), Internal("broken")])
async def test_other_refusals_reach_the_caller(line: Line, error: BlitzError) -> None:
    await line.respond("seal")
    line.answers = [error]
    with pytest.raises(type(error)):
        await line.link().ask_pair("seal", SEAL, Ack)
    assert line.asked == [SEAL]


async def test_who_waits_is_told_that_the_pair_is_lost(line: Line) -> None:
    await line.respond("seal")
    line.answers = [never()]
    pair, work = line.link(), never()
    waiting = [
        asyncio.create_task(pair.until(work)),
        asyncio.create_task(pair.ask_pair("seal", SEAL, Ack, wait_s=100.0)),
        asyncio.create_task(pair.keep_alive()),
    ]
    await eventually(lambda: line.asked)
    pair.lose("the target ended it")
    pair.lose("once more")
    for task in waiting:
        with pytest.raises(LinkLost, match="the target ended it"):
            await asyncio.wait_for(task, 10)
    await asyncio.sleep(0)
    assert work.cancelled()
    with pytest.raises(LinkLost):
        await pair.ask_pair("seal", SEAL, Ack)


async def test_what_is_waited_for_comes_through(line: Line) -> None:
    pair = line.link()
    assert await pair.until(asyncio.sleep(0, "result")) == "result"

    async def fails() -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        await pair.until(fails())
    waiting = asyncio.create_task(pair.until(work := never()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert work.cancelled()


# --- signs of life -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def alive(pair: LinkToTarget) -> AsyncIterator[None]:
    task = asyncio.create_task(pair.keep_alive())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def settled(line: Line) -> list[tuple[str, ...]]:
    return [m.claim_ids for m in line.asked if isinstance(m, Settle)]


async def test_claims_are_settled_once_and_soon(line: Line, quick: Callable[..., None]) -> None:
    quick(KEEP_ALIVE_S=NEVER_S)
    await line.respond("settle")
    pair = line.link()
    async with alive(pair):
        pair.settle("c1")
        pair.settle("c2")
        await eventually(lambda: settled(line) == [("c1", "c2")])
        pair.settle("c3")
        await eventually(lambda: settled(line) == [("c1", "c2"), ("c3",)])


async def test_what_was_not_acknowledged_is_settled_again(line: Line, quick: Callable[..., None]) -> None:
    quick(KEEP_ALIVE_S=NEVER_S)
    await line.respond("settle")
    line.answers = [first := never()]
    pair = line.link()
    async with alive(pair):
        pair.settle("c1")
        await eventually(lambda: settled(line) == [("c1",)])
        pair.settle("c2")  # while the answer to the first is still out
        await eventually(lambda: settled(line) == [("c1",), ("c1",), ("c2",)])
    assert not first.done()


async def test_a_source_with_nothing_to_say_gives_signs_of_life(line: Line, quick: Callable[..., None]) -> None:
    quick(KEEP_ALIVE_S=0.001)
    await line.respond("settle")
    async with alive(line.link()):
        await eventually(lambda: len(settled(line)) >= 3)
    assert set(settled(line)) == {()}


async def test_a_target_that_is_gone_ends_the_signs_of_life(line: Line, quick: Callable[..., None]) -> None:
    quick(GONE_S=SHORT_S)
    with pytest.raises(LinkLost):
        await asyncio.wait_for(line.link().keep_alive(), 10)


async def test_cancels_are_passed_on_before_claims_are_settled(line: Line, quick: Callable[..., None]) -> None:
    quick(KEEP_ALIVE_S=NEVER_S)
    await line.respond("settle")
    await line.target.subscribe(subjects.worker_cancel(process("w1")), Cancel, line.asked.append)
    pair = line.link()
    async with alive(pair):
        pair.settle("c1")
        pair.cancel("r", 2)
        pair.cancel("s", 1)
        await eventually(lambda: len(line.asked) == 3)
    assert [m for m in line.asked if isinstance(m, Cancel)] == [
        Cancel(request_id="r", attempt=2),
        Cancel(request_id="s", attempt=1),
    ]
    assert settled(line) == [("c1",)]


async def test_the_end_is_told_if_it_can_be(line: Line) -> None:
    heard: list[PairEnded] = []
    await line.target.subscribe(subjects.worker_pair_ended(process("w1")), PairEnded, heard.append)
    pair = line.link()
    await pair.tell_ended("why")
    await eventually(lambda: heard == [PairEnded(pair_id="pair", reason="why")])
    await line.source.close()
    await pair.tell_ended("again")


# --- the offer -----------------------------------------------------------------------------------


async def test_an_offer_is_repeated_until_the_target_has_its_plan(line: Line) -> None:
    offer = LiveOffer(assignment=assignment())
    offering = asyncio.create_task(line.link(silence_s=NEVER_S).offer(offer.assignment, math.inf))
    await asyncio.sleep(SHORT_S)
    line.answers = [NotFound("no plan yet"), never()]
    await line.respond("offer")
    await asyncio.wait_for(offering, 10)
    assert line.asked == [offer] * 3


async def test_a_target_that_needs_no_pair_declines(line: Line) -> None:
    await line.respond("offer")
    line.answers = [Conflict("it serves")]
    with pytest.raises(LinkLost, match="declined: it serves"):
        await line.link().offer(assignment(), math.inf)
    assert len(line.asked) == 1


@pytest.mark.parametrize("there", [True, False])
async def test_an_offer_is_not_repeated_after_it_expired(line: Line, there: bool) -> None:
    if there:
        await line.respond("offer")
        line.answers = [NotFound("no plan yet") for _ in range(10_000)]
    with pytest.raises(LinkLost, match="did not accept in time"):
        await line.link().offer(assignment(), time.monotonic() + SHORT_S)


@pytest.mark.parametrize("shift_s", [-30.0, 30.0])
async def test_how_long_an_offer_is_repeated_does_not_depend_on_the_time_of_day(
    line: Line, shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    await line.respond("offer")
    line.answers = [NotFound("no plan yet") for _ in range(5)]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    await line.link().offer(assignment(), time.monotonic() + 25.0)


async def test_an_offer_ends_with_the_pair(line: Line) -> None:
    pair = line.link()
    offering = asyncio.create_task(pair.offer(assignment(), math.inf))
    await asyncio.sleep(SHORT_S)
    pair.lose("the source leaves")
    with pytest.raises(LinkLost):
        await asyncio.wait_for(offering, 10)
