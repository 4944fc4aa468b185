from __future__ import annotations

import asyncio

import pytest

from shared import identity, subjects
from shared.errors import DuplicateId
from shared.messages.identity import GetHolder, Holder
from tests.shared.bus.memory import MemoryBroker

SUBJECT = subjects.worker_holder("w0")


async def test_an_id_that_nobody_holds_is_free() -> None:
    await identity.refuse_if_held(MemoryBroker().bus("new"), SUBJECT, "worker id 'w0'")


async def test_an_id_that_a_living_process_holds_is_refused_until_it_is_gone() -> None:
    broker = MemoryBroker()
    [held] = await identity.hold(broker.bus("old"), identity.new_incarnation(), SUBJECT)
    with pytest.raises(DuplicateId, match=r"worker id 'w0' is held by process \d+ on .*, which lives"):
        await identity.refuse_if_held(broker.bus("new"), SUBJECT, "worker id 'w0'")
    await held.close()
    await identity.refuse_if_held(broker.bus("new"), SUBJECT, "worker id 'w0'")


async def test_a_holder_that_does_not_answer_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()

    async def hang(_: GetHolder) -> Holder:
        await asyncio.Event().wait()
        raise AssertionError

    await broker.bus("old").respond(SUBJECT, GetHolder, hang)
    monkeypatch.setattr(identity, "ASK_TIMEOUT_S", 0.05)
    await identity.refuse_if_held(broker.bus("new"), SUBJECT, "worker id 'w0'")


def test_names_of_starts_differ_and_fit_into_subjects() -> None:
    names = {identity.new_incarnation() for _ in range(100)}
    assert len(names) == 100
    assert all(name in subjects.worker_holder("w0", name).split(".") for name in names)


@pytest.mark.parametrize("wall_s", [-30.0, 0.0, 30.0])
async def test_a_holder_says_for_how_long_it_has_held_its_id_whatever_its_wall_clock_says(
    monkeypatch: pytest.MonkeyPatch, wall_s: float
) -> None:
    bus, now_s = MemoryBroker().bus("old"), 100.0
    monkeypatch.setattr(identity.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(identity.time, "time", lambda: 1e9 + wall_s)
    monkeypatch.setattr(identity.time, "time_ns", lambda: int((1e9 + wall_s) * 1e9))
    await identity.hold(bus, identity.new_incarnation(), SUBJECT)
    now_s = 107.0
    assert (await bus.request(SUBJECT, GetHolder(), Holder, timeout_s=1.0)).held_s == 7.0


@pytest.mark.parametrize("apart_s", [0.0, 0.5, 1.9, 1.995, 2.0, 2.005, 2.1, 60.0])
@pytest.mark.parametrize("ways_s", [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01), (5.0, 0.01)])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_two_holders_at_most_one_gives_way_and_the_younger_one_where_that_is_clear(
    apart_s: float, ways_s: tuple[float, float], names: tuple[str, str]
) -> None:
    old, new = names

    def seen(name: str, held_s: float, way_s: float) -> Holder:
        return Holder(incarnation=name, host="h", pid=1, held_s=held_s - way_s)

    old_goes = identity.gives_way(old, 100.0 + apart_s, seen(new, 100.0, ways_s[0]))
    new_goes = identity.gives_way(new, 100.0, seen(old, 100.0 + apart_s, ways_s[1]))
    assert not (old_goes and new_goes)
    if apart_s > identity.TIE_S + max(ways_s):
        assert (old_goes, new_goes) == (False, True)
    elif apart_s + max(ways_s) < identity.TIE_S:
        assert old_goes or new_goes
