"""Workers that die, and are back after a while with nothing: which, when, and when others get to know of it.

What follows is decided by the services' cores: the gateway sends again what a worker had, the pool forgets it and gives
its copies to others, the planner ends what it was to do, and those that read its copy go on elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bench.sim.clock import Clock
from bench.sim.host_copies import HostCopies
from bench.sim.latencies import Latencies
from bench.sim.pairs import SimPairs
from bench.sim.workers import SimWorker, SimWorkers
from shared.errors import BadRequest

BACK_S = 30.0
LEAST_BACK_S = 0.1
"""A process is not made anew sooner."""


class Fault(NamedTuple):
    """A worker dies."""

    at_s: float
    """As requests are due."""
    worker: int | None = None
    """By its number. None: one that has an instance, by the seed; if none has one, nobody dies."""
    back_s: float = BACK_S
    """After which it is there again. ``math.inf``: never. At least ``LEAST_BACK_S``."""


def check_every(every_s: float | None) -> None:
    """Raises ``BadRequest`` unless workers can die so often."""
    if every_s is not None and not 0.1 <= every_s < math.inf:
        raise BadRequest(f"--kill-every is a number of seconds, at least 0.1, not {every_s!r}", param="kill-every")


def drawn(every_s: float, begin_s: float, end_s: float, seed: int) -> tuple[Fault, ...]:
    """One every so many seconds on average, however long ago the last one was."""
    numbers, faults = random.Random(f"{seed} faults"), []
    at_s = begin_s + numbers.expovariate(1 / every_s)
    while at_s < end_s:
        faults.append(Fault(at_s))
        at_s += numbers.expovariate(1 / every_s)
    return tuple(faults)


class Faults:
    """Carries them out."""

    def __init__(
        self,
        clock: Clock,
        latencies: Latencies,
        workers: SimWorkers,
        host_copies: HostCopies,
        pairs: SimPairs,
        *,
        seed: int,
        on_departed: Callable[[str], None],
        on_lease_over: Callable[[str, str], None],
    ) -> None:
        """``on_departed``: called when the gateway knows that a worker has died. ``on_lease_over``: when the pool does,
        unless that has heard of a newer process; with the incarnation that died."""
        self._clock = clock
        self._latencies = latencies
        self._workers = workers
        self._host_copies = host_copies
        self._pairs = pairs
        self._random = random.Random(f"{seed} who dies")
        self._on_departed = on_departed
        self._on_lease_over = on_lease_over
        self.num_died = 0

    def schedule(self, faults: Iterable[Fault], zero_s: float) -> None:
        """``zero_s``: when times of faults count from."""
        for fault in faults:
            self._clock.at(max(self._clock.now_s, zero_s + fault.at_s), self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        worker = self._choose(fault)
        if worker is None or not worker.is_up:
            return
        self.num_died += 1
        worker_id, after, latencies = worker.worker_id, self._clock.after, self._latencies
        self._workers.die(worker_id)
        self._host_copies.die(worker_id)
        self._pairs.worker_died(worker_id)
        after(latencies.departed_s, self._on_departed, worker_id)
        after(latencies.lease_s, self._on_lease_over, worker_id, worker.info.incarnation)
        if fault.back_s < math.inf:
            after(max(LEAST_BACK_S, fault.back_s), self._come_back, worker_id)

    def _choose(self, fault: Fault) -> SimWorker | None:
        workers = list(self._workers)
        if fault.worker is not None:
            return workers[fault.worker]
        candidates = [worker for worker in workers if worker.held is not None]
        return self._random.choice(candidates) if candidates else None

    def _come_back(self, worker_id: str) -> None:
        self._host_copies.come_back(worker_id)
        self._workers.come_back(worker_id)
