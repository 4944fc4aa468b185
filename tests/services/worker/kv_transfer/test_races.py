"""Two real workers, and a bus and gateways that choose the worst moments. Whatever they do, nothing is lost or left."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.worker.core.kv_admission import room, staging
from services.worker.device.completion import Completion
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.kv_transfer import decode_client, receiver
from services.worker.kv_transfer.incoming import kv_tag
from services.worker.kv_transfer.reservation import DecodeReservation
from shared import subjects
from shared.bus.wire import Headers
from shared.errors import BlitzError
from shared.messages.common import Ack
from shared.messages.disaggregated import BeginDecode
from shared.messages.generation import GatewayHeartbeat
from shared.transport.base import Buffer
from tests.processes import process
from tests.services.fake_gateway import expected_tokens
from tests.services.tampering import corrupt, index_of, lose_from
from tests.services.worker.kv_transfer.fakes import FakeDecode, clean, outcomes
from tests.services.worker.kv_transfer.lossy import LossyBroker
from tests.services.worker.kv_transfer.rig import PROMPT, Disaggregated, disaggregated
from tests.services.worker.kv_transfer.sender.steps import Gate
from tests.services.worker.late_workers import also_late
from tests.services.worker.lone_worker import LoneWorker
from tests.services.workers import RunningWorker
from tests.shared.bus.memory import Reply
from tests.shared.transport.memory import MemoryTransport
from tests.wait_until import eventually

SLOW = MockTiming(layer_base_s=0.01)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(decode_client, "GONE_S", 0.5)
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", 1.0)
    monkeypatch.setattr(decode_client, "RENEW_S", 0.4)
    monkeypatch.setattr(receiver, "MAX_WAIT_S", 0.05)


@pytest.fixture
async def pair(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Disaggregated]:
    """Patience of a second or two. Nothing may be left at either worker."""
    monkeypatch.setattr(decode_client, "LEASE_S", 2.0)
    async with disaggregated(redis_url, stall_s=1.5) as pair:
        yield pair
        await pair.clean()


@pytest.fixture
async def patient_pair(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Disaggregated]:
    """Asks again for long: nobody is given up because the machine is slow, or chance unkind."""
    monkeypatch.setattr(decode_client, "LEASE_S", 10.0)
    monkeypatch.setattr(decode_client, "RENEW_S", 3.0)
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", 10.0)
    async with disaggregated(redis_url) as pair:
        yield pair
        await pair.clean()


async def whole(pair: Disaggregated, request_id: str, prompt: tuple[int, ...], count: int) -> None:
    """Its tokens are all there and right, whoever said them how often."""
    end = await pair.gateway.end_of(request_id)
    assert end.finish_reason == "length", end
    tokens = expected_tokens(count, prompt)
    known: set[int] = set()
    for part in pair.gateway.parts[request_id, 1]:
        assert part.token_ids == tokens[part.offset : part.offset + len(part.token_ids)], part
        assert part.finish_reason in (None, "length"), part
        known.update(range(part.offset, part.offset + len(part.token_ids)))
    assert known == set(range(count))


def test_the_subjects_are_what_the_lossy_broker_looks_for() -> None:
    assert ".decode." in subjects.worker_decode(process("w1"), "begin")


async def test_questions_and_answers_get_lost(patient_pair: Disaggregated) -> None:
    pair = patient_pair
    lossy = LossyBroker(pair.cluster.broker, 7, lost=0.4)
    prompts = {f"r{i}": tuple(32 + (i * 7 + j) % 90 for j in range(5 + 11 * i)) for i in range(16)}
    for start in range(0, 16, 8):
        names = list(prompts)[start : start + 8]
        for name in names:
            await pair.submit(name, prompt=prompts[name], max_tokens=40)
        for name in names:
            await whole(pair, name, prompts[name], 40)
    lossy.lost = 0.0
    await pair.clean()
    assert sum(pair.outcomes().values()) == 16
    assert pair.outcomes().get("moved", 0) > 0


@also_late()
async def test_cancels_at_any_moment(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "LEASE_S", 3600.0)  # room is given back, and does not only lapse
    chance = random.Random(3)
    async with disaggregated(redis_url, stall_s=1.5) as pair:
        for number in range(40):
            name = f"r{number}"
            prompt = PROMPT[: chance.randrange(1, 100)]
            await pair.submit(name, prompt=prompt, max_tokens=3000)
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            if number % 3 == 0:
                await asyncio.sleep(chance.random() * 0.01)
            await pair.gateway.cancel("w0", name)
        await pair.clean()


async def test_cancels_while_questions_and_answers_get_lost(pair: Disaggregated) -> None:
    chance = random.Random(5)
    lossy = LossyBroker(pair.cluster.broker, 11, lost=0.3)
    for number in range(16):
        name = f"r{number}"
        await pair.submit(name, prompt=PROMPT[: chance.randrange(1, 100)], max_tokens=3000)
        await asyncio.sleep(0.01 + chance.random() * 0.1)
        await pair.gateway.cancel("w0", name)
        await pair.gateway.cancel("w1", name)  # as a gateway that has heard of both does
    lossy.lost = 0.0
    # A release that got lost leaves a request that nobody reads; its next attempt would end it.
    for number in range(16):
        for worker in ("w0", "w1"):
            await pair.gateway.cancel(worker, f"r{number}")
    await pair.clean()


async def test_the_decode_worker_flickers(pair: Disaggregated) -> None:
    chance = random.Random(2)
    names = [f"r{i}" for i in range(12)]
    for name in names:
        await pair.submit(name, max_tokens=20)
        pair.decode.bus.go_down()
        await asyncio.sleep(chance.random() * 0.1)
        pair.decode.bus.go_up()
        await asyncio.sleep(chance.random() * 0.02)
    for name in names:
        await covered(pair, name, 20)


async def covered(pair: Disaggregated, request_id: str, count: int) -> None:
    """As a gateway does, which asks again for what was said while a bus was away."""

    async def ended() -> bool:
        if any(p.finish_reason for p in pair.gateway.parts.get((request_id, 1), [])):
            return True
        for worker in ("w0", "w1"):
            with contextlib.suppress(BlitzError):  # it is at the other one
                await pair.gateway.resend(worker, request_id)
        return False

    await eventually(ended)
    tokens = expected_tokens(count, pair.prompts[request_id])
    for part in pair.gateway.parts[request_id, 1]:
        assert part.token_ids == tokens[part.offset : part.offset + len(part.token_ids)], part


@pytest.mark.parametrize("layer", [0, 1])
async def test_kv_that_is_changed_on_its_way_is_not_decoded(patient_pair: Disaggregated, layer: int) -> None:
    pair = patient_pair
    pair.prefill.transport.tamper = corrupt(layer)
    await pair.submit("r")
    await whole(pair, "r", PROMPT, 8)
    assert pair.decoded_by("r") == ["w0"]
    await pair.submit("next")
    await whole(pair, "next", PROMPT, 8)
    assert pair.decoded_by("next") == ["w0", "w1"]
    await eventually(lambda: pair.outcomes() == {"kept": 1, "moved": 1})


async def test_a_link_that_stalls(pair: Disaggregated) -> None:
    pair.prefill.transport.tamper = lose_from(1)
    await pair.submit("r")
    await whole(pair, "r", PROMPT, 8)
    assert pair.decoded_by("r") == ["w0"]


async def test_a_second_attempt_while_the_first_one_leaves(patient_pair: Disaggregated) -> None:
    pair = patient_pair
    for delay in range(12):
        name = f"r{delay}"
        await pair.submit(name, max_tokens=20)
        for _ in range(4 * delay):
            await asyncio.sleep(0)
        await pair.gateway.submit(
            "w0", pair.prefill.serving.instance_id, name, attempt=2, prompt=PROMPT, max_tokens=20, decode_at=pair.place
        )
        end = await pair.gateway.end_of(name, attempt=2)
        assert end.finish_reason == "length", end
        assert pair.gateway.tokens(name, attempt=2, repeats=True) == expected_tokens(20, PROMPT)


async def test_a_second_attempt_ends_the_first_ones_departure(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    decode = FakeDecode(alone)
    await decode.start()

    async def begin(message: BeginDecode) -> Ack:
        if message.attempt == 1:
            await asyncio.Event().wait()
        return Ack()

    decode.on_begin = begin
    await alone.submit(instance_id, "r", prompt=PROMPT, decode_at=decode.place)
    await eventually(lambda: decode.begins)
    await alone.submit(instance_id, "r", attempt=2, prompt=PROMPT, decode_at=decode.place)
    await eventually(lambda: outcomes(alone) == {"moved": 1, "ended": 1})
    assert [(r.request_id, r.attempt) for r in decode.releases] == [("r", 1)]
    await clean(alone)
    await decode.close()


# --- two workers that know different things ------------------------------------------------------


def keys(worker: RunningWorker) -> set[tuple[str, int]]:
    """The requests that its scheduler has."""
    return set(worker.serving.engine.loop.scheduler.table.accepted)


@pytest.mark.parametrize("then", ["cancel", "attempt"])
async def test_the_decode_worker_begins_and_is_not_heard_of_again_for_a_while(
    redis_url: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disaggregated(redis_url, mock=SLOW) as pair:
        here, there = pair.prefill, pair.decode
        unpin = DecodeReservation.unpin

        def unpin_and_go(reservation: DecodeReservation) -> None:
            """It is decoded there now, and that is not said."""
            unpin(reservation)
            there.bus.go_down()

        monkeypatch.setattr(DecodeReservation, "unpin", unpin_and_go)
        await pair.submit("r", max_tokens=3000)
        end = await pair.gateway.end_of("r")
        assert end.error is not None
        assert end.error.code == "unavailable", "another attempt is to be made"
        assert pair.gateway.tokens("r", repeats=True) == expected_tokens(1, PROMPT)
        await eventually(pair.outcomes)
        await eventually(lambda: pair.outcomes() == {"unknown": 1})
        assert keys(here) == set(), "both would decode it"
        assert keys(there) == {("r", 1)}
        monkeypatch.setattr(DecodeReservation, "unpin", unpin)
        there.bus.go_up()
        if then == "cancel":
            await pair.gateway.cancel("w1", "r")
        else:
            await pair.gateway.submit(
                "w0", here.serving.instance_id, "r", attempt=2, prompt=PROMPT, decode_at=pair.place
            )
            await eventually(lambda: ("r", 1) not in keys(there))
            assert (await pair.gateway.end_of("r", attempt=2)).finish_reason == "length"
            assert pair.gateway.tokens("r", attempt=2, repeats=True) == expected_tokens(8, PROMPT)
            await eventually(lambda: pair.outcomes() == {"unknown": 1, "moved": 1})
        await pair.clean()


async def test_room_that_lapsed_and_was_given_anew_is_not_taken_for_the_first(redis_url: str) -> None:
    """KV that went under the first ticket is not there."""
    async with disaggregated(redis_url) as pair:
        gate = Gate(pair.prefill, 1)
        await pair.submit("r")
        rooms = pair.decode.service.parts.kv_receiver.reservations
        await eventually(lambda: rooms)
        (room,) = rooms.values()
        room.kv[0].ticket += 77
        gate.open()
        await whole(pair, "r", PROMPT, 8)
        assert pair.decoded_by("r") == ["w0"]
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"kept": 1})


async def test_a_gateway_that_only_the_decode_worker_finds_silent(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        gate = Gate(pair.prefill, 1)
        await pair.submit("r")
        there = pair.decode
        await eventually(lambda: there.service.parts.kv_receiver.reservations)
        there.service.parts.inbox.on_gateway(GatewayHeartbeat(gateway_id="gw", lease_s=0.0, incarnation="1"))
        there.service.parts.inbox.expire()
        gate.open()
        await whole(pair, "r", PROMPT, 8)
        assert pair.decoded_by("r") == ["w0"]
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"kept": 1})


@pytest.mark.parametrize("window", [1, 3])
async def test_no_layer_is_sent_that_nobody_receives(
    patient_pair: Disaggregated, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """However slowly KV is taken in."""
    monkeypatch.setattr(staging, "WINDOW_PIECES", window)
    there, rooms = patient_pair.decode, patient_pair.decode.service.parts.kv_receiver.reservations
    engine = there.serving.engine.loop.engine
    assert isinstance(engine, MockEngine)
    import_kv, ahead = engine.import_kv, []

    def slowly(*args: Any, **kwargs: Any) -> Completion[None]:
        time.sleep(0.004)
        return import_kv(*args, **kwargs)

    def watch(kv: Buffer, tag: int) -> tuple[Buffer, int]:
        layer = index_of(tag)
        (here,) = [a.layers_here for a in rooms.values() if kv_tag(a.kv[0].ticket, layer) == tag]
        ahead.append(layer - here)
        return kv, tag

    monkeypatch.setattr(engine, "import_kv", slowly)
    patient_pair.prefill.transport.tamper = watch
    prompts = {f"r{i}": PROMPT[: 20 + 10 * i] for i in range(6)}
    for name, prompt in prompts.items():
        await patient_pair.submit(name, prompt=prompt)
    for name, prompt in prompts.items():
        await whole(patient_pair, name, prompt, 8)
    await eventually(lambda: patient_pair.outcomes() == {"moved": 6})
    assert len(ahead) == 7 * engine.num_layers, "one of them in two chunks"
    assert max(ahead) == window - 1


@pytest.mark.parametrize("times", [1, 3])
async def test_a_submit_that_is_repeated_after_the_request_moved(redis_url: str, times: int) -> None:
    async with disaggregated(redis_url, mock=SLOW) as pair:
        await pair.submit("r", max_tokens=3000)
        await eventually(lambda: pair.outcomes() == {"moved": 1})
        for _ in range(times):
            await pair.submit("r", max_tokens=3000)
        await eventually(lambda: not keys(pair.prefill))
        assert keys(pair.decode) == {("r", 1)}
        await pair.gateway.cancel("w0", "r")
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"moved": 1})


# --- traces --------------------------------------------------------------------------------------


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """As they end, of all workers."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda *_, **__: provider.get_tracer("test"))
    return exporter


def parts_of(spans: InMemorySpanExporter, request_id: str) -> dict[str, ReadableSpan]:
    """A request's spans by name, of which there is one each."""
    found = [s for s in spans.get_finished_spans() if (s.attributes or {}).get("blitz.request_id") == request_id]
    assert len({s.name for s in found}) == len(found)
    return {s.name: s for s in found}


async def test_a_request_that_moves_is_one_trace(patient_pair: Disaggregated, spans: InMemorySpanExporter) -> None:
    for name in "ab":
        await patient_pair.submit(name)
    for name in "ab":
        await whole(patient_pair, name, PROMPT, 8)
    await eventually(lambda: all(len(parts_of(spans, name)) == 2 for name in "ab"))
    traces = set()
    for name in "ab":
        parts = parts_of(spans, name)
        here, there = parts["worker.request"], parts["worker.decode"]
        assert here.attributes is not None
        assert there.attributes is not None
        assert (here.attributes["blitz.worker_id"], there.attributes["blitz.worker_id"]) == ("w0", "w1")
        assert here.attributes["blitz.moved_to"] == "w1"
        assert "gen_ai.usage.output_tokens" not in here.attributes
        assert there.attributes["gen_ai.usage.output_tokens"] == 8
        assert there.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert there.parent is not None
        assert here.context is not None
        assert (there.parent.trace_id, there.parent.span_id) == (here.context.trace_id, here.context.span_id)
        traces.add(here.context.trace_id)
    assert len(traces) == 2


async def test_a_request_that_stays_is_one_span(patient_pair: Disaggregated, spans: InMemorySpanExporter) -> None:
    patient_pair.decode.serving.drain()
    await patient_pair.submit("r")
    await whole(patient_pair, "r", PROMPT, 8)
    await eventually(lambda: parts_of(spans, "r"))
    (span,) = parts_of(spans, "r").values()
    assert span.name == "worker.request"
    assert span.attributes is not None
    assert "blitz.moved_to" not in span.attributes
    assert span.attributes["gen_ai.usage.output_tokens"] == 8


async def test_the_answer_to_a_begin_is_lost_just_as_the_room_would_be_renewed(
    patient_pair: Disaggregated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(decode_client, "RENEW_S", 0.05)
    pair, lost = patient_pair, list[str]()
    request_raw = pair.cluster.broker.request_raw

    def lossy(subject: str, payload: bytes, headers: Headers | None, reply: Reply) -> bool:
        if subject.endswith("decode.begin") and not lost:
            lost.append(subject)
            return request_raw(subject, payload, headers, lambda *_: None)
        return request_raw(subject, payload, headers, reply)

    monkeypatch.setattr(pair.cluster.broker, "request_raw", lossy)
    await pair.submit("r", max_tokens=30)
    await eventually(pair.outcomes)
    assert lost
    await eventually(lambda: pair.outcomes() == {"moved": 1})
    await pair.ends("r", max_tokens=30)


async def test_no_kv_comes_before_its_receive_however_slow_the_connection(
    patient_pair: Disaggregated, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside: list[int] = []
    set_aside = MemoryTransport.set_aside

    def noted(self: Any, send: Any, *rest: Any) -> None:
        aside.append(send.tag)
        set_aside(self, send, *rest)

    monkeypatch.setattr(MemoryTransport, "set_aside", noted)
    peers = patient_pair.decode.service.parts.peers
    channel = peers.channel

    async def slowly(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.1)
        return await channel(*args, **kwargs)

    monkeypatch.setattr(peers, "channel", slowly)
    await patient_pair.submit("r")
    await patient_pair.ends("r")
    assert not aside
