"""The line to a decode worker: what is asked again, and when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.worker.core.sequence import Sequence
from services.worker.disaggregated import line as module
from services.worker.disaggregated.line import Line, NotTaken
from services.worker.disaggregated.shipment import Over, Shipment
from services.worker.engine.base import Sampled
from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import Conflict, Overloaded, Unavailable
from shared.messages.common import Ack
from shared.messages.disaggregated import BeginDecode, DecodeReserved, ReleaseDecode, ReserveDecode
from shared.messages.generation import DecodePlace, SamplingParams, TokenLogprobs
from tests.services.waiting import eventually

TOKEN = Sampled(42, TokenLogprobs(logprob=-1.0))
RESERVED = DecodeReserved(ticket=5, host="h", transport_address=b"there")
SILENCE_S = 0.2


class _Instance:
    class record:  # noqa: N801 - an attribute
        name = "m"


class _Me:
    worker_id, host, transport_address = "w0", "host-of-w0", b"here"


class Rig:
    """A line and a decode worker that answers what ``answers`` holds: an error, a message, or nothing at all (None).

    The last answer is repeated.
    """

    def __init__(self) -> None:
        broker = MemoryBroker()
        self.mine: MemoryBus = broker.bus("w0")
        self.theirs: MemoryBus = broker.bus("w1")
        place = DecodePlace(worker_id="w1", instance_id="i1")
        params = SamplingParams(max_tokens=9, seed=1)
        sequence = Sequence(request_id="r", attempt=3, gateway_id="g", prompt=(1, 2), params=params, decode_at=place)
        self.shipment = Shipment(sequence, 2, place, cast(Any, _Instance()))
        self.line = Line(self.mine, cast(Any, _Me()), self.shipment, silence_s=SILENCE_S)
        self.answers: list[Any] = []
        self.asked: list[Any] = []

    async def start(self) -> None:
        for operation, kind in (("reserve", ReserveDecode), ("begin", BeginDecode), ("release", ReleaseDecode)):
            await self.theirs.respond(subjects.worker_decode("w1", operation), kind, self._answer)

    async def _answer(self, message: Any) -> Any:
        self.asked.append(message)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.sleep(3600)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        for responder in list(self.theirs.broker.responders):
            for task in responder._tasks:
                task.cancel()
        await self.theirs.close()
        await self.mine.close()


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(module, "ASK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "GONE_S", 0.1)
    monkeypatch.setattr(module, "RETRY_S", 0.005)
    monkeypatch.setattr(module, "ROOM_PATIENCE_S", 0.1)
    monkeypatch.setattr(module, "RENEW_S", 0.005)
    rig = Rig()
    await rig.start()
    yield rig
    await rig.close()


async def test_the_messages_say_all_there_is_to_say(rig: Rig) -> None:
    rig.answers = [RESERVED, Ack(), Ack()]
    assert await rig.line.reserve() == RESERVED
    await rig.line.begin(TOKEN)
    await rig.line.release()
    reserve, begin, release = rig.asked
    assert reserve.request == rig.shipment.request
    assert (reserve.worker_id, reserve.host, reserve.transport_address) == ("w0", "host-of-w0", b"here")
    assert reserve.lease_s > 2 * module.RENEW_S
    assert begin == BeginDecode(request_id="r", attempt=3, token_id=42, logprobs=TOKEN.logprobs)
    assert release == ReleaseDecode(request_id="r", attempt=3)


async def test_room_is_waited_for_as_long_as_the_prompt_takes(rig: Rig) -> None:
    rig.answers = [Overloaded("full")]
    waits = asyncio.create_task(rig.line.reserve())
    await asyncio.sleep(0.15)
    assert not waits.done(), "there is nothing to be lost by it"
    rig.shipment.computed([1], 2, TOKEN)
    with pytest.raises(NotTaken, match="full"):
        await waits


async def test_room_that_comes_in_time_is_taken(rig: Rig) -> None:
    rig.shipment.computed([1], 2, TOKEN)
    rig.answers = [Overloaded("full"), Unavailable("starting"), None, RESERVED]
    assert await rig.line.reserve() == RESERVED


@pytest.mark.parametrize("what", ["reserve", "begin"])
@pytest.mark.parametrize("answer", [None, Unavailable("not now")])
async def test_silence_is_believed_after_a_while(rig: Rig, what: str, answer: Exception | None) -> None:
    rig.answers = [answer]
    with pytest.raises(NotTaken, match="nobody answers"):
        await (rig.line.reserve() if what == "reserve" else rig.line.begin(TOKEN))
    assert len(rig.asked) > 1


@pytest.mark.parametrize("what", ["reserve", "begin"])
async def test_a_name_that_nobody_answers_to(rig: Rig, what: str) -> None:
    rig.theirs.go_down()
    with pytest.raises(NotTaken):
        await (rig.line.reserve() if what == "reserve" else rig.line.begin(TOKEN))


async def test_a_decode_worker_that_reconnects_is_not_gone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GONE_S", 60.0)
    rig.answers = [RESERVED]
    rig.theirs.go_down()
    waits = asyncio.create_task(rig.line.reserve())
    await asyncio.sleep(0.05)
    rig.theirs.go_up()
    assert await waits == RESERVED


@pytest.mark.parametrize("what", ["reserve", "begin"])
async def test_our_own_outage_is_nobodys_silence(rig: Rig, what: str) -> None:
    rig.answers = [None, RESERVED if what == "reserve" else Ack()]  # after the outage, one answer is lost
    rig.mine.go_down()
    waits = asyncio.create_task(rig.line.reserve() if what == "reserve" else rig.line.begin(TOKEN))
    await asyncio.sleep(2 * SILENCE_S)
    assert not waits.done()
    rig.mine.go_up()
    await waits


@pytest.mark.parametrize("what", ["reserve", "begin"])
async def test_what_is_over_is_not_asked_for_any_more(rig: Rig, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 60.0)
    rig.answers = [Unavailable("not now")]
    waits = asyncio.create_task(rig.line.reserve() if what == "reserve" else rig.line.begin(TOKEN))
    await eventually(lambda: rig.asked)
    await asyncio.sleep(0.01)
    rig.shipment.unwanted()
    with pytest.raises(Over):
        await waits
    assert len(rig.asked) == 1


async def test_an_end_while_begin_is_answered_is_not_a_success(rig: Rig) -> None:
    go = asyncio.Event()

    async def answer(_: BeginDecode) -> Ack:
        await go.wait()
        return Ack()

    for responder in list(rig.theirs.broker.responders):
        await responder.close()
    await rig.theirs.respond(subjects.worker_decode("w1", "begin"), BeginDecode, answer)
    begin = asyncio.create_task(rig.line.begin(TOKEN))
    await asyncio.sleep(0.01)
    rig.shipment.sequence.finished = True
    go.set()
    with pytest.raises(Over):
        await begin


async def test_renewing_goes_on_through_silence_and_ends_with_the_room(rig: Rig) -> None:
    rig.answers = [RESERVED, None, Unavailable("away"), RESERVED, Conflict("lapsed")]
    await rig.line.renew()
    assert rig.shipment.lost == "lapsed"
    assert len(rig.asked) == 5


async def test_a_release_that_nobody_hears_is_no_error(rig: Rig) -> None:
    for answer in (None, Conflict("what?")):
        rig.answers = [answer]
        await rig.line.release()
    rig.theirs.go_down()
    await rig.line.release()
