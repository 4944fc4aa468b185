"""Workers and members of pairs in the test's process whose engines compute later than they are called.

A test that is marked with ``also_late`` runs as ever, and again in each order of the streams. Then no engine may have
found a fault of its caller's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from services.worker.device.late import LateStreams, LateTiming
from services.worker.engine.base import Engine
from services.worker.engine.late.failures import LateFailures
from services.worker.engine.late.late_engine import LateEngine, LateFault
from services.worker.engine.late.settings import LateSettings
from services.worker.engine.loop import EngineLoop
from services.worker.instance import factory
from tests.services import workers
from tests.services.worker.live import members

AT_ONCE = "at_once"
TIMINGS = {
    "copies_first": LateTiming(order="copies_first"),
    "copies_last": LateTiming(order="copies_last"),
    "drawn": LateTiming(order="drawn", delay_s=0.002),
}
SEED = 0
"""Of the first streams. Each worker's are drawn by another one."""


class WatchedLate(LateEngine):
    """Tells of what it found."""

    def __init__(self, inner: Engine, *parts: Any, **more: Any) -> None:
        super().__init__(inner, *parts, **more)
        self.watched = inner
        self.faults: list[str] = []

    def _fault(self, what: str, why: str) -> LateFault:
        self.faults.append(f"{what}: {why}")
        return super()._fault(what, why)


class LateEngines:
    """All that were made, and what they run on."""

    def __init__(self, timing: LateTiming) -> None:
        self.timing = timing
        self.engines: list[WatchedLate] = []
        self._streams: list[LateStreams] = []
        self._seeds = itertools.count(SEED)

    def streams(self, _: LateTiming | None = None) -> LateStreams:
        """A worker's."""
        made = LateStreams(replace(self.timing, seed=next(self._seeds)))
        self._streams.append(made)
        return made

    def later(self, loop: EngineLoop) -> None:
        """Of a member that is no worker."""
        late = WatchedLate(loop.engine, self.streams())
        self.engines.append(late)
        late.watch(loop.scheduler.pool)
        loop.engine = late

    @property
    def is_idle(self) -> bool:
        """Nothing is written, or will be, that was asked for so far."""
        return all(not streams.compute.queued and not streams.into.queued for streams in self._streams)

    def check(self) -> None:
        """No caller took for done what was not."""
        assert self.engines
        assert [fault for engine in self.engines for fault in engine.faults] == []
        assert sum(engine.num_faults for engine in self.engines) == 0

    def close(self) -> None:
        """Their streams."""
        for streams in self._streams:
            streams.close()


@contextlib.contextmanager
def late_engines(timing: LateTiming) -> Iterator[LateEngines]:
    """Whoever is made meanwhile has a late engine."""
    late = LateEngines(timing)

    class Made(WatchedLate):
        """A worker's."""

        def __init__(self, *parts: Any, **more: Any) -> None:
            super().__init__(*parts, **more)
            late.engines.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(workers.ENGINES, "late", LateSettings(timing=timing, failures=LateFailures()))
        patch.setattr(factory, "LateStreams", late.streams)
        patch.setattr(factory, "LateEngine", Made)
        patch.setattr(members, "made_later", late.later)
        try:
            yield late
        finally:
            late.close()


def also_late(*orders: str) -> Callable[[Any], Any]:
    """Run a test again with late engines; without ``orders`` in each."""
    cases = pytest.mark.parametrize("engines", [AT_ONCE, *(orders or TIMINGS)], indirect=True)
    return lambda test: pytest.mark.usefixtures("engines")(cases(test))
