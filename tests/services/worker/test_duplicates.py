"""Two workers with one id."""

from __future__ import annotations

import asyncio

import pytest

from shared import identity, subjects
from shared.errors import DuplicateId, NoResponder
from shared.messages.common import Ack
from shared.messages.generation import Resend
from tests.processes import process
from tests.services.waiting import eventually
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.services.workers import RunningWorker, worker_config


def second(worker: LoneWorker) -> RunningWorker:
    return RunningWorker(worker.broker, worker.fabric, worker_config("w0"), incarnation="2")


async def test_a_second_worker_of_an_id_ends_before_it_hears_anything_that_is_meant_for_the_first() -> None:
    async with lone_worker() as first:
        twin = second(first)
        with pytest.raises(DuplicateId, match="worker id 'w0' is held by process"):
            await asyncio.wait_for(twin.task, 5)
        assert not twin.service.registered.is_set()
        assert not first.worker.task.done()


async def test_a_worker_that_is_told_that_another_one_lives_ends() -> None:
    async with lone_worker() as first:
        first.pool.errors["heartbeat"].append(DuplicateId("worker id 'w0' is held by process 7 on h, which lives"))
        with pytest.raises(DuplicateId, match="process 7"):
            await asyncio.wait_for(first.worker.task, 5)
        with pytest.raises(NoResponder):
            await first.planner.request(
                subjects.worker_resend(process("w0")), Resend(request_id="r", attempt=1, offset=0), Ack, timeout_s=1.0
            )
        await identity.refuse_if_held(first.planner, subjects.worker_holder("w0"), "worker id 'w0'")


async def test_a_worker_comes_in_at_once_after_another_one_of_its_id_has_stopped() -> None:
    async with lone_worker() as first:
        await first.worker.stop()
        first.worker = second(first)
        await eventually(first.worker.service.registered.is_set)
