"""The prefill side: requests leave for a decode worker, or are decoded here; none is lost."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from services.worker.engine.mock.tokens import next_token
from services.worker.kv_transfer import decode_client
from shared.errors import BlitzError, Conflict, Internal, Overloaded, Unavailable
from shared.messages.common import Ack
from shared.messages.disaggregated import BeginDecode, DecodeReserved, DecodeRoom, RenewDecode, ReserveDecode
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.fakes import PROMPT, FakeDecode, FakePrefill, clean
from tests.services.worker.kv_transfer.sender.steps import (
    PATIENT_S,
    SILENCE_S,
    Gate,
    ended,
    forever,
    given_up,
    kept,
    submit,
)
from tests.services.worker.lone_worker import LoneWorker
from tests.wait_until import eventually

# --- the good way --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 65, 100, 128])
async def test_all_kv_and_the_first_token_arrive(alone: LoneWorker, decode: FakeDecode, num_tokens: int) -> None:
    prompt = tuple(32 + j % 90 for j in range(num_tokens))
    await submit(alone, decode, prompt=prompt)
    await ended(alone, moved=1)
    assert decode.said == ["reserve", "begin"]
    (reserve,), (begin,) = decode.reserves, decode.begins
    assert reserve.request.prompt_token_ids == prompt
    assert (reserve.request.output_token_ids, reserve.request.decode_at) == ((), None)
    assert reserve.request.instance_id == decode.place.instance_id
    assert (begin.request_id, begin.attempt, begin.token_id) == ("r", 1, next_token(prompt))
    prefill = FakePrefill(alone, "")
    for got, computed in zip(decode.kv(0), prefill.kv(prefill.request(prompt=prompt)), strict=True):
        assert np.array_equal(got, computed)
    await prefill.close()
    await clean(alone)
    assert alone.gateway.tokens("r") == (next_token(prompt),)
    assert all(p.finish_reason is None for p in alone.gateway.parts["r", 1])


async def test_a_continuation_leaves_with_what_it_came_with(alone: LoneWorker, decode: FakeDecode) -> None:
    output = expected_tokens(3, PROMPT)
    await submit(alone, decode, attempt=2, output=output)
    await ended(alone, moved=1)
    assert decode.reserves[0].request.output_token_ids == output
    assert (decode.begins[0].attempt, decode.begins[0].token_id) == (2, next_token((*PROMPT, *output)))


async def test_requests_that_leave_and_that_stay_share_their_steps(alone: LoneWorker, decode: FakeDecode) -> None:
    other = FakeDecode(alone, "w2")
    await other.start()
    await alone.pause()
    prompts = {f"r{i}": tuple(32 + (i * 7 + j) % 90 for j in range(30 + 25 * i)) for i in range(6)}
    for index, (name, prompt) in enumerate(prompts.items()):
        if index % 3 == 0:
            await alone.submit(alone.worker.serving.instance_id, name, prompt=prompt)
        else:
            await submit(alone, (decode, other)[index % 3 - 1], name, prompt=prompt)
    alone.resume()
    await ended(alone, moved=4)
    for name in ("r0", "r3"):
        await kept(alone, name, prompt=prompts[name])
    assert {r.request.request_id for r in decode.reserves} == {"r1", "r4"}
    assert {r.request.request_id for r in other.reserves} == {"r2", "r5"}
    for begin in (*decode.begins, *other.begins):
        assert begin.token_id == next_token(prompts[begin.request_id])
        assert alone.gateway.tokens(begin.request_id) == (begin.token_id,)
    await other.close()


async def test_kv_of_early_layers_leaves_while_later_ones_are_computed(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone.worker, alone.worker.serving.engine.loop.engine.num_layers - 1)
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.layers_here(0) > 0)
    assert not decode.transfers[0][-1].done
    assert decode.begins == []
    gate.open()
    await ended(alone, moved=1)


# --- the decode worker says no -------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["reserve", "renew", "begin"])
@pytest.mark.parametrize("error", [Conflict, Internal])
async def test_a_refusal_means_it_is_decoded_here(
    alone: LoneWorker, decode: FakeDecode, operation: str, error: type[BlitzError]
) -> None:
    async def refuse(_: object) -> Ack:
        raise error("no")

    setattr(decode, f"on_{operation}", refuse)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert {"reserve": len(decode.reserves), "renew": len(decode.renews), "begin": len(decode.begins)}[operation] == 1
    assert decode.said[-1] == "release"


@pytest.mark.parametrize(
    ("operation", "error"),
    [("reserve", Overloaded), ("reserve", Unavailable), ("reserve", None), ("begin", Unavailable), ("begin", None)],
)
async def test_what_may_pass_is_asked_again(
    alone: LoneWorker,
    decode: FakeDecode,
    operation: str,
    error: type[BlitzError] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an error, the answer is lost."""
    answer, asked = getattr(decode, f"on_{operation}"), 0
    if error is None:
        monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.2)

    async def refuse_once(message: object) -> object:
        nonlocal asked
        asked += 1
        if asked > 1:
            return await answer(message)
        monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", PATIENT_S)  # the next answer is waited for
        if error is not None:
            raise error("not now")
        return await forever(message)

    setattr(decode, f"on_{operation}", refuse_once)
    await submit(alone, decode)
    await ended(alone, moved=1)
    assert asked == 2
    assert "release" not in decode.said


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [Overloaded, Unavailable])
async def test_room_that_there_never_is_is_given_up(
    alone: LoneWorker, decode: FakeDecode, error: type[BlitzError]
) -> None:
    async def refuse(_: object) -> DecodeReserved:
        raise error("not now")

    decode.on_reserve = refuse
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said.count("reserve") > 1
    assert decode.said[-1] == "release"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("operation", ["reserve", "renew"])
@pytest.mark.parametrize("how", ["silent", "gone"])
async def test_a_decode_worker_that_does_not_answer_is_given_up(
    alone: LoneWorker, decode: FakeDecode, operation: str, how: str
) -> None:
    async def leave(message: object) -> Ack:
        if how == "gone":
            decode.bus.go_down()
        return await forever(message)

    setattr(decode, f"on_{operation}", leave)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert how == "gone" or decode.said[-1] == "release"


@pytest.mark.usefixtures("impatient_to_begin")
@pytest.mark.parametrize("how", ["silent", "gone", "unavailable"])
async def test_whose_outcome_is_unknown_is_not_decoded_here_as_well(
    alone: LoneWorker, decode: FakeDecode, how: str
) -> None:
    """The decode worker may have begun, for all that is known."""

    async def begin(message: object) -> Ack:
        if how == "unavailable":
            raise Unavailable("not now")
        if how == "gone":
            decode.bus.go_down()
        return await forever(message)

    decode.on_begin = begin
    await submit(alone, decode)
    await given_up(alone)
    assert how == "gone" or decode.said[-1] == "release"
    assert alone.worker.service.parts.inbox.new_owners.owner_of(("r", 1)) is None


@pytest.mark.usefixtures("impatient_to_begin")
async def test_our_own_outage_is_not_the_decode_workers_silence(alone: LoneWorker, decode: FakeDecode) -> None:
    back = asyncio.Event()

    async def cut(_: BeginDecode) -> Ack:
        if len(decode.begins) == 1:
            alone.worker.bus.go_down()  # the answer is lost
            asyncio.get_running_loop().call_later(2 * SILENCE_S, back.set)
        return Ack()

    decode.on_begin = cut
    await submit(alone, decode)
    await back.wait()
    alone.worker.bus.go_up()
    await ended(alone, moved=1)
    assert "release" not in decode.said


@pytest.mark.usefixtures("impatient")
async def test_a_decode_worker_that_takes_no_bytes_is_given_up(alone: LoneWorker, decode: FakeDecode) -> None:
    decode.on_reserve = decode.no_receives
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []
    assert decode.said[-1] == "release"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("when", ["before", "while it sends"])
async def test_a_decode_worker_whose_transport_is_gone(alone: LoneWorker, decode: FakeDecode, when: str) -> None:
    async def dies(_: ReserveDecode) -> DecodeReserved:
        address = decode.transport.address if when != "before" else b"memory:nobody:99"
        return decode.answer(transport_address=address)

    decode.on_reserve = dies
    await submit(alone, decode)
    if when != "before":
        await eventually(lambda: decode.transport.num_unclaimed)
        alone.fabric.kill(decode.transport.address)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []


@pytest.mark.parametrize("ticket", [-1, 1 << 60])
async def test_a_decode_worker_that_answers_nonsense(alone: LoneWorker, decode: FakeDecode, ticket: int) -> None:
    async def nonsense(_: ReserveDecode) -> DecodeReserved:
        return decode.answer(ticket)

    decode.on_reserve = nonsense
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said == ["reserve", "release"]


@pytest.mark.parametrize("where", ["reserve", "kept", "until_here", "begin"])
async def test_an_error_that_nobody_foresaw_does_not_hold_a_request_for_ever(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: object) -> object:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(decode_client.DecodeClient, where, broken)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said[-1] == "release"


async def test_kv_that_cannot_be_read_is_decoded_here(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(alone.worker.serving.engine.loop.engine, "export_kv", broken)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []


# --- flow control -------------------------------------------------------------------------------


async def test_no_more_layers_are_sent_than_there_are_receives_for(alone: LoneWorker, decode: FakeDecode) -> None:
    here, wanted = 0, [0]

    async def room(message: RenewDecode) -> DecodeRoom:
        await decode.room(msgspec.structs.replace(message, wait_layers=0))  # chunks are expected
        wanted.append(message.wait_layers)
        return DecodeRoom(layers_here=here)

    def sent() -> int:
        return sum(transfer.done for transfer in decode.transfers.get(0, []))

    decode.window_layers, decode.on_renew = 1, room
    await submit(alone, decode)
    num_layers = 2 * alone.worker.serving.engine.loop.engine.num_layers  # of two chunks
    for layers_here in range(num_layers):
        here = layers_here
        await eventually(lambda layers_here=layers_here: wanted[-1] == layers_here + 1)
        await eventually(lambda layers_here=layers_here: sent() == layers_here + 1)
        asked = len(wanted)
        await eventually(lambda asked=asked: len(wanted) > asked + 1)
        assert sent() == layers_here + 1
        assert decode.begins == []
    here = num_layers
    await ended(alone, moved=1)


# --- room that is lost ---------------------------------------------------------------------------


@pytest.fixture
def renewing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "RENEW_S", 0.02)


@pytest.mark.usefixtures("renewing")
async def test_room_is_kept_while_the_prompt_is_computed(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone.worker, 1)
    await submit(alone, decode)
    await eventually(lambda: len(decode.renews) > 3)
    assert {renew.ticket for renew in decode.renews} == {0}
    gate.open()
    await ended(alone, moved=1)
    assert len(decode.reserves) == 1
    renewed = len(decode.renews)
    await asyncio.sleep(0.06)
    assert len(decode.renews) == renewed, "what has left is not renewed"


@pytest.mark.usefixtures("renewing")
async def test_room_that_is_lost_is_not_asked_for_again(alone: LoneWorker, decode: FakeDecode) -> None:
    """The decode worker knows nothing of this ticket: what was sent under it is not there."""
    gate = Gate(alone.worker, 1)

    async def lose(_: RenewDecode) -> DecodeRoom:
        if len(decode.renews) > 1:
            raise Conflict("there is no reservation")
        return DecodeRoom(layers_here=0)

    decode.on_renew = lose
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.releases)
    gate.open()
    await kept(alone, prompt=PROMPT[:20])
    await ended(alone, kept=1)
    assert decode.said == ["reserve", "release"]
    assert len(decode.renews) == 2


@pytest.mark.usefixtures("renewing")
async def test_room_that_was_given_back_is_not_renewed(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker would keep room, and not drain, for a request that is decoded elsewhere."""
    gate = Gate(alone.worker, 1)

    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(alone.worker.serving.engine.loop.engine, "export_kv", broken)
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.releases)
    renewed = len(decode.renews)
    await asyncio.sleep(0.1)
    assert len(decode.renews) == renewed
    assert decode.said == ["reserve", "release"]
    gate.open()
    await kept(alone, prompt=PROMPT[:20])
    await ended(alone, kept=1)
