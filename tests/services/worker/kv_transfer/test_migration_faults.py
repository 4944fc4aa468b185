"""What may happen to a request while it moves: one of the two decodes it to its end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import pytest

from services.worker.core.kv_admission import move_history
from services.worker.core.scheduling import leaving
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.kv_transfer import decode_client, migration, receiver
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.decode_side import Gate
from tests.services.worker.kv_transfer.lossy import LossyBroker
from tests.services.worker.kv_transfer.moving import PROMPT, Moving, moving
from tests.services.workers import RunningWorker
from tests.wait_until import eventually


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(decode_client, "GONE_S", 0.5)
    monkeypatch.setattr(decode_client, "LEASE_S", 20.0)
    monkeypatch.setattr(decode_client, "RENEW_S", 0.4)
    monkeypatch.setattr(receiver, "MAX_WAIT_S", 0.05)
    monkeypatch.setattr(move_history, "AGAIN_S", 0.3)


def gate(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch, *, layer: int = 1) -> Gate:
    """Holds the KV that comes to it before this layer."""
    engine = worker.serving.engine.loop.engine
    assert isinstance(engine, MockEngine)
    return Gate(engine, monkeypatch, layer=layer)


def when_it_begins(worker: RunningWorker, do: Callable[[], object]) -> None:
    """Called once the worker has taken a request over, before it answers."""
    inbox, loop = worker.service.parts.inbox, asyncio.get_running_loop()
    real = inbox.announce

    def announce(sequences: Iterable[ActiveSequence]) -> None:
        loop.call_soon_threadsafe(do)
        real(sequences)

    inbox.announce = announce  # type: ignore[method-assign]


async def preempt(worker: RunningWorker, request_id: str) -> None:
    """As if its blocks were another's: it is computed again."""
    table = worker.serving.engine.loop.scheduler.table

    def preempt(_: object) -> None:
        (victim,) = [sequence for sequence in table.running if sequence.request_id == request_id]
        table.running.remove(victim)
        if table.flies(victim):
            table.torn.add(id(victim))
        table.free(victim)
        victim.num_computed = 0
        table.wait(victim)

    await asyncio.wrap_future(worker.serving.engine.call(preempt))


async def whole(fleet: Moving, request_id: str, *, max_tokens: int) -> None:
    """Its tokens are all right and there, over the attempts that it took."""
    await eventually(lambda: _known(fleet, request_id, max_tokens) == set(range(max_tokens)))


def _known(fleet: Moving, request_id: str, max_tokens: int) -> set[int]:
    tokens, known = expected_tokens(max_tokens, PROMPT), set[int]()
    for part in fleet.gateway.parts.get((request_id, 1), []):
        assert part.token_ids == tokens[part.offset : part.offset + len(part.token_ids)], part
        assert part.finish_reason in (None, "length"), part
        known.update(range(part.offset, part.offset + len(part.token_ids)))
    return known


async def test_the_destination_dies_while_kv_comes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.hold("r")
        await fleet.submit("r", max_tokens=80)
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        held.open()
        await there.kill()
        await fleet.go_on()
        await fleet.ends("r")
        assert fleet.said_by("r") == ["w0"]
        assert fleet.outcomes().get("moved", 0) == 0


async def test_the_destination_dies_with_the_request_that_it_has_begun(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        killed: list[asyncio.Task[None]] = []
        when_it_begins(there, lambda: killed.append(asyncio.create_task(there.kill())))
        await fleet.hold("r")
        await fleet.submit("r")
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(lambda: fleet.outcomes())
        # Whether or not the answer came before the end, the request is not decoded here any more.
        assert set(fleet.outcomes()) <= {"moved", "unknown"}
        said = [p for p in fleet.gateway.parts["r", 1] if p.finish_reason]
        assert [p.error.code for p in said if p.error] in ([], ["unavailable"])
        await asyncio.gather(*killed)


async def test_the_answer_to_begin_never_comes(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        parts = there.service.parts.kv_receiver
        when_it_begins(there, there.bus.go_down)
        await fleet.submit("r", max_tokens=3000)
        await fleet.decoding("r")
        await fleet.drain(there)
        end = await fleet.gateway.end_of("r")
        assert end.error is not None
        assert end.error.code == "unavailable", "either may have it: the gateway makes another attempt"
        await eventually(lambda: fleet.outcomes() == {"unknown": 1})
        there.bus.go_up()
        assert parts.begun_at_s(("r", 1)) is not None
        await fleet.gateway.cancel("w1", "r")  # as the gateway does with what is said of an older attempt


async def test_where_it_comes_from_dies_while_kv_comes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.hold("r")
        await fleet.submit("r")
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        await fleet.here.kill()
        held.open()
        said = len(fleet.gateway.tokens("r"))
        output = fleet.gateway.tokens("r")
        # Nobody renews its room; the gateway's next attempt goes there.
        await fleet.gateway.submit(
            "w1", there.serving.instance_id, "r", attempt=2, prompt=PROMPT, output=output, max_tokens=said + 5
        )
        await fleet.gateway.end_of("r", attempt=2)
        assert fleet.gateway.tokens("r", attempt=2, start=said) == expected_tokens(said + 5, PROMPT)[said:]


async def test_it_ends_while_its_kv_travels(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.hold("r")
        await fleet.submit("r", max_tokens=40)
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        await fleet.go_on()
        await fleet.ends("r")
        held.open()
        await fleet.spare()
        await eventually(lambda: fleet.outcomes() == {"ended": 1})
        assert fleet.said_by("r") == ["w0"]


async def test_its_client_leaves_while_its_kv_travels(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.submit("r", max_tokens=3000)
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        await fleet.gateway.cancel("w0", "r")
        held.open()
        await fleet.spare()
        await eventually(lambda: fleet.outcomes() == {"ended": 1})


async def test_a_cancel_that_still_goes_to_where_it_was_follows_it(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        await fleet.submit("r", max_tokens=3000)
        await fleet.decoding("r")
        await fleet.drain(*fleet.others)
        await eventually(lambda: fleet.outcomes() == {"moved": 1})
        await fleet.gateway.cancel("w0", "r")


async def test_it_is_preempted_while_its_kv_travels(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.hold("r")
        await fleet.submit("r", max_tokens=150)
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        await preempt(fleet.here, "r")
        await fleet.go_on()
        held.open()
        await eventually(lambda: "kept" in fleet.outcomes())
        await fleet.ends("r")


async def test_a_request_that_stays_for_a_reason_of_its_own_does_not_keep_others_from_where_it_went(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "REFUSED_S", 1e6)
    monkeypatch.setattr(migration, "MOVING_AT_ONCE", 1)
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        for name in ("a", "b"):
            await fleet.submit(name, max_tokens=1500)
        await fleet.decoding("a", "b")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        ((first, _),) = fleet.here.service.parts.departures.transfers
        await preempt(fleet.here, first)
        held.open()
        await eventually(lambda: "moved" in fleet.outcomes())
        assert fleet.outcomes()["kept"] == 1
        await fleet.spare()
        for name in ("a", "b"):
            await fleet.gateway.cancel("w1", name)


async def test_the_instance_is_taken_back_and_drains_again_while_kv_travels(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.hold("a", "b")
        for name in ("a", "b"):
            await fleet.submit(name, max_tokens=150)
        await fleet.decoding("a", "b")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        await fleet.drain(plan_id="revive", revive=True)
        await eventually(lambda: fleet.here.serving.state == "serving")
        await fleet.drain(there, plan_id="drain-2")
        await fleet.go_on()
        held.open()
        await fleet.ends("a", "b")
        await fleet.spare()


async def test_the_destination_drains_meanwhile(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.hold("r")
        await fleet.submit("r", max_tokens=100)
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        there.serving.drain()
        await fleet.go_on()
        held.open()
        await fleet.ends("r")
        await fleet.spare()


async def test_the_bus_is_away_for_a_while(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(redis_url) as fleet:
        (there,) = fleet.others
        held = gate(there, monkeypatch)
        await fleet.hold("r")
        await fleet.submit("r", max_tokens=150)
        await fleet.decoding("r")
        await fleet.drain(there)
        await eventually(held.inside.is_set)
        await fleet.go_on()
        for worker in fleet.workers:
            worker.bus.go_down()
        held.open()
        await asyncio.sleep(0.4)
        for worker in fleet.workers:
            worker.bus.go_up()
        await whole(fleet, "r", max_tokens=150)


async def test_questions_and_answers_get_lost(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A lease ends only if a dozen renewals in a row are lost.
    monkeypatch.setattr(decode_client, "LEASE_S", 40.0)
    monkeypatch.setattr(decode_client, "RENEW_S", 3.0)
    async with moving(redis_url, 3, stall_s=8.0) as fleet:
        lossy = LossyBroker(fleet.cluster.broker, 5, lost=0.3)
        names = [f"r{i}" for i in range(6)]
        await fleet.hold(*names)
        for name in names:
            await fleet.submit(name, max_tokens=250)
        await fleet.decoding(*names)
        await fleet.drain(*fleet.others)
        await eventually(lambda: fleet.outcomes().get("moved"))
        await fleet.go_on()
        for name in names:
            await whole(fleet, name, max_tokens=250)
        lossy.lost = 0.0
        await fleet.spare()


async def test_at_any_moment_the_tokens_are_those_of_an_undisturbed_request(redis_url: str) -> None:
    """Moves back and forth between three workers' instances, at random moments, of requests of all lengths."""
    chance = random.Random(1)
    async with moving(redis_url, 2, max_running_requests=16) as fleet:
        # The last one has not ended when a busy machine comes to the drain.
        lengths = {f"r{i}": 20 + 15 * i for i in range(11)} | {"r11": 600}
        names = list(lengths)
        for name, max_tokens in lengths.items():
            await fleet.submit(name, prompt=PROMPT[: chance.randrange(1, 100)], max_tokens=max_tokens)
            await asyncio.sleep(chance.random() * 0.02)
        await fleet.drain(*fleet.others)
        await fleet.ends(*names)
        await fleet.spare()
        assert fleet.outcomes()["moved"] > 0
