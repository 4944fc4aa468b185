"""Reads that come no faster than a slower machine's."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.weights.pace import Pace

GBPS = 8e-6
"""A thousand bytes per second."""


class Time:
    """It passes while somebody waits, and when a test says so. What waits is one after the other."""

    def __init__(self) -> None:
        self.now_s = 100.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)

    def pace(self, gbps: float | None = GBPS) -> Pace:
        return Pace(gbps, clock=lambda: self.now_s, sleep=self.sleep)


async def test_bytes_come_through_at_the_rate_from_when_the_read_begins() -> None:
    time = Time()
    pace = time.pace()
    came_at = []
    with pace.reading():
        for num_bytes in (1000, 500, 1):
            await pace.wait(num_bytes)
            came_at.append(time.now_s)
    assert came_at == pytest.approx([101.0, 101.5, 101.501])


async def test_what_a_reader_does_in_between_takes_no_time_from_the_rate() -> None:
    time = Time()
    pace = time.pace()
    with pace.reading():
        for _ in range(10):
            await pace.wait(1000)
            time.now_s += 0.9
    assert time.now_s == pytest.approx(110.9)


async def test_nothing_is_saved_up_between_two_reads() -> None:
    time = Time()
    pace = time.pace()
    with pace.reading():
        await pace.wait(1000)
    time.now_s = 500.0
    with pace.reading():
        await pace.wait(1000)
    assert time.now_s == pytest.approx(501.0)


async def test_two_reads_at_a_time_share_the_rate() -> None:
    time = Time()
    pace = time.pace()
    with pace.reading():
        await pace.wait(1000)
        with pace.reading():
            await pace.wait(1000)
        await pace.wait(1000)
    assert time.now_s == pytest.approx(103.0)


async def test_a_read_that_was_cancelled_leaves_nothing_to_wait_for() -> None:
    pace = Pace(GBPS)

    async def read() -> None:
        with pace.reading():
            await pace.wait(1_000_000_000)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    with pace.reading():
        await asyncio.wait_for(pace.wait(1), 10.0)


async def test_without_a_limit_nobody_waits() -> None:
    time = Time()
    pace = time.pace(None)
    with pace.reading():
        await pace.wait(1 << 40)
    assert time.now_s == 100.0
