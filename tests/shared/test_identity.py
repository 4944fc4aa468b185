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


def test_a_later_starts_name_is_greater(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for now_s in (9.0, 10.0, 1_800_000_000.0):
        monkeypatch.setattr(identity.time, "time_ns", lambda now_s=now_s: int(now_s * 1e9))
        names.append(identity.new_incarnation())
    assert names == sorted(names)
    assert subjects.worker_holder("w0", names[0]).endswith(names[0])
