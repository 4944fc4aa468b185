"""The KV that calls of a late engine read and write until they are done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.device.completion import Completion
from services.worker.device.late import LateStream
from services.worker.engine.kv_pool import KvCache

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvUse:
    """Slots of layers ``first_layer <= i < last_layer`` that a call reads or writes."""

    first_layer: int
    last_layer: int
    slots: Callable[[], Slots]
    """Asked only where they matter: a context is long."""
    writes: bool

    def shares_layers(self, other: KvUse) -> bool:
        return max(self.first_layer, other.first_layer) < min(self.last_layer, other.last_layer)


class KvInFlight:
    """What is read and written by calls that are not done: on another stream nobody may rely on it yet.

    What a call will write is poison from the call on: NaN, so that who reads it too early computes nothing that looks
    right. Left as they are: slots that a copy of another stream still has to read. Its caller may have a batch run
    again that failed, which writes the same KV once more; and no call of the same stream is hurt, for none reads a slot
    before it wrote it, unless a step failed, and then what is behind it counts for nothing.
    """

    def __init__(self, cache: KvCache | None) -> None:
        """``cache``: the engine's; None for one that keeps no KV in memory, and has nothing that can be poisoned."""
        self._cache = cache
        self._undone: list[tuple[LateStream, Completion[Any], KvUse]] = []
        self._gate = threading.Lock()
        """Copies are asked for from any thread."""

    def begin(self, stream: LateStream, completion: Completion[Any], uses: tuple[KvUse, ...]) -> str | None:
        """A call on ``stream`` uses KV until its completion is done. Says what it should have waited for."""
        with self._gate:
            self._undone = [one for one in self._undone if not one[1].done]
            others = [use for of, _, use in self._undone if of is not stream]
            conflicts = [self._conflict(use, others) for use in uses]
            for use in uses:
                if use.writes and self._cache is not None:
                    _poison(self._cache, use, [other for other in others if not other.writes])
            self._undone += [(stream, completion, use) for use in uses]
        return next(filter(None, conflicts), None)

    @staticmethod
    def _conflict(use: KvUse, others: list[KvUse]) -> str | None:
        for other in others:
            if other.writes and use.shares_layers(other):
                shared = np.intersect1d(use.slots(), other.slots())
                if len(shared):
                    return (
                        f"KV of layers {other.first_layer}..{other.last_layer} in slot {shared[0]} is still to be "
                        "written by a call of another stream"
                    )
        return None


def _poison(cache: KvCache, use: KvUse, readers: list[KvUse]) -> None:
    slots = use.slots()
    read = [(reader, reader.slots()) for reader in readers if reader.shares_layers(use)]
    for layer in range(use.first_layer, use.last_layer):
        free = slots
        for reader, theirs in read:
            if reader.first_layer <= layer < reader.last_layer:
                free = np.setdiff1d(free, theirs)
        cache.poison(layer, free)
