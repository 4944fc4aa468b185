"""Two workers with one id."""

from __future__ import annotations

import asyncio

import pytest

from shared import identity, subjects
from shared.bus.base import Stored
from shared.errors import DeadlineExceeded, DuplicateId, NoResponder
from shared.messages.common import Ack
from shared.messages.generation import Cancel, Resend, Submit
from shared.messages.identity import GetHolder, Holder
from shared.messages.live import WorkerOrder
from tests.processes import process
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.services.workers import RunningWorker, worker_config
from tests.wait_until import WAIT_S, eventually


def second(worker: LoneWorker) -> RunningWorker:
    return RunningWorker(worker.broker, worker.fabric, worker_config("w0"), incarnation="2")


async def test_a_second_worker_of_an_id_ends_before_it_hears_anything_that_is_meant_for_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "ASK_TIMEOUT_S", 60.0)  # the first one does not hang, however busy the machine is
    async with lone_worker() as first:
        twin = second(first)
        with pytest.raises(DuplicateId, match="worker id 'w0' is held by process"):
            await asyncio.wait_for(twin.task, WAIT_S)
        assert not twin.service.registered.is_set()
        assert not first.worker.task.done()


async def test_a_worker_that_is_told_that_another_one_lives_ends() -> None:
    async with lone_worker() as first:
        first.pool.errors["heartbeat"].append(DuplicateId("worker id 'w0' is held by process 7 on h, which lives"))
        with pytest.raises(DuplicateId, match="process 7"):
            await asyncio.wait_for(first.worker.task, WAIT_S)
        with pytest.raises(NoResponder):
            await first.planner.request(
                subjects.worker_resend(process("w0")), Resend(request_id="r", attempt=1, offset=0), Ack, timeout_s=60.0
            )
        await identity.refuse_if_held(first.planner, subjects.worker_holder("w0"), "worker id 'w0'")


async def test_a_worker_comes_in_at_once_after_another_one_of_its_id_has_stopped() -> None:
    async with lone_worker() as first:
        await first.worker.stop()
        first.worker = second(first)
        await eventually(first.worker.service.registered.is_set)


async def test_a_worker_that_takes_the_id_of_one_that_hangs_gets_what_is_for_it_and_the_other_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "ASK_TIMEOUT_S", 0.05)
    async with lone_worker() as alone:
        await alone.worker.stop()
        hanging, heard = alone.broker.bus("w0"), list[object]()

        async def hang(message: object) -> Ack:
            heard.append(message)
            await asyncio.Event().wait()
            return Ack()

        async def hang_with_order(order: Stored[WorkerOrder]) -> None:
            await hang(order)

        async def hang_for_good(_: GetHolder) -> Holder:
            await asyncio.Event().wait()
            raise AssertionError("it hangs")

        await hanging.respond(subjects.worker_holder("w0"), GetHolder, hang_for_good)
        await hanging.respond(subjects.worker_submit(process("w0")), Submit, hang)
        await hanging.respond(subjects.worker_resend(process("w0")), Resend, hang)
        await hanging.subscribe(subjects.worker_cancel(process("w0")), Cancel, heard.append)
        await hanging.subscribe_events(subjects.worker_plans(process("w0")), WorkerOrder, hang_with_order)
        alone.worker = second(alone)
        await eventually(alone.worker.service.registered.is_set)
        instance_id = await alone.serve()
        await alone.submit(instance_id, "r")
        await alone.gateway.end_of("r")
        assert alone.gateway.tokens("r") == expected_tokens(8)
        assert heard == []
        with pytest.raises(DeadlineExceeded):
            await alone.planner.request(
                subjects.worker_resend(process("w0")), Resend(request_id="r", attempt=1, offset=0), Ack, timeout_s=0.1
            )
        assert len(heard) == 1, "who asks the one that hangs is not answered by the other"
