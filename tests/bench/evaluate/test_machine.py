from __future__ import annotations

from bench.evaluate.machine import CpuTimes, watching

STAT = "cpu  100 5 50 800 20 3 2 15 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"


def test_steal_and_idle_time_of_all_cores() -> None:
    assert CpuTimes.parse(STAT) == CpuTimes(total=995, idle=820, steal=15)


def test_the_probe_says_how_late_it_was() -> None:
    with watching() as watch:
        pass
    found = watch.conditions
    assert 0 <= found.timer_late_p50_s <= found.timer_late_p99_s <= found.timer_late_max_s
    assert 0 <= found.steal_share <= 1
