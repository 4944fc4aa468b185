"""Time stands still while there is something to do, and jumps when there is not."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from shared.aio import Wakeup
from shared.outage import Outage
from tests import moved_clock as module
from tests.conftest import MOVED_CLOCK
from tests.loop_watch import LoopWatch
from tests.moved_clock import BEGAN_S, Hang, MovedClock, MovedLoop, moved_time
from tests.test_loop_watch import compute

HOUR_S = 3600.0


async def test_a_sleep_of_an_hour_is_over_at_once_and_exact() -> None:
    await asyncio.sleep(HOUR_S)
    assert time.monotonic() == BEGAN_S + HOUR_S


async def test_all_clocks_go_by_the_same_time() -> None:
    kept = inspect.signature(Outage).parameters["clock"].default
    loop = asyncio.get_running_loop()

    def read() -> tuple[float, ...]:
        return loop.time(), time.monotonic(), time.monotonic_ns() / 1e9, kept(), time.time(), time.time_ns() / 1e9

    before = read()
    assert read() == before
    await asyncio.sleep(HOUR_S)
    assert [after - then for after, then in zip(read(), before, strict=True)] == pytest.approx([HOUR_S] * 6)
    assert await asyncio.to_thread(read) == read()


async def test_what_is_due_happens_in_order_and_on_time() -> None:
    happened: list[tuple[str, float]] = []

    async def later(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        happened.append((name, time.monotonic() - BEGAN_S))

    await asyncio.gather(later("c", 0.3), later("a", 0.1), later("d", HOUR_S), later("b", 0.2))
    assert [name for name, _ in happened] == ["a", "b", "c", "d"]
    assert [at_s for _, at_s in happened] == pytest.approx([0.1, 0.2, 0.3, HOUR_S])


async def test_no_time_passes_while_there_is_something_to_do() -> None:
    late = asyncio.create_task(asyncio.sleep(0.001))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert (late.done(), time.monotonic()) == (False, BEGAN_S)


async def test_a_threads_result_is_waited_for_and_no_time_passes_meanwhile() -> None:
    late = asyncio.create_task(asyncio.sleep(0.001))
    assert await asyncio.to_thread(lambda: time.sleep(0.1) or "result") == "result"
    assert (late.done(), time.monotonic()) == (False, BEGAN_S)
    await late


async def test_what_has_come_through_a_socket_is_taken_before_time_passes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reading = asyncio.create_task(asyncio.get_running_loop().sock_recv(ours, 10))
        await asyncio.sleep(1.0)
        theirs.send(b"hello")
        async with asyncio.timeout(0.001):
            assert await reading == b"hello"


async def test_a_test_moves_time_by_hand_as_if_the_process_had_been_stopped(moved_clock: MovedClock) -> None:
    late = asyncio.create_task(asyncio.sleep(1.0))
    await asyncio.sleep(0)
    moved_clock.move(5.0)
    assert not late.done()
    await late
    assert time.monotonic() == BEGAN_S + 5.0


async def test_a_callback_of_product_code_that_computes_for_long_is_seen(watched_loops: LoopWatch) -> None:
    await asyncio.create_task(Wakeup().until(compute))
    assert "Wakeup.until" in watched_loops.long.pop()


def test_a_hang_says_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    async def hangs() -> None:
        await asyncio.gather(Wakeup().until(lambda: False), asyncio.to_thread(let_go.wait), asyncio.sleep(HOUR_S))

    with moved_time(), asyncio.Runner(loop_factory=MovedLoop) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(module, "HANG_S", 0.01)
            with pytest.raises(Hang) as caught:
                runner.run(hangs())
        let_go.set()
    said = str(caught.value)
    assert re.search(r"Task-\d+ waits in .*hangs \(.*test_moved_clock.py:\d+\)\n", said)
    assert re.search(r"Task-\d+ waits in Wakeup.until \(.*shared/aio.py:\d+\) > Event.wait \(", said)
    assert re.search(r"in a thread: .*Event.wait of <threading.Event", said)


def test_all_that_is_to_have_this_clock_is_there() -> None:
    assert [path for path in MOVED_CLOCK if not (Path(__file__).parents[1] / path).exists()] == []


def test_elsewhere_time_is_real() -> None:
    with moved_time() as clock:
        clock.move(-BEGAN_S)
        assert time.monotonic() == 0.0
    before_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert before_s <= time.monotonic() <= time.clock_gettime(time.CLOCK_MONOTONIC)
