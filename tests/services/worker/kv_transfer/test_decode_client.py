"""The client to a decode worker: what is asked again, and when it is given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.worker.core.kv_admission import room
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.kv_transfer import decode_client as module
from services.worker.kv_transfer.decode_client import DecodeClient
from services.worker.kv_transfer.transfer import DecodeRefused, KvTransfer, RequestEnded
from shared import subjects
from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    Internal,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    TransportError,
    Unavailable,
)
from shared.messages.common import Ack
from shared.messages.disaggregated import (
    BeginDecode,
    DecodeReserved,
    DecodeRoom,
    ReleaseDecode,
    RenewDecode,
    ReserveDecode,
)
from shared.messages.generation import DecodePlace, SamplingParams, TokenLogprobs
from tests.processes import INCARNATION, process
from tests.shared.bus.memory import MemoryBroker, MemoryBus
from tests.wait_until import eventually

TOKEN = Sampled(42, TokenLogprobs(logprob=-1.0))
RESERVED = DecodeReserved(ticket=5, host="h", transport_address=b"there", window_layers=8)
ANSWERS = {"reserve": RESERVED, "renew": DecodeRoom(layers_here=4), "begin": Ack()}
"""What is said to each question if all is well."""
GIVEN_UP = {"reserve": DecodeRefused, "renew": DecodeRefused, "begin": Unavailable}
"""What a question ends with that was heard, for all that is known, and is not answered."""
ERRORS = [Conflict, BadRequest, NotFound, Internal, PayloadTooLarge, TransportError]
EVERY_QUESTION = pytest.mark.parametrize("what", list(ANSWERS))
SILENCE_S, NEVER_S = 1.0, 600.0


class _Instance:
    class record:  # noqa: N801 - an attribute
        name = "m"
        model_hash = "h"

    class layout:  # noqa: N801
        num_layers = 4


class _Me:
    worker_id, host, transport_address = "w0", "host-of-w0", b"here"


class Rig:
    """A client and a decode worker that answers what ``answers`` holds: an error, a message, or nothing at all (None).

    The last answer is repeated.
    """

    def __init__(self) -> None:
        broker = MemoryBroker()
        self.mine: MemoryBus = broker.bus("w0")
        self.theirs: MemoryBus = broker.bus("w1")
        place = DecodePlace(worker_id="w1", incarnation=INCARNATION, instance_id="i1")
        params = SamplingParams(max_tokens=9, seed=1)
        sequence = ActiveSequence(
            request_id="r", attempt=3, gateway_id="g", prompt=(1, 2), params=params, decode_at=place
        )
        self.transfer = KvTransfer(sequence, 2, place, cast(Any, _Instance()))
        self.client = self.patient(NEVER_S)
        self.answers: list[Any] = []
        self.asked: list[Any] = []

    async def start(self) -> None:
        kinds = {"reserve": ReserveDecode, "renew": RenewDecode, "begin": BeginDecode, "release": ReleaseDecode}
        for operation, kind in kinds.items():
            await self.theirs.respond(subjects.worker_decode(process("w1"), operation), kind, self._answer)

    def patient(self, silence_s: float) -> DecodeClient:
        """A client that believes in this silence."""
        return DecodeClient(self.mine, cast(Any, _Me()), self.transfer, silence_s=silence_s)

    async def ask(self, what: str) -> Any:
        """Any of the questions that are asked until they are answered."""
        if what == "renew":
            return await self.client.until_here(5, 4)
        return await (self.client.reserve() if what == "reserve" else self.client.begin(TOKEN))

    async def _answer(self, message: Any) -> Any:
        self.asked.append(message)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.sleep(3600)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def answers_itself(self, operation: str, kind: type[Any], answer: Any) -> None:
        """Instead of ``answers``."""
        subject = subjects.worker_decode(process("w1"), operation)
        for responder in list(self.theirs.broker.responders):
            if responder.subject == subject:
                await responder.close()
        await self.theirs.respond(subject, kind, answer)

    async def close(self) -> None:
        for responder in list(self.theirs.broker.responders):
            responder.cancel_answers()
        await self.theirs.close()
        await self.mine.close()


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(module, "ASK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "GONE_S", 0.1)
    monkeypatch.setattr(room, "RETRY_S", 0.005)
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", 0.1)
    monkeypatch.setattr(module, "RENEW_S", 0.005)
    rig = Rig()
    await rig.start()
    yield rig
    await rig.close()


async def test_the_messages_say_all_there_is_to_say(rig: Rig) -> None:
    rig.answers = [RESERVED, DecodeRoom(layers_here=3), Ack(), Ack()]
    assert await rig.client.reserve() == RESERVED
    assert await rig.client.until_here(5, 2) == 3
    await rig.client.begin(TOKEN)
    await rig.client.release()
    reserve, renew, begin, release = rig.asked
    assert reserve.request == rig.transfer.request
    assert (reserve.worker_id, reserve.host, reserve.transport_address) == ("w0", "host-of-w0", b"here")
    assert reserve.lease_s > 2 * module.RENEW_S
    assert renew == RenewDecode(request_id="r", attempt=3, ticket=5, wait_layers=2)
    assert begin == BeginDecode(request_id="r", attempt=3, token_id=42, logprobs=TOKEN.logprobs)
    assert release == ReleaseDecode(request_id="r", attempt=3, worker_id="w0")


async def test_room_is_waited_for_as_long_as_the_prompt_takes(rig: Rig) -> None:
    rig.answers = [Overloaded("full")]
    waits = asyncio.create_task(rig.client.reserve())
    await asyncio.sleep(0.15)
    assert not waits.done(), "there is nothing to be lost by it"
    rig.transfer.computed([1], TOKEN)
    with pytest.raises(DecodeRefused, match="full"):
        await waits


async def test_questions_about_room_come_less_and_less_often(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is as long as the prompt."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(rig.transfer, "pause", pause)
    rig.answers = [Overloaded("full")] * 30 + [RESERVED]
    await rig.client.reserve()
    assert len(pauses) == 30
    assert room.RETRY_S / 2 <= pauses[0] <= room.RETRY_S
    assert all(room.MAX_RETRY_S / 2 <= p <= room.MAX_RETRY_S for p in pauses[15:])
    assert len(set(pauses[15:])) > 1, "those who wait do not all ask at the same moment"


async def test_room_that_comes_in_time_is_taken(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", NEVER_S)
    rig.transfer.computed([1], TOKEN)
    rig.answers = [Overloaded("full"), Unavailable("starting"), None, RESERVED]
    assert await rig.client.reserve() == RESERVED


@EVERY_QUESTION
async def test_what_may_pass_is_asked_again(rig: Rig, what: str) -> None:
    rig.answers = [Unavailable("not now"), None, ANSWERS[what]]
    await rig.ask(what)
    assert len(rig.asked) == 3
    assert rig.asked[0] == rig.asked[-1]


@EVERY_QUESTION
@pytest.mark.parametrize("error", ERRORS)
async def test_a_refusal_is_believed_at_once(rig: Rig, what: str, error: type[BlitzError]) -> None:
    rig.answers = [error("no")]
    with pytest.raises(DecodeRefused, match="no"):
        await rig.ask(what)
    assert len(rig.asked) == 1


@EVERY_QUESTION
@pytest.mark.parametrize("answer", [None, Unavailable("not now")])
async def test_silence_is_believed_after_a_while(rig: Rig, what: str, answer: Exception | None) -> None:
    rig.client, rig.answers = rig.patient(SILENCE_S), [answer]
    with pytest.raises(GIVEN_UP[what], match="nobody answers"):
        await rig.ask(what)
    assert len(rig.asked) > 1


@EVERY_QUESTION
async def test_a_name_that_nobody_answers_to_has_not_heard_it(rig: Rig, what: str) -> None:
    rig.theirs.go_down()
    with pytest.raises(DecodeRefused):
        await rig.ask(what)


async def test_who_has_heard_a_begin_and_is_gone_then_may_have_the_request(rig: Rig) -> None:
    async def leave(_: BeginDecode) -> Ack:
        rig.theirs.go_down()
        return Ack()

    await rig.answers_itself("begin", BeginDecode, leave)
    with pytest.raises(Unavailable, match="nobody answers"):
        await rig.client.begin(TOKEN)


async def test_a_decode_worker_that_reconnects_is_not_gone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GONE_S", 60.0)
    rig.answers = [RESERVED]
    rig.theirs.go_down()
    waits = asyncio.create_task(rig.client.reserve())
    await asyncio.sleep(0.05)
    rig.theirs.go_up()
    assert await waits == RESERVED


@EVERY_QUESTION
async def test_our_own_outage_is_nobodys_silence(rig: Rig, what: str) -> None:
    rig.client = rig.patient(SILENCE_S)
    rig.answers = [None, ANSWERS[what]]  # after the outage, one answer is lost
    rig.mine.go_down()
    waits = asyncio.create_task(rig.ask(what))
    await asyncio.sleep(1.5 * SILENCE_S)
    assert not waits.done()
    rig.mine.go_up()
    await waits


@EVERY_QUESTION
async def test_what_is_over_is_not_asked_for_any_more(rig: Rig, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_S", 60.0)
    rig.answers = [Unavailable("not now")]
    waits = asyncio.create_task(rig.ask(what))
    await eventually(lambda: rig.asked)
    await asyncio.sleep(0.01)
    rig.transfer.unwanted()
    with pytest.raises(RequestEnded):
        await waits
    assert len(rig.asked) == 1


async def test_an_end_while_begin_is_answered_is_not_a_success(rig: Rig) -> None:
    async def answer(_: BeginDecode) -> Ack:
        rig.transfer.sequence.finished = True
        return Ack()

    await rig.answers_itself("begin", BeginDecode, answer)
    with pytest.raises(RequestEnded):
        await rig.client.begin(TOKEN)


# --- how much has arrived ------------------------------------------------------------------------


async def test_layers_are_asked_for_until_they_are_there(rig: Rig) -> None:
    rig.answers = [DecodeRoom(layers_here=here) for here in (0, 0, 1, 3, 7)]
    assert await rig.client.until_here(5, 3) == 3
    assert len(rig.asked) == 4


async def test_layers_that_do_not_come_are_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_TIMEOUT_S", SILENCE_S)
    rig.client = rig.patient(SILENCE_S)

    async def answer(_: RenewDecode) -> DecodeRoom:
        await asyncio.sleep(SILENCE_S / 5)
        return DecodeRoom(layers_here=2)

    await rig.answers_itself("renew", RenewDecode, answer)
    with pytest.raises(DecodeRefused, match=r"2 layers in 1 s"):
        await rig.client.until_here(5, 3)


async def test_layers_that_come_slowly_are_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within the limit, all together not."""
    rig.client = rig.patient(SILENCE_S)
    started_s, here = time.monotonic(), 0

    async def answer(_: RenewDecode) -> DecodeRoom:
        nonlocal here
        await asyncio.sleep(SILENCE_S / 5)
        here += 1
        return DecodeRoom(layers_here=here)

    monkeypatch.setattr(module, "ASK_TIMEOUT_S", SILENCE_S)
    await rig.answers_itself("renew", RenewDecode, answer)
    assert await rig.client.until_here(5, 8) == 8
    assert time.monotonic() - started_s > SILENCE_S


# --- keeping room --------------------------------------------------------------------------------


async def test_room_is_renewed_meanwhile_and_not_after(rig: Rig) -> None:
    rig.answers = [DecodeRoom(layers_here=0), None, Unavailable("away"), DecodeRoom(layers_here=0)]
    async with rig.client.kept(RESERVED):
        await eventually(lambda: len(rig.asked) > 4)
    told = len(rig.asked)
    await asyncio.sleep(10 * module.RENEW_S)
    assert len(rig.asked) == told
    assert set(rig.asked) == {RenewDecode(request_id="r", attempt=3, ticket=5)}
    rig.transfer.check()


async def test_room_that_is_lost_is_told(rig: Rig) -> None:
    rig.answers = [DecodeRoom(layers_here=0), Conflict("lapsed")]
    async with rig.client.kept(RESERVED):
        with pytest.raises(DecodeRefused, match="lapsed"):
            await rig.transfer.pause(60.0)
        told = len(rig.asked)
        await asyncio.sleep(10 * module.RENEW_S)
        assert len(rig.asked) == told == 2


async def test_a_release_that_nobody_hears_is_no_error(rig: Rig) -> None:
    for answer in (None, Conflict("what?")):
        rig.answers = [answer]
        await rig.client.release()
    rig.theirs.go_down()
    await rig.client.release()
