"""A worker that is stopped ends, whatever does not answer it any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from services.worker.service import WorkerService
from shared.registry import RegistryReader
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import eventually

LONG_S = 60.0
"""Far more than a worker may take, and less than for ever."""
let_go: list[asyncio.Event] = []


@pytest.fixture(autouse=True)
def _let_go() -> None:
    let_go[:] = [asyncio.Event()]


async def _hangs(*_: object) -> None:
    """As what waits for a peer that was killed, and swallows what would end it."""
    while not let_go[0].is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await let_go[0].wait()


def part(name: str, method: str = "close") -> Callable[[WorkerService], None]:
    return lambda service: setattr(getattr(service.parts, name), method, _hangs)


PARTS = [part(name) for name in ("host_copies", "pair_roles", "departures", "migrator", "kv_receiver", "scaling")]
PARTS.append(part("registration", "leave"))


async def stop(alone: LoneWorker) -> None:
    try:
        async with asyncio.timeout(LONG_S):
            await alone.worker.stop()
        assert alone.worker.task.done()
    finally:
        let_go[0].set()


@pytest.mark.parametrize("hang", PARTS)
async def test_a_part_that_does_not_close_keeps_no_worker(hang: Callable[[WorkerService], None]) -> None:
    async with lone_worker() as alone:
        await alone.serve()
        hang(alone.worker.service)
        await stop(alone)


async def test_a_task_that_loses_its_cancellation_keeps_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lone_worker() as alone:
        asked = asyncio.Event()

        async def read(*_: object, **__: object) -> None:
            asked.set()
            await _hangs()

        monkeypatch.setattr(RegistryReader, "read", read)
        alone.worker.service.parts.peers.look_soon()
        await eventually(asked.is_set)
        await stop(alone)


async def test_a_drain_that_loses_its_cancellation_ends_with_its_time() -> None:
    async with lone_worker(drain_timeout_s=0.2) as alone:
        await alone.serve()
        alone.worker.service.parts.host_copies.let_all_go = _hangs  # type: ignore[method-assign]
        await stop(alone)


async def test_a_question_that_is_being_answered_keeps_no_worker() -> None:
    async with lone_worker() as alone:
        service = alone.worker.service
        instance_id = await alone.serve()
        asked = asyncio.Event()

        async def submit(_: object) -> None:
            asked.set()
            await _hangs()

        service.parts.slot.current().engine.submit = lambda _: asyncio.run_coroutine_threadsafe(  # type: ignore[union-attr]
            submit(_), asyncio.get_running_loop()
        )
        asking = asyncio.create_task(alone.submit(instance_id, "r"))
        await eventually(asked.is_set)
        await stop(alone)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_pool_that_does_not_confirm_the_drain_costs_no_more_than_the_drains_time() -> None:
    async with lone_worker(drain_timeout_s=0.2) as alone:
        await alone.serve()
        alone.worker.service.parts.registration.confirmed = _hangs  # type: ignore[method-assign, assignment]
        await stop(alone)
