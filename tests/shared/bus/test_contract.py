"""Every promise of ``shared.bus.base``, kept by both buses."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY

from shared import subjects
from shared.bus.base import Stored
from shared.errors import (
    BlitzError,
    DeadlineExceeded,
    Internal,
    ModelNotFound,
    NoResponder,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from shared.messages.codec import MalformedMessage
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from tests.shared.bus.conftest import Place
from tests.traceparents import current_traceparent
from tests.wait_until import WAIT_S, eventually

GARBAGE = (b"", b"\xc1", b"not msgpack", b"\x81\xa4kind\xa6ack.v1", b"\xff" * 100, b"\x91" * 5000)


def subject() -> str:
    return f"{subjects.PREFIX}.test.{uuid.uuid4().hex}"


def event_subject() -> str:
    return f"{subjects.PREFIX}.plans.test-{uuid.uuid4().hex}"


def cancel(attempt: int = 0, request_id: str = "r") -> Cancel:
    return Cancel(request_id=request_id, attempt=attempt)


def malformed_count() -> float:
    return REGISTRY.get_sample_value("blitz_bus_malformed_total", {"kind": "cancel.v1"}) or 0.0


async def acknowledge(message: Cancel) -> Ack:
    return Ack()


async def test_listeners_receive_equal_messages_in_order_of_arrival(place: Place) -> None:
    here, there, on = await place.bus("here"), await place.bus("there"), subject()
    got: list[Cancel] = []
    await there.subscribe(on, Cancel, got.append)
    sent = [cancel(n) for n in range(500)]
    for message in sent:
        await here.publish(on, message)
    await eventually(lambda: len(got) == len(sent))
    assert got == sent


async def test_every_subscriber_gets_every_message_and_wildcards_match(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    got: dict[str, list[Cancel]] = {"exact": [], "star": [], "rest": [], "other": [], "short": []}
    for name, pattern in {
        "exact": f"{on}.x.y", "star": f"{on}.*.y", "rest": f"{on}.>", "other": f"{on}.*.z", "short": f"{on}.*",
    }.items():  # fmt: skip
        await bus.subscribe(pattern, Cancel, got[name].append)
    await bus.publish(f"{on}.x.y", cancel())
    await eventually(lambda: got["exact"] and got["star"] and got["rest"])
    assert [len(messages) for messages in got.values()] == [1, 1, 1, 0, 0]


async def test_a_closed_subscription_receives_nothing_and_closes_twice(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    closed: list[Cancel] = []
    open_: list[Cancel] = []
    subscription = await bus.subscribe(on, Cancel, closed.append)
    await bus.subscribe(on, Cancel, open_.append)
    await bus.publish(on, cancel(1))
    await eventually(lambda: closed)
    await subscription.close()
    await subscription.close()
    await bus.publish(on, cancel(2))
    await eventually(lambda: len(open_) == 2)
    assert closed == [cancel(1)]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_never_reaches_a_listener_and_is_counted(place: Place, garbage: bytes) -> None:
    bus, on, before = await place.bus("a"), subject(), malformed_count()
    got: list[Cancel] = []
    await bus.subscribe(on, Cancel, got.append)
    await place.raw(on, garbage)
    await bus.publish(on, cancel())
    await eventually(lambda: got and malformed_count() == before + 1)
    assert got == [cancel()]


async def test_malformed_messages_are_logged_once_per_kind(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    bus, on, before = await place.bus("a"), subject(), malformed_count()
    await bus.subscribe(on, Cancel, lambda message: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await place.raw(on, b"garbage")
        await eventually(lambda: malformed_count() == before + 3)
    assert len([record for record in caplog.records if "malformed cancel.v1" in record.getMessage()]) == 1


async def test_a_listener_that_raises_loses_that_message_only(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    got: list[int] = []

    def listener(message: Cancel) -> None:
        if message.attempt == 0:
            raise RuntimeError("bug")
        got.append(message.attempt)

    await bus.subscribe(on, Cancel, listener)
    await bus.publish(on, cancel(0))
    await bus.publish(on, cancel(1))
    await eventually(lambda: got == [1])


async def test_publish_refuses_more_than_max_payload_and_the_connection_lives(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    got: list[Cancel] = []
    await bus.subscribe(on, Cancel, got.append)
    too_large = cancel(request_id="x" * bus.max_payload_bytes)
    since_s = bus.connected_since_s
    with pytest.raises(PayloadTooLarge, match=str(bus.max_payload_bytes)):
        await bus.publish(on, too_large)
    with pytest.raises(PayloadTooLarge):
        await bus.request(on, too_large, Ack, timeout_s=1.0)
    with pytest.raises(PayloadTooLarge):
        await bus.publish_event(event_subject(), too_large, message_id=uuid.uuid4().hex)
    just_right = cancel(request_id="x" * (bus.max_payload_bytes - 100))
    await bus.publish(on, just_right)
    await eventually(lambda: got == [just_right])
    assert bus.connected_since_s == since_s


async def test_headers_count_towards_max_payload(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    empty_bytes = len(b"\x83\xa4kind\xa9cancel.v1\xaarequest_id\xdb0000\xa7attempt\x00")
    message = cancel(request_id="x" * (bus.max_payload_bytes - empty_bytes - 2))
    await bus.publish(on, message)
    with TracerProvider().get_tracer("test").start_as_current_span("sender"), pytest.raises(PayloadTooLarge):
        await bus.publish(on, message)


async def test_each_responder_gets_every_request_and_the_first_answer_counts(place: Place) -> None:
    caller, on = await place.bus("caller"), subject()
    heard = {"hangs": 0, "answers": 0}
    release = asyncio.Event()

    async def hang(message: Cancel) -> Ack:
        heard["hangs"] += 1
        await release.wait()
        return Ack()

    async def reply(message: Cancel) -> Ack:
        heard["answers"] += 1
        return Ack()

    await (await place.bus("hangs")).respond(on, Cancel, hang)
    await (await place.bus("answers")).respond(on, Cancel, reply)
    for _ in range(20):
        assert await caller.request(on, cancel(), Ack, timeout_s=60) == Ack()
    await eventually(lambda: heard == {"hangs": 20, "answers": 20})  # who hangs may hear it after the answer
    release.set()


async def test_responders_answer_concurrently_and_to_their_own_caller(place: Place) -> None:
    here, there, on = await place.bus("here"), await place.bus("there"), subject()
    running = 0
    together = asyncio.Event()

    async def echo(message: Cancel) -> Cancel:
        nonlocal running
        running += 1
        if running == 5:
            together.set()
        await together.wait()
        return message

    await there.respond(on, Cancel, echo)
    asked = [cancel(n) for n in range(5)]
    replies = await asyncio.gather(*(here.request(on, message, Cancel, timeout_s=60) for message in asked))
    assert list(replies) == asked


async def test_a_request_that_nobody_hears_fails_at_once(place: Place) -> None:
    bus = await place.bus("a")
    with pytest.raises(NoResponder):
        async with asyncio.timeout(WAIT_S):
            await bus.request(subject(), cancel(), Ack, timeout_s=10 * WAIT_S)


async def test_a_slow_responder_ends_in_a_deadline_and_stays_usable(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    release = asyncio.Event()

    async def slow(message: Cancel) -> Ack:
        if message.attempt == 0:
            await release.wait()
        return Ack()

    await bus.respond(on, Cancel, slow)
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
        await bus.request(on, cancel(0), Ack, timeout_s=0.1)
    release.set()
    assert await bus.request(on, cancel(1), Ack, timeout_s=60) == Ack()


@pytest.mark.parametrize(
    "error",
    [
        ModelNotFound("no model 'ä'\nsecond line: 100 % \r\n", param="model"),
        Overloaded("full", retry_after_s=0.25),
        NoResponder("x" * 3000),
        BlitzError(""),
    ],
)
async def test_a_typed_error_reaches_the_caller_whole(place: Place, error: BlitzError) -> None:
    here, there, on = await place.bus("here"), await place.bus("there"), subject()

    async def refuse(message: Cancel) -> Ack:
        raise error

    await there.respond(on, Cancel, refuse)
    with pytest.raises(BlitzError) as caught:
        await here.request(on, cancel(), Ack, timeout_s=60)
    assert caught.value.code == error.code
    assert error.message.strip() in caught.value.message
    assert (caught.value.param, caught.value.retry_after_s) == (error.param, error.retry_after_s)
    assert type(error) in (type(caught.value), BlitzError)


async def test_a_bug_in_a_responder_is_answered_internal_and_logged(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    bus, on = await place.bus("a"), subject()

    async def buggy(message: Cancel) -> Ack:
        if message.attempt == 0:
            raise KeyError("secret")
        return Ack()

    await bus.respond(on, Cancel, buggy)
    with pytest.raises(Internal, match="KeyError") as caught:
        await bus.request(on, cancel(0), Ack, timeout_s=60)
    assert "secret" not in caught.value.message
    assert any(record.exc_info for record in caplog.records)
    assert await bus.request(on, cancel(1), Ack, timeout_s=60) == Ack()


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_garbage_request_is_answered_malformed_message(place: Place, garbage: bytes) -> None:
    bus, on, before = await place.bus("a"), subject(), malformed_count()
    await bus.respond(on, Cancel, acknowledge)
    headers = await place.raw_request(on, garbage)
    assert headers["Blitz-Error-Code"] == "malformed_message"
    assert headers["Nats-Service-Error-Code"] == "400"
    assert headers["Nats-Service-Error"]
    assert malformed_count() == before + 1
    assert await bus.request(on, cancel(), Ack, timeout_s=60) == Ack()


async def test_a_reply_of_another_kind_is_malformed_for_the_caller(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    await bus.respond(on, Cancel, acknowledge)
    with pytest.raises(MalformedMessage, match="Cancel"):
        await bus.request(on, cancel(), Cancel, timeout_s=60)


async def test_a_reply_over_max_payload_is_answered_typed(place: Place) -> None:
    bus, on = await place.bus("a"), subject()

    async def verbose(message: Cancel) -> Cancel:
        return cancel(request_id="x" * bus.max_payload_bytes)

    await bus.respond(on, Cancel, verbose)
    with pytest.raises(PayloadTooLarge):
        await bus.request(on, cancel(), Cancel, timeout_s=60)


async def test_closing_a_responder_finishes_what_runs_and_then_nobody_listens(place: Place) -> None:
    here, there, on = await place.bus("here"), await place.bus("there"), subject()
    started = asyncio.Event()

    async def slow(message: Cancel) -> Ack:
        started.set()
        await asyncio.sleep(0.1)
        return Ack()

    subscription = await there.respond(on, Cancel, slow)
    asked = asyncio.create_task(here.request(on, cancel(), Ack, timeout_s=60))
    await started.wait()
    await subscription.close()
    assert await asked == Ack()
    with pytest.raises(NoResponder):
        await here.request(on, cancel(), Ack, timeout_s=60)


async def test_events_arrive_in_order_once_per_message_id_and_only_new_ones(place: Place) -> None:
    here, there, on = await place.bus("here"), await place.bus("there"), event_subject()
    await here.publish_event(on, cancel(0), message_id=f"{on}-before")
    got: list[int] = []

    async def listen(message: Stored[Cancel]) -> None:
        await asyncio.sleep(0.001)
        got.append(message.event.attempt)

    await there.subscribe_events(on, Cancel, listen)
    for attempt in (1, 2, 2, 3, 1):
        await here.publish_event(on, cancel(attempt), message_id=f"{on}-{attempt}")
    await eventually(lambda: len(got) >= 3)
    await asyncio.sleep(0.05)
    assert got == [1, 2, 3]


async def test_event_listeners_are_awaited_one_at_a_time(place: Place) -> None:
    bus, on = await place.bus("a"), event_subject()
    running = most = done = 0

    async def listen(message: Stored[Cancel]) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        done += 1

    await bus.subscribe_events(on, Cancel, listen)
    for attempt in range(5):
        await bus.publish_event(on, cancel(attempt), message_id=f"{on}-{attempt}")
    await eventually(lambda: done == 5)
    assert most == 1


async def test_an_event_whose_listener_raises_does_not_come_again(place: Place) -> None:
    bus, on = await place.bus("a"), event_subject()
    got: list[int] = []

    async def listen(message: Stored[Cancel]) -> None:
        got.append(message.event.attempt)
        if message.event.attempt == 0:
            raise Overloaded("no")
        if message.event.attempt == 1:
            raise RuntimeError("bug")

    await bus.subscribe_events(on, Cancel, listen)
    for attempt in range(3):
        await bus.publish_event(on, cancel(attempt), message_id=f"{on}-{attempt}")
    await eventually(lambda: 2 in got)
    assert got == [0, 1, 2]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_garbage_event_is_dropped_and_the_next_one_comes(place: Place, garbage: bytes) -> None:
    bus, on, before = await place.bus("a"), event_subject(), malformed_count()
    got: list[Cancel] = []

    async def listen(message: Stored[Cancel]) -> None:
        got.append(message.event)

    await bus.subscribe_events(on, Cancel, listen)
    await place.raw_event(on, garbage)
    await bus.publish_event(on, cancel(), message_id=on)
    await eventually(lambda: got)
    assert got == [cancel()]
    assert malformed_count() == before + 1


async def test_closing_an_event_subscription_awaits_its_listener(place: Place) -> None:
    bus, on = await place.bus("a"), event_subject()
    started = asyncio.Event()
    finished = False

    async def listen(message: Stored[Cancel]) -> None:
        nonlocal finished
        started.set()
        await asyncio.sleep(0.1)
        finished = True

    subscription = await bus.subscribe_events(on, Cancel, listen)
    await bus.publish_event(on, cancel(), message_id=on)
    await started.wait()
    await subscription.close()
    assert finished


async def test_past_events_are_read_back_in_order_the_newest_of_them(place: Place) -> None:
    bus, name = await place.bus("planner"), event_subject()
    assert await bus.past_events(name, Cancel, limit=10) == ()
    for attempt in range(5):
        await bus.publish_event(name, Cancel(request_id="r", attempt=attempt), message_id=uuid.uuid4().hex)
    await place.raw_event(name, b"\xc1")
    await bus.publish_event(event_subject(), Cancel(request_id="another", attempt=9), message_id=uuid.uuid4().hex)
    assert [c.event.attempt for c in await bus.past_events(name, Cancel, limit=10)] == [0, 1, 2, 3, 4]
    assert [c.event.attempt for c in await bus.past_events(name, Cancel, limit=3)] == [3, 4]


@pytest.mark.parametrize("wall_s", [-30.0, 0.0, 30.0])
async def test_how_old_an_event_is_does_not_depend_on_the_readers_wall_clock(
    place: Place, wall_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, on = await place.bus("planner"), await place.bus("worker"), event_subject()
    real, heard = time.time, list[tuple[Stored[Cancel], float]]()
    monkeypatch.setattr(time, "time", lambda: real() + wall_s)

    async def listen(stored: Stored[Cancel]) -> None:
        heard.append((stored, time.monotonic()))

    await there.subscribe_events(on, Cancel, listen)
    before_s = time.monotonic()
    await here.publish_event(on, cancel(), message_id=on)
    await eventually(lambda: heard)
    [(stored, heard_s)] = heard
    assert before_s - 5.0 < stored.at_s <= heard_s
    [past] = await here.past_events(on, Cancel, limit=1)
    assert before_s - 5.0 < past.at_s <= time.monotonic()


async def test_records_are_a_stream_of_their_own(place: Place) -> None:
    bus, name = await place.bus("planner"), subjects.scale_records()
    await bus.publish_event(name, Cancel(request_id="r", attempt=1), message_id=uuid.uuid4().hex)
    assert (await bus.past_events(name, Cancel, limit=500))[-1].event.attempt == 1


async def test_past_events_cannot_be_read_while_disconnected(place: Place) -> None:
    bus = await place.bus("planner")
    await place.go_down()
    with pytest.raises(Unavailable):
        async with asyncio.timeout(WAIT_S):
            await bus.past_events(event_subject(), Cancel, limit=1)
    await place.go_up()


async def test_trace_context_reaches_every_handler_and_no_other(place: Place) -> None:
    here, there = await place.bus("here"), await place.bus("there")
    tracer = TracerProvider().get_tracer("test")
    seen: dict[str, list[str]] = {"listener": [], "responder": [], "event": []}

    async def respond(message: Cancel) -> Ack:
        await asyncio.sleep(0)
        seen["responder"].append(current_traceparent())
        return Ack()

    async def listen(message: Stored[Cancel]) -> None:
        seen["event"].append(current_traceparent())

    plain, rpc, event = subject(), subject(), event_subject()
    with tracer.start_as_current_span("subscriber's own, which must not leak"):
        await there.subscribe(plain, Cancel, lambda message: seen["listener"].append(current_traceparent()))
        await there.respond(rpc, Cancel, respond)
        await there.subscribe_events(event, Cancel, listen)

    async def send(number: int) -> None:
        await here.publish(plain, cancel())
        await here.request(rpc, cancel(), Ack, timeout_s=60)
        await here.publish_event(event, cancel(), message_id=f"{event}-{number}")

    with tracer.start_as_current_span("sender"):
        expected = current_traceparent()
        await send(0)
    assert not trace.get_current_span().get_span_context().is_valid
    await send(1)
    await eventually(lambda: all(len(contexts) == 2 for contexts in seen.values()))
    assert expected
    assert seen == {"listener": [expected, ""], "responder": [expected, ""], "event": [expected, ""]}


async def test_close_flushes_awaits_handlers_and_ends_the_bus(place: Place) -> None:
    here, there, plain, rpc = await place.bus("here"), await place.bus("there"), subject(), subject()
    got: list[Cancel] = []
    started = asyncio.Event()

    async def slow(message: Cancel) -> Ack:
        started.set()
        await asyncio.sleep(0.1)
        return Ack()

    await there.subscribe(plain, Cancel, got.append)
    await here.respond(rpc, Cancel, slow)
    asked = asyncio.create_task(there.request(rpc, cancel(), Ack, timeout_s=60))
    await started.wait()
    for attempt in range(100):
        await here.publish(plain, cancel(attempt))
    await here.close()
    assert await asked == Ack()
    await eventually(lambda: len(got) == 100)
    assert here.connected_since_s is None
    with pytest.raises(Unavailable):
        await here.publish(plain, cancel())
    await here.close()


async def test_an_event_that_was_given_up_while_the_bus_was_down_does_not_come_later(place: Place) -> None:
    bus, on = await place.bus("a"), event_subject()
    await bus.publish_event(on, cancel(0), message_id=f"{on}-before")
    await place.go_down()
    await eventually(lambda: bus.connected_since_s is None)
    with pytest.raises(Unavailable):
        await bus.publish_event(on, cancel(1), message_id=f"{on}-given-up")
    await place.go_up()
    await eventually(lambda: bus.connected_since_s is not None)
    await bus.publish_event(on, cancel(2), message_id=f"{on}-after")
    stored = await bus.past_events(on, Cancel, limit=9)
    assert [found.event for found in stored] == [cancel(0), cancel(2)]
