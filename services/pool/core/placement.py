"""Where host copies live: one per model in the whole cluster, spread evenly over the hosts (paper section 4).

Invariant: every registered model has a complete copy in some GPU or host memory, or (rule 6) can be read from disk.
Rules:

1. A model without a placed host copy gets one, apart from its instances (rule 7), and on the host that holds the fewest
   bytes of them. It is loaded from another host copy, else from a GPU that serves the model, else from disk, and takes
   at most half of a NIC's bandwidth: others have work to do there. One that loads counts as placed.
2. Of several ready ones all but one are dropped: the one stays that is apart, then that on the emptiest host. Copies of
   models that were removed are dropped.
3. A model that has no copy left and fits nowhere evicts host copies of models that a GPU serves. A model that a GPU
   serves evicts nothing: it has a copy, and two such models would evict each other for ever. Nor does one that exists
   on disk only (rule 6).
4. Once all is in place, one copy at a time moves from a fuller host to an emptier one, unless it is apart only where it
   is: a second copy, then rule 2.
5. Only so many copies load at a time: in total, into one host, out of one NIC. Models take turns, those with the
   fewest copies first. A host that loads as many as it may is passed over; a model whose sources all send as many
   as they may waits, and its room is kept for it.

6. Where all that is not enough, models that a worker can read from disk, as it says when asked, may exist there only.
   A model that is used, or was, pushes out the last copies of those that are unused for longest, if they have been so
   for ``UNUSED_S``; a worker lets last copies go every ``PUSH_EVERY_S`` only. Such a model gets a copy again when there
   is room, or when it is used: the most recently used first.

7. A copy is apart: no host has it together with all of the model's instances that serve, or at least no worker has, so
   that one failure does not take them all. One that has not been for a while (``EXPOSED_S``) moves to where it would
   be, or would be more so, if there is room without a drop, and if it has not moved so lately (``MOVE_EVERY_S``): a
   second copy, then rule 2.

No other drop takes a model's last complete copy; should the reports be outdated, the registry refuses it (``retire``).
Copies of workers that leave do not count as placed, and neither do copies that take too long to load.
Copies that workers cache for themselves count as copies, not as placed ones; they go once they have been of no use on
their hosts for a while.

A look does a bounded amount of work. Models without a copy are gone through in rounds: what a look does not get to is
next at the following one, and a round begins anew only once the one before is over and something changed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Key, ModelCopies
from services.pool.core.places import MODEL_VISITS, Places
from services.pool.core.rebalance import Rebalancer
from services.pool.core.separation import Separator
from services.pool.core.steps import PlacementDecision, Steps
from shared.messages.registry import ModelRecord, Unplaced

VISITS = 1000
"""Workers and hosts that one look compares, about: a millisecond or two."""
UNSURE = 100
"""Workers for which one look finds the copies to evict ahead of need."""
UNUSED_S = 60.0
"""A model whose last copy goes for another one's has not been used for so long. So models that take turns do not push
each other out."""
RECHECK_S = 5.0
"""While models have no place, they are gone through this often: what may be done is a matter of time, too."""


class Placer:
    """The rules ``one``, as ``CopyRules``.

    Copies of models that are neither registered nor removed are left alone: a registry that lost its data gets
    their records back from the workers that hold them.
    """

    def __init__(self, cluster: ClusterView, keep_copies_s: float = math.inf) -> None:
        """``keep_copies_s``: for how long cached copies may be unused."""
        self._cluster = cluster
        self._keep_copies_s = keep_copies_s
        self._places = Places(cluster)
        self._rebalancer = Rebalancer(cluster)
        self._steps = Steps(cluster)
        self._separator = Separator(cluster, self._places, self._steps)
        self._now_s = 0.0
        self._round: list[str] = []
        """Hashes of the models that are still to be looked at, the next one last."""
        self._round_version = 0
        """Of the cluster, as the round began."""
        self._round_s = 0.0
        """When it began."""
        self._found: dict[str, Unplaced] = {}
        """This round's models without a place."""
        self._unplaced: dict[str, Unplaced] = {}
        """The last whole round's."""
        self._last = PlacementDecision((), ())
        self._shown_version = -1
        """The cluster's version when ``_last`` was complete; -1: it was not."""
        self._waiting: set[str] = set()
        """Hashes of the models that only wait for their turn."""

    def look(self, now_s: float, visits: int = VISITS) -> PlacementDecision:
        """The next steps; ``visits`` bounds the work."""
        self._now_s = now_s
        self._steps.begin(now_s)
        if self._unplaced and not self._round and now_s - self._round_s >= RECHECK_S:
            self._cluster.version += 1
        self._places.visits = self._cluster.find_evictable(UNSURE)
        self._steps.drop_strangers()
        self._drop_surplus()
        self._steps.drop_unused(self._keep_copies_s)
        self._go_round(visits)
        unfinished = bool(self._round) or not self._steps.may_drop
        if not unfinished:
            self._separator.look(now_s, visits)
        if not self._steps.decided and not unfinished and not self._cluster.outstanding.num_busy:
            unfinished = self._rebalance(visits)
        if not (self._steps.decided or self._steps.asks or unfinished) and self._shown_version == self._cluster.version:
            return self._last
        shown = {h: entry for h, entry in self._unplaced.items() if h in self._cluster.needy}
        waiting = frozenset(entry.model for h, entry in shown.items() if h in self._waiting)
        decided = PlacementDecision(self._steps.decided, tuple(shown.values()), waiting, unfinished, self._steps.asks)
        self._last = replace(decided, asks=())
        self._shown_version = -1 if self._steps.decided or unfinished else self._cluster.version
        return decided

    def could_take(self, model_hash: str) -> bool:
        """Whether some worker has, or could get, a host copy of the model that counts: also if room must be made."""
        self._cluster.refresh()
        copies = self._cluster.copies.by_hash.get(model_hash)
        if copies is None or copies.record is None or model_hash not in self._cluster.needy:
            return True
        if self._places.fitting(copies, copies.record, in_turn=False) is not None:
            return True
        if self._places.waiting(copies, copies.record) is not None:
            return True
        return self._may_evict(copies) and self._places.evicting(copies, copies.record) is not None

    def may_stay_on_disk(self, key: Key) -> bool:
        """A last copy goes where the rules told it to."""
        return self._cluster.outstanding.goes_to_disk(key)

    @property
    def visits(self) -> int:
        """Workers and hosts that the last look compared."""
        return self._places.visits

    # --- dropping ----------------------------------------------------------------------------

    def _drop_surplus(self) -> None:
        by_hash = self._cluster.copies.by_hash
        found = [copies for h in self._cluster.surplus if (copies := by_hash[h]).record is not None]
        for copies in sorted(found, key=_name):
            if not self._steps.may_drop:
                return
            self._drop_all_but_one(copies)

    def _drop_all_but_one(self, copies: ModelCopies) -> None:
        out, memory = self._cluster.outstanding, self._cluster.memory
        ready = [h for h in copies.placed.values() if h.copy.state == "ready" and not out.is_dropped(h.key)]
        keep = min(
            ready,
            key=lambda h: (
                out.is_going(h.key),
                copies.domain_of(h.worker),
                memory.host_bytes(h.worker.host) - h.copy.num_bytes
                if h.worker.host in memory.hosts
                else -h.copy.num_bytes,
                h.worker.worker_id,
            ),
        )
        for held in sorted(ready, key=lambda h: h.worker.worker_id):
            if held is not keep:
                self._steps.drop(held, f"worker {keep.worker.worker_id} on {keep.worker.host} holds one too")

    # --- placing -----------------------------------------------------------------------------

    def _go_round(self, visits: int) -> None:
        """Look at the models without a copy, each in its turn."""
        cluster = self._cluster
        if not self._round:
            if self._round_version == cluster.version:
                return
            self._round_version, self._round_s = cluster.version, self._now_s
            cluster.memory.drop_claims()
            self._found = {}
            self._waiting = set()
            needy = [cluster.copies.by_hash[model_hash] for model_hash in cluster.needy]
            needy.sort(key=self._urgency, reverse=True)
            self._round = [copies.model_hash for copies in needy]
        while self._round and not cluster.loads.is_full and self._places.visits < visits:
            self._places.visits += MODEL_VISITS
            copies = cluster.copies.by_hash.get(self._round.pop())
            if copies is None or copies.record is None or copies.model_hash not in cluster.needy:
                continue
            if not self._find_place(copies, copies.record):
                self._round.append(copies.model_hash)
                break
        if cluster.loads.is_full:
            self._let_wait()
        if not self._round:
            self._unplaced = self._found

    def _urgency(self, copies: ModelCopies) -> tuple[bool, int, float, str]:
        """The most urgent has the lowest."""
        used_s = self._cluster.usage.used_s(copies.model_hash)
        return self._is_on_disk_only(copies), copies.num_complete, -used_s, _name(copies)

    def _is_on_disk_only(self, copies: ModelCopies) -> bool:
        return not copies.num_complete and self._cluster.is_readable(copies.model_hash) is True

    def _let_wait(self) -> None:
        """No copy may begin to load: the rest of the round waits for the next."""
        for model_hash in reversed(self._round):
            known = self._unplaced.get(model_hash)
            if known is not None:
                self._found[model_hash] = known
            elif (record := self._cluster.record(model_hash)) is not None:
                self._wait(record, f"waits its turn: {len(self._cluster.loads)} copies are being loaded")
        self._round = []

    def _find_place(self, copies: ModelCopies, record: ModelRecord) -> bool:
        """False: which copies could be evicted is not known yet."""
        worker_id = self._places.fitting(copies, record, in_turn=True)
        if worker_id is not None:
            self._hold_or_wait(copies, record, worker_id)
            return True
        busy = self._places.fitting(copies, record, in_turn=False)
        if busy is not None:
            self._claim(copies, busy)
            self._wait(record, f"waits its turn: host {self._cluster.memory.workers[busy].host} loads other copies")
            return True
        reason = self._wait_for_room(copies, record)
        if not reason and self._may_evict(copies):
            if self._cluster.num_unsure > UNSURE:
                return False
            reason = self._evict(copies, record)
        reason = reason or self._push_out(copies, record) or self._places.why_not(copies, record)
        self._steps.ask(copies, record)
        on_disk = self._cluster.is_readable(copies.model_hash) is True
        self._found[copies.model_hash] = Unplaced(
            model=record.name, model_hash=copies.model_hash, reason=reason, on_disk=on_disk
        )
        return True

    def _hold_or_wait(self, copies: ModelCopies, record: ModelRecord, worker_id: str) -> None:
        memory = self._cluster.memory
        worker = memory.workers[worker_id]
        sources = self._places.sources(copies, worker)
        if sources.busy:
            self._claim(copies, worker_id)
            self._wait(record, "waits its turn: all that could send it send other copies")
        else:
            reason = f"no host copy; {worker.host} holds {memory.host_bytes(worker.host)} bytes of them"
            self._steps.hold(record, worker_id, sources, reason)

    def _wait(self, record: ModelRecord, reason: str) -> None:
        self._waiting.add(record.model_hash)
        self._found[record.model_hash] = Unplaced(model=record.name, model_hash=record.model_hash, reason=reason)

    def _claim(self, copies: ModelCopies, worker_id: str) -> None:
        self._cluster.memory.claim(worker_id, self._cluster.wanted_bytes(copies, worker_id) or 0)

    def _wait_for_room(self, copies: ModelCopies, record: ModelRecord) -> str:
        """Claims room that becomes free; says which."""
        worker_id = self._places.waiting(copies, record)
        if worker_id is None:
            return ""
        self._claim(copies, worker_id)
        return f"waits for room on worker {worker_id}"

    def _may_evict(self, copies: ModelCopies) -> bool:
        """Whether the model has no other complete copy, so that others may be evicted for it."""
        going = self._cluster.outstanding.is_going
        cached = (h for h in copies.cached.values() if h.copy.state == "ready")
        return not (copies.serving or self._is_on_disk_only(copies)) and all(going(held.key) for held in cached)

    def _evict(self, copies: ModelCopies, record: ModelRecord) -> str:
        """Makes room and claims it; says what it waits for."""
        evicted = self._places.evicting(copies, record)
        if evicted is None:
            return ""
        worker_id, victims = evicted
        self._claim(copies, worker_id)
        for held in victims:
            self._steps.drop(held, f"{record.name} has no copy left and needs the room; this model is served by a GPU")
        return f"waits for room on worker {worker_id}: {', '.join(h.copy.model for h in victims)} has to go"

    # --- on disk only ------------------------------------------------------------------------

    def _push_out(self, copies: ModelCopies, record: ModelRecord) -> str:
        """Makes room among the last copies of models that are unused for longest; says what it waits for."""
        used_s = self._cluster.usage.used_s(copies.model_hash)
        found = self._places.pushing_out(copies, min(used_s, self._now_s - UNUSED_S))
        if found is None:
            return ""
        worker_id, victims = found
        names = ", ".join(held.copy.model for held in victims)
        for held in victims:
            victim = self._cluster.copies.by_hash[held.copy.model_hash]
            if victim.record is not None:
                self._steps.ask(victim, victim.record)
        if any(self._cluster.is_readable(held.copy.model_hash) is None for held in victims):
            return f"may get room on worker {worker_id} if {names} can be read from disk"
        self._claim(copies, worker_id)
        self._cluster.pushed_out(worker_id)
        why = f"{record.name} was used later and has no host copy; this model stays on disk"
        for held in victims:
            self._steps.drop(held, why, to_disk=True)
        return f"waits for room on worker {worker_id}: {names} stays on disk only"

    # --- rebalancing -------------------------------------------------------------------------

    def _rebalance(self, visits: int) -> bool:
        """Moves a copy if that helps; whether there is more to look at."""
        move = self._rebalancer.find(visits)
        if move is None:
            return not self._rebalancer.is_over
        copies, record, worker_id, reason = move
        self._steps.hold(
            record, worker_id, self._places.sources(copies, self._cluster.memory.workers[worker_id]), reason
        )
        return False


def _name(copies: ModelCopies) -> str:
    """Registered models have one."""
    return copies.record.name if copies.record is not None else ""
