"""What a schedule really takes: an exact, event-driven playback of both sides against the queue's own rules.

Time is in any one unit (layer-times, seconds). Nothing here decides: the queue does, or ``share_evenly`` for batches
that come after it was dissolved. What the queue leaves open is played so:

- *At one instant*: layers that finish loading, then arrivals, then ends of layers and batches, then sharing, then the
  source takes work, then the target. So a layer that is loaded as another ends can be run next, and a batch between
  two layers goes to the source.
- *Sharing*: the baselines dissolve the queue when the last layer is loaded; what has not been begun is shared between
  both instances. ZigZag goes on as long as begun batches wait, which either side may continue; then it shares the rest.
- *Late arrivals*: after dissolving each goes to the side that is free first.
- A pull takes ``pull_time`` of the source if layers were run at the target; claims are confirmed at once.

Worked example: 7 layers, a layer loaded every 6 layer-times from time 0 on, 7 equal batches waiting at time 0.
ZigZag ``7 12 17 21 24 27 29``; best effort ``7 13 19 25 31 37 42``; stop the world ``7 14 21 28 35 42 43``.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.errors import BadRequest
from shared.zigzag.batch import Side
from shared.zigzag.queue import Claim, Layer, Policy, Queue
from shared.zigzag.sharing import share_evenly

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Job:
    """A batch to play: the time of one of its layers, and when it arrives."""

    batch_id: str
    cost: float
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers of one batch, run by one side without a break."""

    side: Side
    batch_id: str
    first_layer: int
    num_layers: int
    start: float
    end: float

    def layers(self) -> Iterator[tuple[Side, str, int, float, float]]:
        """(side, batch, layer, start, end) of each layer."""
        each = (self.end - self.start) / self.num_layers
        for i in range(self.num_layers):
            yield self.side, self.batch_id, self.first_layer + i, self.start + i * each, self.start + (i + 1) * each


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome. Completions are in the order in which the jobs were given."""

    completions: tuple[float, ...]
    target_layers: tuple[int, ...]
    """Layers that the target ran, per job; the source ran the others."""
    runs: tuple[Run, ...]
    """In the order of their starts; at one instant the source's first."""

    @property
    def mean(self) -> float:
        """Mean completion; 0 without jobs."""
        return sum(self.completions) / len(self.completions) if self.completions else 0.0

    @property
    def worst(self) -> float:
        """Latest completion; 0 without jobs."""
        return max(self.completions, default=0.0)


@dataclass(frozen=True, slots=True)
class Lateness:
    """When gates lapse: a layer is not loaded ``tolerance`` after it was ``planned`` to be."""

    planned: tuple[float, ...]
    tolerance: float

    def late(self, layers_ready: int, now: float) -> bool:
        """Gates should lapse now."""
        return layers_ready < len(self.planned) and now >= self.planned[layers_ready] + self.tolerance


def play(
    jobs: Sequence[Job],
    loaded_at: Sequence[float],
    policy: Policy = Policy.ZIGZAG,
    *,
    gates: Mapping[str, int] | None = None,
    source_free_at: float = 0.0,
    pull_time: float = 0.0,
    lateness: Lateness | None = None,
) -> Played:
    """Play ``jobs`` (in first-come order) over a target whose layer k is loaded at ``loaded_at[k]``.

    Layers are loaded in order. ``source_free_at``: the source first finishes what it has. Raises ``BadRequest``
    for times that cannot be.
    """
    return _Player(jobs, loaded_at, policy, gates or {}, source_free_at, pull_time, lateness).play()


class _Player:
    """One playback. ``*_end`` is when a side is free; ``_NEVER`` in ``_target_end`` means that it idles."""

    def __init__(
        self,
        jobs: Sequence[Job],
        loaded_at: Sequence[float],
        policy: Policy,
        gates: Mapping[str, int],
        source_free_at: float,
        pull_time: float,
        lateness: Lateness | None,
    ) -> None:
        if any(later < earlier for earlier, later in itertools.pairwise(loaded_at)):
            raise BadRequest("layers are loaded in order; their times must not fall", param="loaded_at")
        if pull_time < 0:
            raise BadRequest(f"a pull cannot take {pull_time!r}", param="pull_time")
        self._queue = Queue(len(loaded_at), policy)
        self._eager = policy is not Policy.ZIGZAG
        self._jobs = {job.batch_id: job for job in jobs}
        if len(self._jobs) != len(jobs):
            raise BadRequest("two jobs have the same id", param="jobs")
        self._arrivals = deque(sorted(jobs, key=lambda job: job.arrival))
        self._gates = gates
        self._loaded_at = loaded_at
        self._pull_time = pull_time
        self._lateness = lateness
        self._source_end = source_free_at
        self._target_end = _NEVER
        self._target_busy: Layer | None = None
        self._given: deque[Claim] = deque()
        self._late: dict[Side, deque[Job]] = {Side.SOURCE: deque(), Side.TARGET: deque()}
        self._target_whole: Job | None = None
        self._completion: dict[str, float] = {}
        self._at_target: dict[str, int] = dict.fromkeys(self._jobs, 0)
        self._runs: list[Run] = []

    def play(self) -> Played:
        times = {*self._loaded_at, *[job.arrival for job in self._jobs.values()], self._source_end}
        if self._lateness is not None:
            times.update([planned + self._lateness.tolerance for planned in self._lateness.planned])
        self._times = list(times)
        heapq.heapify(self._times)
        ready = 0
        while len(self._completion) < len(self._jobs):
            # Every job is run by the source at the latest, whose end is always ahead: the heap cannot run dry.
            now = heapq.heappop(self._times)
            while self._times and self._times[0] == now:
                heapq.heappop(self._times)
            while ready < len(self._loaded_at) and self._loaded_at[ready] <= now:
                ready += 1
            self._queue.set_layers_ready(ready)
            if self._lateness is not None and self._lateness.late(ready, now):
                self._queue.lapse()
            self._arrive(now)
            if self._target_end <= now:
                self._end_at_target(now)
            if not self._queue.dissolved and (self._queue.loaded if self._eager else self._queue.can_dissolve):
                self._dissolve(now)
            if self._source_end <= now:
                self._start_source(now)
            if self._target_end == _NEVER:
                self._start_target(now)
        return Played(
            tuple([self._completion[job] for job in self._jobs]),
            tuple([self._at_target[job] for job in self._jobs]),
            tuple(self._runs),
        )

    def _arrive(self, now: float) -> None:
        while self._arrivals and self._arrivals[0].arrival <= now:
            job = self._arrivals.popleft()
            if not self._queue.dissolved:
                self._queue.add(job.batch_id, job.cost)
                if job.batch_id in self._gates:
                    self._queue.set_gate(job.batch_id, self._gates[job.batch_id])
                continue
            waiting = {side: sum([j.cost for j in late]) * self._queue.num_layers for side, late in self._late.items()}
            source = self._left_at_source(now) + waiting[Side.SOURCE]
            target = self._left_at_target(now) + waiting[Side.TARGET]
            ((_, side),) = share_evenly([(job.batch_id, 0.0)], source_busy=source, target_busy=target)
            self._late[side].append(job)

    def _left_at_source(self, now: float) -> float:
        layers = self._queue.num_layers
        given = sum([self._jobs[c.batch_id].cost * (layers - c.first_layer) for c in self._given])
        return max(0.0, self._source_end - now) + given

    def _left_at_target(self, now: float) -> float:
        busy = 0.0 if self._target_end == _NEVER else self._target_end - now
        return busy + sum(
            [b.cost * (self._queue.num_layers - b.next_layer - b.in_layer) for b in self._queue.batches()]
        )

    def _dissolve(self, now: float) -> None:
        shares = self._queue.dissolve("dissolve", source_busy=max(0.0, self._source_end - now))
        for claim in shares.given:
            self._queue.confirm(claim.claim_id)
        self._given.extend(shares.given)

    def _end_at_target(self, now: float) -> None:
        if self._target_whole is not None:
            self._completion[self._target_whole.batch_id] = now
            self._target_whole = None
        elif self._target_busy is not None:
            batch_id = self._target_busy.batch_id
            self._at_target[batch_id] += 1
            if self._queue.layer_done(batch_id):
                self._completion[batch_id] = now
        self._target_busy = None
        self._target_end = _NEVER

    def _start_source(self, now: float) -> None:
        claim: Claim | None = None
        if self._given:
            claim = self._given.popleft()
        elif not self._queue.dissolved:
            pulled = self._queue.pull(f"claim-{len(self._runs)}")
            if isinstance(pulled, Claim):
                claim = pulled
                self._queue.confirm(claim.claim_id)
        if claim is not None:
            self._run_at_source(now, self._jobs[claim.batch_id], claim.first_layer)
        elif self._late[Side.SOURCE]:
            self._run_at_source(now, self._late[Side.SOURCE].popleft(), 0)

    def _run_at_source(self, now: float, job: Job, first_layer: int) -> None:
        left = self._queue.num_layers - first_layer
        start = now + (self._pull_time if first_layer else 0.0)
        end = start + job.cost * left
        self._runs.append(Run(Side.SOURCE, job.batch_id, first_layer, left, start, end))
        self._completion[job.batch_id] = end
        self._source_end = end
        heapq.heappush(self._times, end)

    def _start_target(self, now: float) -> None:
        layer = self._queue.next_for_target()
        if layer is not None:
            job, first, count = self._jobs[layer.batch_id], layer.layer, 1
            self._target_busy = layer
        elif self._queue.dissolved and self._late[Side.TARGET]:
            job, first, count = self._late[Side.TARGET].popleft(), 0, self._queue.num_layers
            self._target_whole = job
            self._at_target[job.batch_id] = count
        else:
            return
        self._target_end = now + job.cost * count
        self._runs.append(Run(Side.TARGET, job.batch_id, first, count, now, self._target_end))
        heapq.heappush(self._times, self._target_end)
