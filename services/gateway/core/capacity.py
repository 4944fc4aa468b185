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

from shared.engines import offer_of
from shared.errors import Unservable
from shared.messages.registry import ModelRecord

GRACE_S = 30.0
"""A worker that is started again registers within about ten seconds (it imports its engine and commits its arena), and
its supervisor may pause before that. Requests wait four times as long by default."""


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What bounds the instances of a worker."""

    arena_bytes: int
    kv_bytes: int
    engines: tuple[str, ...] = ("",)
    """That it offers, as models name them."""


class Capacity:
    """What the workers of the last view of the registry, and those that just vanished, can hold. Times are of any one
    clock, in seconds. Its memory and the cost of a question follow the number of different sizes of workers."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When workers were first seen."""
        self._until_s: dict[WorkerSize, float] = {}
        """How long each size counts; infinite for those that are registered."""
        self._offers: dict[str, _Offer] = {}
        """By engine, of those that some worker has; empty: our own."""

    @property
    def has_workers(self) -> bool:
        """Whether any worker is registered, or was a short while ago."""
        return bool(self._until_s)

    def put(self, sizes: Iterable[WorkerSize], now_s: float) -> None:
        """These workers are registered, and no others."""
        there = set(sizes)
        if self._since_s is None and there:
            self._since_s = now_s
        before, self._until_s = self._until_s, dict.fromkeys(there, math.inf)
        for size in before.keys() - there:
            until_s = min(before[size], now_s + GRACE_S)
            if now_s < until_s:
                self._until_s[size] = until_s
        offering: dict[str, list[WorkerSize]] = {}
        for size in self._until_s:
            for engine in size.engines:
                offering.setdefault(engine, []).append(size)
        self._offers = {engine: _Offer.of(sizes) for engine, sizes in offering.items()}

    def _judges(self, now_s: float) -> bool:
        return bool(self._offers) and self._since_s is not None and now_s - self._since_s >= GRACE_S

    def refusal(self, record: ModelRecord, now_s: float) -> Unservable | None:
        """Why no instance of a model can ever be; None if one can, or may."""
        if record.max_instances <= 0:
            return Unservable(
                f"model {record.name!r} may have no instances: its max_instances is 0, until an operator raises it"
            )
        if not self._judges(now_s):
            return None
        offer = self._offers.get(record.engine)
        if offer is None:
            return Unservable(f"no worker can hold model {record.name!r}: none offers {offer_of(record.engine)}")
        if record.weights_bytes <= offer.largest_bytes:
            return None
        whose = f"that offer the engine {record.engine}" if record.engine else "that are registered"
        return Unservable(
            f"no worker can hold model {record.name!r}: its weights are {record.weights_bytes} bytes, and the largest "
            f"arena of the workers {whose} is {offer.largest_bytes} (BLITZ_WORKER_ARENA_MIB)"
        )

    def context_tokens(self, record: ModelRecord, now_s: float) -> int:
        """The longest context that an instance of the model could have: at most what the model allows, and never less
        than what an instance will turn out to hold, which is rounded to its KV blocks."""
        longest = record.basics.max_position
        if record.engine:
            # Its KV is not the worker's.
            most = record.engine_args.max_model_len if record.engine_args is not None else None
            return longest if most is None else most
        offer = self._offers.get(record.engine)
        if offer is None or not self._judges(now_s) or record.weights_bytes > offer.largest_bytes:
            return longest
        return min(longest, offer.most_kv_bytes(record.weights_bytes) // record.basics.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class _Offer:
    """Of the workers with one engine."""

    arenas: list[int]
    """Rising."""
    most_kv: list[int]
    """The largest KV memory of the workers with at least that arena."""

    @classmethod
    def of(cls, sizes: Iterable[WorkerSize]) -> _Offer:
        """Of one size at least."""
        arenas: list[int] = []
        most_kv: list[int] = []
        for size in sorted(sizes, key=lambda size: size.arena_bytes, reverse=True):
            arenas.append(size.arena_bytes)
            most_kv.append(max(size.kv_bytes, most_kv[-1] if most_kv else 0))
        return cls(arenas[::-1], most_kv[::-1])

    @property
    def largest_bytes(self) -> int:
        return self.arenas[-1]

    def most_kv_bytes(self, weights_bytes: int) -> int:
        """``weights_bytes``: of a model that fits the largest."""
        return self.most_kv[bisect_left(self.arenas, weights_bytes)]
