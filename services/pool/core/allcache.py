"""The rules ``every-host``: every host that offers memory has a copy of every model (as AllCache, section 6.1).

1. A host without a placed copy of a model gets one, on its worker with the most room: what that has cached for itself,
   else from its own host, else from another host's copy, a GPU, or disk. As many load at a time as ``LoadLimits`` says.
2. Of several on one host one stays, and copies of models that were removed go.
3. Nothing makes way: where there is no room, the host has none, and loads there read the disk. Whether a model that
   has none anywhere is there is asked: then the copy of its last instance may go.

Models without any copy come first. A look does a bounded amount of work: what it does not get to is next at the
following one.
"""

from __future__ import annotations

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Key, ModelCopies
from services.pool.core.places import Places
from services.pool.core.steps import PlacementDecision, Steps
from shared.messages.registry import ModelRecord, Unplaced

VISITS = 1000
"""Workers, hosts and copies that one look compares, about."""
RECHECK_S = 5.0
"""While models have no copy, it is looked this often whether they are still on disk: answers grow old."""


class AllCacheRules:
    """As ``CopyRules``."""

    def __init__(self, cluster: ClusterView, keep_copies_s: float) -> None:
        """``keep_copies_s``: for how long cached copies, of hosts without room for a placed one, may be unused."""
        self._cluster = cluster
        self._keep_copies_s = keep_copies_s
        self._places = Places(cluster)
        self._steps = Steps(cluster)
        self._round: list[str] = []
        """Hashes of the models that are still to be looked at, the next one last."""
        self._round_version = -1
        """Of the cluster, as the round began."""
        self._round_s = 0.0
        """When it began."""
        self._found: dict[str, Unplaced] = {}
        """Models without any copy, of which none could be placed in this round."""

    def look(self, now_s: float, visits: int = VISITS) -> PlacementDecision:
        """The next steps; ``visits`` bounds the work."""
        steps, cluster = self._steps, self._cluster
        steps.begin(now_s)
        steps.drop_strangers()
        steps.drop_crowded()
        steps.drop_unused(self._keep_copies_s)
        rechecks = bool(self._found) and now_s - self._round_s >= RECHECK_S
        if not self._round and (rechecks or self._round_version != cluster.version):
            self._round_version, self._round_s, self._found = cluster.version, now_s, {}
            registered = [h for h, copies in cluster.copies.by_hash.items() if copies.record is not None]
            self._round = sorted(registered, key=lambda h: (h not in cluster.needy, h), reverse=True)
        self._places.visits = 0
        while self._round and not cluster.loads.is_full and self._places.visits < visits:
            copies = cluster.copies.by_hash.get(self._round.pop())
            if copies is not None and copies.record is not None:
                self._place(copies, copies.record)
        if cluster.loads.is_full:
            self._round = []
        unplaced = tuple(entry for model_hash, entry in self._found.items() if model_hash in cluster.needy)
        unfinished = bool(self._round) or not steps.may_drop
        return PlacementDecision(steps.decided, unplaced, unfinished=unfinished, asks=steps.asks)

    def _place(self, copies: ModelCopies, record: ModelRecord) -> None:
        cluster, memory = self._cluster, self._cluster.memory
        self._places.visits += len(copies.placed)
        has = {held.worker.host for held in copies.placed.values() if not cluster.is_lost(held.key)}
        assigned = cluster.outstanding.assigned_workers(copies.model_hash)
        has |= {memory.workers[w].host for w in assigned if w in memory.workers}
        for host in sorted(memory.hosts.keys() - has):
            if cluster.loads.is_full:
                return
            self._places.visits += 1
            worker_id = None if cluster.loads.host_is_full(host) else self._places.on_host(host, copies)
            if worker_id is None:
                continue
            sources = self._places.sources(copies, memory.workers[worker_id])
            if not sources.busy:
                self._steps.hold(record, worker_id, sources, f"{host} has none")
        if copies.model_hash in cluster.needy:
            self._steps.ask(copies, record)
            reason, on_disk = self._places.why_not(copies, record), cluster.is_readable(copies.model_hash) is True
            self._found[copies.model_hash] = Unplaced(
                model=record.name, model_hash=copies.model_hash, reason=reason, on_disk=on_disk
            )

    def could_take(self, model_hash: str) -> bool:
        """Whether a host has a copy, or has room for one."""
        self._cluster.refresh()
        copies = self._cluster.copies.by_hash.get(model_hash)
        if copies is None or copies.record is None or model_hash not in self._cluster.needy:
            return True
        return self._places.fitting(copies, copies.record, in_turn=False) is not None

    def may_stay_on_disk(self, key: Key) -> bool:  # noqa: ARG002 - whatever the copy
        """No: it is to be on every host."""
        return False
