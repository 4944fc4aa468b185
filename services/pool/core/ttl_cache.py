"""The rules ``kept``: copies are those that loads leave on their hosts, and the pool places none (as ServerlessLLM).

1. A copy goes once no instance of its model has been on its host for the time to keep copies.
2. Of several on one host one stays: its workers share the host's memory.
3. A model's last copy goes too, be it on a host or in a GPU, if a worker can read the model from disk. That is asked
   first, and while it is not known the copy stays.
4. Copies of models that were removed go at once.

Which copy makes way for another on a full host its worker decides: the least recently used.
"""

from __future__ import annotations

import math

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Key
from services.pool.core.steps import PlacementDecision, Steps
from shared.messages.registry import Unplaced

RECHECK_S = 5.0
"""While models have no copy, it is looked this often whether they are still on disk: answers grow old."""


class TtlCacheRules:
    """As ``CopyRules``."""

    def __init__(self, cluster: ClusterView, keep_copies_s: float) -> None:
        self._cluster = cluster
        self._keep_copies_s = keep_copies_s
        self._steps = Steps(cluster)
        self._doubted: dict[str, None] = {}
        """Hashes of models whose last copy is to go, and of which it is not known whether they are on disk."""
        self._unplaced: tuple[Unplaced, ...] = ()
        self._shown = (-1, -math.inf)
        """The cluster's version and the moment when ``_unplaced`` was found."""

    def look(self, now_s: float) -> PlacementDecision:
        """Only drops and questions. Unplaced are models without any copy."""
        steps = self._steps
        steps.begin(now_s)
        steps.drop_strangers()
        steps.drop_crowded()
        steps.drop_unused(self._keep_copies_s, last_too=True)
        doubted, self._doubted = self._doubted, {}
        for model_hash in doubted:
            self._ask(model_hash)
        version, since_s = self._shown
        if version != self._cluster.version or now_s - since_s >= RECHECK_S:
            self._shown = self._cluster.version, now_s
            found = [self._without_copy(model_hash) for model_hash in sorted(self._cluster.without_copy)]
            self._unplaced = tuple([entry for entry in found if entry is not None])
        return PlacementDecision(steps.decided, self._unplaced, unfinished=not steps.may_drop, asks=steps.asks)

    def _without_copy(self, model_hash: str) -> Unplaced | None:
        self._ask(model_hash)
        record = self._cluster.record(model_hash)
        if record is None:
            return None
        on_disk = self._cluster.is_readable(model_hash) is True
        return Unplaced(model=record.name, model_hash=model_hash, reason="no load has left a copy", on_disk=on_disk)

    def _ask(self, model_hash: str) -> None:
        copies = self._cluster.copies.by_hash.get(model_hash)
        if copies is not None and copies.record is not None:
            self._steps.ask(copies, copies.record)

    def could_take(self, model_hash: str) -> bool:  # noqa: ARG002 - whatever the model
        """No: the pool has none placed."""
        return False

    def may_stay_on_disk(self, key: Key) -> bool:
        """Yes. The next look asks, if it is not known whether the model is there."""
        if self._cluster.is_readable(key[1]) is None:
            self._doubted[key[1]] = None
        return True
