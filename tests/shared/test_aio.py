"""Tasks with an owner."""

from __future__ import annotations

import asyncio

from shared.aio import OwnedTasks


async def test_what_is_finished_is_not_cancelled_nor_what_it_starts() -> None:
    tasks, ended = OwnedTasks(), []

    async def work(left: int) -> None:
        await asyncio.sleep(0)
        if left:
            tasks.start(work(left - 1))
        ended.append(left)

    tasks.start(work(2))
    await tasks.finish()
    assert ended == [2, 1, 0]
    await tasks.finish()


async def test_what_is_closed_is_cancelled() -> None:
    tasks = OwnedTasks()
    task = tasks.start(asyncio.sleep(3600))
    await tasks.close()
    assert task.cancelled()
