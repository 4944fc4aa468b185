"""Memory is its owner's again only when nobody writes into it any more, however often the wait for it is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.worker.weights.flow_completion import ends_soon
from shared.aio import in_thread
from tests.wait_until import WAIT_S


async def test_work_in_a_thread_is_waited_for_however_often_the_caller_is_cancelled() -> None:
    inside, go = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        inside.set()
        assert go.wait(20)
        ended.append(True)

    waiting = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(inside.wait, 20)
    try:
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0.01)
            assert not waiting.done(), "the thread still writes"
    finally:
        go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == [True]


async def test_what_work_in_a_thread_gives_and_raises_is_the_callers() -> None:
    assert await in_thread(int, "7") == 7
    with pytest.raises(ValueError, match="seven"):
        await in_thread(int, "seven")


@pytest.mark.parametrize("quiet", [True, False])
async def test_whether_transfers_have_ended_is_known_however_often_the_caller_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    monkeypatch.setattr("services.worker.weights.flow_completion.SETTLE_S", WAIT_S)
    loop, is_quiet, passed_s = asyncio.get_running_loop(), False, 0.0
    now_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: now_s() + passed_s)
    waiting = asyncio.create_task(ends_soon(lambda: is_quiet))
    await asyncio.sleep(0.01)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done(), "a late write may still come"
    is_quiet = quiet
    if quiet:
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        passed_s = 2 * WAIT_S
        assert not await waiting, "whoever asked must learn that the memory cannot be used"
