"""What the registered workers could hold at most: which models, and how long a context.

A request that exceeds it can never be served, however long it waits, so it is refused at once. "Never" speaks of the
workers as they are registered:

- A worker that is gone counts for ``GRACE_S`` more, and nothing is refused in the first ``GRACE_S`` of a gateway: in a
  rolling restart, or while everything starts, the largest worker may be the one that is missing.
- Without any worker nothing is known, and nothing is refused: the request waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from shared.errors import Unservable
from shared.messages.registry import ModelRecord

GRACE_S = 30.0
"""A worker that is started again registers within about ten seconds (it imports its engine and commits its arena), and
its supervisor may pause before that. Requests wait four times as long by default."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Of a worker."""

    arena_bytes: int
    kv_bytes: int


class Capacity:
    """What the workers of the last view of the registry, and those that just vanished, can hold. Times are of any one
    clock, in seconds. Its memory and the cost of a question follow the number of different sizes of workers."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When workers were first seen."""
        self._until_s: dict[WorkerMemory, float] = {}
        """How long each size counts; infinite for those that are registered."""
        self._arenas: list[int] = []
        """Rising."""
        self._most_kv: list[int] = []
        """The largest KV memory of the workers with at least that arena."""

    @property
    def has_workers(self) -> bool:
        """Whether any worker is registered, or was a short while ago."""
        return bool(self._until_s)

    def put(self, sizes: Iterable[WorkerMemory], now_s: float) -> None:
        """These workers are registered, and no others."""
        there = set(sizes)
        if self._since_s is None and there:
            self._since_s = now_s
        before, self._until_s = self._until_s, dict.fromkeys(there, math.inf)
        for size in before.keys() - there:
            until_s = min(before[size], now_s + GRACE_S)
            if now_s < until_s:
                self._until_s[size] = until_s
        by_arena = sorted(self._until_s, key=lambda size: size.arena_bytes, reverse=True)
        arenas: list[int] = []
        most_kv: list[int] = []
        for size in by_arena:
            arenas.append(size.arena_bytes)
            most_kv.append(max(size.kv_bytes, most_kv[-1] if most_kv else 0))
        self._arenas, self._most_kv = arenas[::-1], most_kv[::-1]

    def _judges(self, now_s: float) -> bool:
        return bool(self._arenas) and self._since_s is not None and now_s - self._since_s >= GRACE_S

    def refusal(self, record: ModelRecord, now_s: float) -> Unservable | None:
        """Why no instance of a model can ever be; None if one can, or may."""
        if record.max_instances <= 0:
            return Unservable(
                f"model {record.name!r} may have no instances: its max_instances is 0, until an operator raises it"
            )
        if not self._judges(now_s) or record.weights_bytes <= self._arenas[-1]:
            return None
        return Unservable(
            f"no worker can hold model {record.name!r}: its weights are {record.weights_bytes} bytes, and the largest "
            f"arena of the registered workers is {self._arenas[-1]} (BLITZ_WORKER_ARENA_MIB)"
        )

    def context_tokens(self, record: ModelRecord, now_s: float) -> int:
        """The longest context that an instance of the model could have: at most what the model allows, and never less
        than what an instance will turn out to hold, which is rounded to its KV blocks."""
        longest = record.spec.max_position
        if not self._judges(now_s) or record.weights_bytes > self._arenas[-1]:
            return longest
        most_kv = self._most_kv[bisect_left(self._arenas, record.weights_bytes)]
        return min(longest, most_kv // record.spec.kv_bytes_per_token)
