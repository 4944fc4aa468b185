"""Whether the machine kept up: how late its timers were during a run, and what of its time others had.

``python -m bench.evaluate.machine`` sleeps again and again until its standard input ends, and then prints by how much
it was late. It is a process of its own, so that it sees what a worker sees.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.stats import Summary

TICK_S = 0.005
MAX_LATE_S = 0.005
"""At the 99th percentile. A decode step takes 12 ms."""
_STEAL, _NUM_FIELDS = 7, 8
_END_S = 60.0


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """During one run."""

    timer_late_p50_s: float
    timer_late_p99_s: float
    timer_late_max_s: float
    steal_share: float
    """Of the time of all cores: other machines of the host had it."""
    busy_share: float
    """Of the time of all cores: not idle."""

    @property
    def void(self) -> tuple[str, ...]:
        """Why the run does not count; nothing if it does."""
        if self.timer_late_p99_s <= MAX_LATE_S:
            return ()
        late_ms = self.timer_late_p99_s * 1000
        return (f"timers were late: p99 {late_ms:.1f} ms, allowed are {MAX_LATE_S * 1000:g} ms",)


class CpuTimes(msgspec.Struct, frozen=True):
    """Ticks since the machine started, of all cores."""

    total: int
    idle: int
    steal: int

    @classmethod
    def parse(cls, stat: str) -> CpuTimes:
        """The text of ``/proc/stat``. Guests' time is within the user's."""
        fields = [int(field) for field in stat.split("\n", 1)[0].split()[1 : _NUM_FIELDS + 1]]
        return cls(sum(fields), fields[3] + fields[4], fields[_STEAL])

    @classmethod
    def now(cls) -> CpuTimes:
        return cls.parse(Path("/proc/stat").read_text(encoding="ascii"))

    def shares_since(self, before: CpuTimes) -> tuple[float, float]:
        """Of the time of all cores: not idle, and other machines of the host had it."""
        total = max(1, self.total - before.total)
        return 1 - (self.idle - before.idle) / total, (self.steal - before.steal) / total


class Watch:
    """From ``watching``; ``conditions`` after its block."""

    def __init__(self, probe: subprocess.Popen[str]) -> None:
        self._probe = probe
        self._before = CpuTimes.now()
        self._conditions: Conditions | None = None

    def end(self) -> None:
        """Called once."""
        said, _ = self._probe.communicate(timeout=_END_S)
        late, after = msgspec.json.decode(said, type=Summary), CpuTimes.now()
        busy_share, steal_share = after.shares_since(self._before)
        self._conditions = Conditions(
            timer_late_p50_s=late.p50,
            timer_late_p99_s=late.p99,
            timer_late_max_s=late.max,
            steal_share=steal_share,
            busy_share=busy_share,
        )

    @property
    def conditions(self) -> Conditions:
        """Raises ``RuntimeError`` before the end."""
        if self._conditions is None:
            raise RuntimeError("the watch goes on")
        return self._conditions


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Look at the machine until the block is left."""
    command = (sys.executable, "-m", "bench.evaluate.machine")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        try:
            watch = Watch(probe)
            yield watch
            watch.end()
        finally:
            probe.kill()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """This process before all others until the block is left, its children excepted: it is the client, which has a
    machine of its own elsewhere, and what it measures must not be its own waiting for a core. Needs root."""
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _main() -> None:
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    late_s: list[float] = []
    while not ended.is_set():
        due_s = time.perf_counter() + TICK_S
        time.sleep(TICK_S)
        late_s.append(time.perf_counter() - due_s)
    sys.stdout.write(msgspec.json.encode(Summary.of(late_s or [0.0])).decode())


if __name__ == "__main__":
    _main()
