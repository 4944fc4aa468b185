"""The watch over event loops sees what keeps them, and whose it is."""

from __future__ import annotations

import asyncio
import mmap
import os
import time

from shared.aio import OwnedTasks, Wakeup
from tests.loop_watch import MAX_CALLBACK_S, LoopWatch


def compute() -> bool:
    """For longer than a callback may, also where neighbours make it take three times as long."""
    until_s = time.thread_time() + 6 * MAX_CALLBACK_S
    while time.thread_time() < until_s:
        pass
    return True


async def test_a_callback_of_product_code_that_computes_for_long_is_named(watched_loops: LoopWatch) -> None:
    await asyncio.create_task(Wakeup().until(compute))
    assert len(watched_loops.long) == 1
    assert "Wakeup.until" in watched_loops.long.pop()


async def test_time_in_which_the_loop_waits_or_the_machine_is_away_does_not_count(watched_loops: LoopWatch) -> None:
    await asyncio.create_task(Wakeup().until(lambda: time.sleep(2 * MAX_CALLBACK_S) is None))
    assert not watched_loops.long


def test_a_fork_which_takes_as_long_as_its_process_is_large_does_not_count(watched_loops: LoopWatch) -> None:
    with mmap.mmap(-1, 2**29, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.madvise(mmap.MADV_NOHUGEPAGE)
        held[:: mmap.PAGESIZE] = bytes(len(held) // mmap.PAGESIZE)  # a fork has something to copy
        began_s, counted_s = time.thread_time(), watched_loops.cpu_s
        if not (pid := os.fork()):
            os._exit(0)
        forked_s, counted_s = time.thread_time() - began_s, watched_loops.cpu_s - counted_s
    os.waitpid(pid, 0)
    assert counted_s < forked_s / 2


async def test_what_tests_do_themselves_is_left_out(watched_loops: LoopWatch) -> None:
    compute()

    async def work() -> None:
        compute()

    tasks = OwnedTasks()
    tasks.start(work())
    await tasks.finish()
    assert not watched_loops.long


async def test_it_is_known_whose_a_callback_is_that_is_cancelled_while_it_runs(watched_loops: LoopWatch) -> None:
    def work() -> None:
        handle.cancel()
        compute()

    handle = asyncio.get_running_loop().call_soon(work)
    await asyncio.sleep(0)
    assert not watched_loops.long, "a test's"
