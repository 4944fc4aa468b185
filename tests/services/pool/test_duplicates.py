"""Two processes with one worker id."""

from __future__ import annotations

import msgspec
import pytest

from shared import subjects
from shared.errors import DuplicateId
from shared.identity import hold
from shared.messages.registry import WorkerHeartbeat
from tests.records import heartbeat
from tests.services.pool.test_service import Pool, pool

__all__ = ["pool"]


def of(incarnation: str, **fields: object) -> WorkerHeartbeat:
    report = heartbeat("w0", **fields)  # type: ignore[arg-type]
    return msgspec.structs.replace(report, worker=msgspec.structs.replace(report.worker, incarnation=incarnation))


async def held_by(pool: Pool) -> list[str]:
    return [row.worker.incarnation for row in (await pool.snapshot()).workers]


async def test_a_second_living_worker_of_an_id_is_refused_and_changes_nothing(pool: Pool) -> None:
    await hold(pool.broker.bus("first"), "one", subjects.worker_holder("w0", "one"))
    await pool.beat(of("one"))
    with pytest.raises(DuplicateId, match="worker id 'w0' is held by process"):
        await pool.beat(of("two"))
    assert await held_by(pool) == ["one"]
    await pool.beat(of("one", sequence=2))


async def test_a_worker_that_was_started_again_after_a_crash_comes_in_at_once(pool: Pool) -> None:
    [answering] = await hold(pool.broker.bus("first"), "one", subjects.worker_holder("w0", "one"))
    await pool.beat(of("one"))
    await answering.close()
    await pool.beat(of("two"))
    assert await held_by(pool) == ["two"]


async def test_a_report_of_a_dead_worker_that_comes_late_does_not_take_the_id_back(pool: Pool) -> None:
    await pool.beat(of("one"))
    await hold(pool.broker.bus("second"), "two", subjects.worker_holder("w0", "two"))
    await pool.beat(of("two"))
    with pytest.raises(DuplicateId):
        await pool.beat(of("one", sequence=9))
    assert await held_by(pool) == ["two"]


async def test_a_goodbye_is_never_refused(pool: Pool) -> None:
    await hold(pool.broker.bus("first"), "one", subjects.worker_holder("w0", "one"))
    await pool.beat(of("one"))
    await pool.beat(msgspec.structs.replace(of("two"), leaving=True))
    assert await held_by(pool) == ["one"]
