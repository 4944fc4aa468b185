"""Each user of a real NATS server against each subject: it may what ``shared.permissions`` grants, and no more."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Iterator

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared import subjects
from shared.bus.nats_link import round_trip
from shared.permissions import KINDS, SERVICE_VERBS, TABLE, USERS, Grant, Row, grant, inbox_prefix
from tests.servers import Server, guarded_nats_server, password_of
from tests.wait_until import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAMS = {subjects.PLAN_STREAM: [subjects.plans()], subjects.RECORD_STREAM: [f"{subjects.PREFIX}.records.>"]}
ROWS = [pytest.param(row, id=row.subject) for row in TABLE]
EVENTS = [pytest.param(row, id=row.subject) for row in TABLE if row.stream]
ASKED = [pytest.param(row, id=row.subject) for row in TABLE if row.receivers and not row.stream and row.senders]
PAIRS = [(user, other) for user in USERS for other in USERS]


class One:
    """A connection, and what the server refused it."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.refused: list[str] = []
        self.client = Client()

    async def connect(self, url: str) -> None:
        async def on_error(error: Exception) -> None:
            self.refused.append(str(error))

        await self.client.connect(
            url,
            user=self.user,
            password=password_of(self.user),
            inbox_prefix=f"{inbox_prefix(self.user)}.mine",
            error_cb=on_error,
        )

    async def may_publish(self, subject: str, reply: str = "") -> bool:
        self.refused.clear()
        await self.client.publish(subject, b"{}", reply=reply)
        await round_trip(self.client)
        return not self.refused

    async def may_subscribe(self, subject: str) -> bool:
        self.refused.clear()
        subscription = await self.client.subscribe(subject)
        await round_trip(self.client)
        await subscription.unsubscribe()
        return not self.refused

    async def may_ask(self, subject: str, question: object) -> bool:
        """Whether JetStream hears it, whatever it answers."""
        self.refused.clear()
        asking = asyncio.create_task(self.client.request(subject, json.dumps(question).encode(), timeout=60))
        await asyncio.sleep(0)
        while not asking.done() and not self.refused:
            await asyncio.wait([asking], timeout=0.005)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return not self.refused


class Guarded:
    """A server with its users, and a witness who may do everything."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.witness = One("witness")
        self.users = {user: One(user) for user in USERS}


@pytest.fixture(autouse=True)
def patient_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server refuses is heard, however late it answers."""
    monkeypatch.setattr("shared.bus.nats_link.ROUND_TRIP_S", WAIT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    everything = {"witness": (password_of("witness"), Grant((">",), (">",)))}
    server = guarded_nats_server(tmp_path_factory.mktemp("guarded"), others=everything)
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def guarded(server: Server) -> AsyncIterator[Guarded]:
    made = Guarded(server.url)
    for one in (made.witness, *made.users.values()):
        await one.connect(server.url)
    for name, taken in STREAMS.items():
        await made.witness.client.jetstream().add_stream(name=name, subjects=taken)
    yield made
    for one in (made.witness, *made.users.values()):
        await one.client.close()


def example(subject: str) -> str:
    return subject.replace("*", "some-name")


async def test_every_subject_has_a_row_and_every_operation_one_of_its_own() -> None:
    built = {
        build
        for _, build in inspect.getmembers(subjects, inspect.isfunction)
        if inspect.signature(build).return_annotation == "str"
        if build.__module__ == subjects.__name__ and not build.__name__.startswith("_")
    }
    # All of a stream's subjects together: patterns, on which nobody sends.
    assert {row.build for row in TABLE} == built - {subjects.plans, subjects.records}
    assert len({row.subject for row in TABLE}) == len(TABLE)
    rows = {row.subject for row in TABLE}
    assert {subjects.pool(operation) for operation in subjects.POOL_OPERATIONS} <= rows
    assert {subjects.planner(operation) for operation in subjects.PLANNER_OPERATIONS} <= rows


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("user", USERS)
async def test_only_those_that_send_on_a_subject_may(guarded: Guarded, user: str, row: Row) -> None:
    one, subject, got = guarded.users[user], example(row.subject), []
    if row.build is subjects.nobody:
        assert await one.may_publish(subject)
        return

    async def on_message(msg: Msg) -> None:
        got.append(msg)

    subscription = await guarded.witness.client.subscribe(subject, cb=on_message)
    await round_trip(guarded.witness.client)
    may = await one.may_publish(subject)
    # The server has passed it on before it answered the round trip above, and this asks behind it.
    await round_trip(guarded.witness.client)
    await subscription.drain()  # type: ignore[no-untyped-call]
    assert may is (user in row.senders), one.refused
    assert bool(got) is (user in row.senders)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("user", USERS)
async def test_only_those_that_receive_a_subject_hear_it(guarded: Guarded, user: str, row: Row) -> None:
    one, subject = guarded.users[user], example(row.subject)
    wanted = (user in row.receivers and not row.stream) or (user == "operator" and row.build is subjects.departures)
    assert await one.may_subscribe(subject) is wanted, one.refused
    if "*" in row.subject:
        assert await one.may_subscribe(row.subject) is wanted


@pytest.mark.parametrize("row", EVENTS)
@pytest.mark.parametrize("user", USERS)
async def test_only_those_that_receive_an_event_get_a_consumer_of_it(guarded: Guarded, user: str, row: Row) -> None:
    one, subject, name = guarded.users[user], example(row.subject), f"of-{user}"
    consumer = {"deliver_subject": f"{inbox_prefix(user)}.mine.x", "ack_policy": "none", "filter_subject": subject}
    question = {"stream_name": row.stream, "config": {**consumer, "name": name}}
    create = f"$JS.API.CONSUMER.CREATE.{row.stream}"
    assert await one.may_ask(f"{create}.{name}.{subject}", question) is (user in row.receivers), one.refused
    # Without the filter on the subject, or with none at all, the server could not tell what it is of.
    for other in (create, f"{create}.{name}", f"$JS.API.CONSUMER.DURABLE.CREATE.{row.stream}.{name}"):
        assert not await one.may_ask(other, question)


@pytest.mark.parametrize(
    "verb", ["CREATE", "UPDATE", "DELETE", "PURGE", "RESTORE", "SNAPSHOT", "MSG.GET", "MSG.DELETE"]
)
@pytest.mark.parametrize("user", USERS)
async def test_only_the_planner_makes_streams_and_nobody_takes_from_them(
    guarded: Guarded, user: str, verb: str
) -> None:
    one = guarded.users[user]
    for stream in STREAMS:
        wanted = user == "planner" and verb in {"CREATE", "UPDATE"}
        assert await one.may_ask(f"$JS.API.STREAM.{verb}.{stream}", {}) is wanted, one.refused
    assert not await one.may_ask(f"$JS.API.STREAM.{verb}.OTHER", {})


@pytest.mark.parametrize("user", USERS)
async def test_a_foreign_consumer_cannot_be_acknowledged_deleted_or_pulled_from(guarded: Guarded, user: str) -> None:
    one, stream = guarded.users[user], subjects.PLAN_STREAM
    for subject in (
        f"$JS.ACK.{stream}.somebodys.1.1.1.1700000000000000000.0",
        f"$JS.API.CONSUMER.DELETE.{stream}.somebodys",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.somebodys",
        f"$JS.API.CONSUMER.PAUSE.{stream}.somebodys",
    ):
        assert not await one.may_publish(subject), subject


@pytest.mark.parametrize(("user", "other"), PAIRS)
async def test_a_foreign_inbox_can_neither_be_read_nor_written_to_unasked(
    guarded: Guarded, user: str, other: str
) -> None:
    one, inbox = guarded.users[user], f"{inbox_prefix(other)}.mine.abc"
    assert not await one.may_publish(inbox)
    assert await one.may_subscribe(inbox) is (user == other)
    if user != other:
        assert not await one.may_subscribe(f"{inbox_prefix(other)}.>")


@pytest.mark.parametrize(
    "subject", [">", "_INBOX.>", "_INBOX.*.>", "blitz.>", "blitz.v1.>", "$SYS.>", "$JS.>", "$SRV.>"]
)
@pytest.mark.parametrize("user", USERS)
async def test_nobody_listens_to_everything(guarded: Guarded, user: str, subject: str) -> None:
    assert not await guarded.users[user].may_subscribe(subject)
    assert not await guarded.users[user].may_publish("$SYS.REQ.SERVER.PING")


@pytest.mark.parametrize("verb", SERVICE_VERBS)
@pytest.mark.parametrize("user", USERS)
async def test_discovery_is_asked_by_the_operator_and_answered_in_ones_own_name(
    guarded: Guarded, user: str, verb: str
) -> None:
    one, answers = guarded.users[user], user != "operator"
    for kind in KINDS:
        assert await one.may_publish(f"$SRV.{verb}.{kind}") is (user == "operator")
        for subject in (f"$SRV.{verb}.{kind}", f"$SRV.{verb}.{kind}.id"):
            assert await one.may_subscribe(subject) is (answers and user == kind)
    assert await one.may_subscribe(f"$SRV.{verb}") is answers


@pytest.mark.parametrize("row", ASKED)
async def test_whoever_is_asked_may_answer_as_often_as_it_should_and_whoever_is_not_may_not(
    guarded: Guarded, row: Row
) -> None:
    asked: list[str] = []
    inbox = f"{inbox_prefix('operator')}.asked.{row.subject.replace('*', 'x')}"

    async def on_question(msg: Msg) -> None:
        asked.append(msg.reply)

    for kind in row.receivers:
        one, replies = guarded.users[kind], grant(kind).replies
        subscription = await one.client.subscribe(example(row.subject), cb=on_question)
        await round_trip(one.client)
        await guarded.witness.may_publish(example(row.subject), reply=f"{inbox}.{kind}")
        await round_trip(one.client)
        await subscription.drain()  # type: ignore[no-untyped-call]
        assert asked.pop() == f"{inbox}.{kind}"
        allowed = replies.max_messages if replies is not None else 0
        may = [await one.may_publish(f"{inbox}.{kind}") for _ in range(allowed + 1)]
        assert may == [True] * allowed + [False]


async def test_a_client_without_credentials_or_with_wrong_ones_stays_outside(guarded: Guarded) -> None:
    for wrong in ({}, {"user": "pool", "password": password_of("worker")}, {"user": "root", "password": ""}):
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await nats.connect(guarded.url, allow_reconnect=False, error_cb=_ignore, **wrong)


async def _ignore(error: Exception) -> None:
    del error
