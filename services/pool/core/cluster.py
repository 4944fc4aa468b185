"""What placement knows: models, workers, their copies and memory, and what workers were asked to do.

It is updated by each change; ``refresh`` derives again what follows from these, only for what changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from heapq import nsmallest

from services.pool.core.copies import Held, Key, ModelCopies
from services.pool.core.copy_index import CopyIndex
from services.pool.core.exposed import ExposedCopies
from services.pool.core.host_memory import HostMemoryUse
from services.pool.core.loads import LoadLimits, Loads
from services.pool.core.on_disk import OnDisk
from services.pool.core.outstanding import OutstandingSteps
from services.pool.core.ranking import Ranking
from services.pool.core.unused import UnusedCopies
from services.pool.core.usage import ModelUsage
from shared.failure_domains import FailureDomain
from shared.messages.registry import HostCopy, ModelRecord, WorkerHeartbeat

PUSH_EVERY_S = 10.0
"""Least time between two drops of last copies on one worker: each costs a load from a peer or from disk."""


class ClusterView:
    """Pure: it is told of changes and answers questions."""

    def __init__(self, removed: Collection[str], limits: LoadLimits) -> None:
        """``removed``: names of models that were removed on purpose; a live view."""
        self.copies = CopyIndex()
        self.loads = Loads(limits)
        self.outstanding = OutstandingSteps(self.loads)
        self.memory = HostMemoryUse()
        self.version = 0
        """Goes up when anything changed that placement depends on."""
        self.memory_version = 0
        """The same, but not for changes of which instances serve what."""
        self.needy: set[str] = set()
        """Hashes of registered models without a placed host copy that counts, and without one on its way."""
        self.surplus: set[str] = set()
        """Of those with several."""
        self.crowded: set[str] = set()
        """Of those with several on one host, cached ones included."""
        self.unused = UnusedCopies()
        """Ready cached copies on hosts without an instance of their model."""
        self.exposed = ExposedCopies()
        """Only copies that one failure takes together with all instances of their model."""
        self.strangers: dict[str, tuple[tuple[Held, str], ...]] = {}
        """By worker: its useless copies, and why they are useless."""
        self.without_copy: set[str] = set()
        """Hashes of registered models without a complete copy in any memory."""
        self.without_host_copy: set[str] = set()
        """Of those without a complete placed host copy."""
        self.now_s = 0.0
        """The latest moment that it was told of."""
        self.usage = ModelUsage()
        self.on_disk = OnDisk()
        self.idle = Ranking()
        """Hashes of models that nobody uses and that have one host copy, the longest unused first (milliseconds)."""
        self._pushed_s: dict[str, float] = {}
        """When each worker last dropped a model's last copy for another model's."""
        self._removed = removed
        self._unsure: set[str] = set()
        """Workers whose ``evictable`` may be outdated."""
        self._evictable: dict[str, list[tuple[Held, ModelCopies]]] = {}
        self._spare: dict[str, tuple[bool, bool]] = {}
        """By hash: whether a placed copy is not needed (a GPU serves the model), and whether a cached one is not."""

    # --- changes -----------------------------------------------------------------------------

    def put_report(self, report: WorkerHeartbeat, now_s: float) -> tuple[str, ...]:
        """Take a worker's newest report; returns a reason for each hold that failed."""
        self.now_s = now_s
        worker, before = report.worker, self.copies.report(report.worker.worker_id)
        if not self.copies.put(report):
            return ()
        self._observe_use(before, report)
        return self.outstanding.observe(worker, self.copies.host_copies(worker.worker_id), now_s)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        before = self.copies.report(worker_id)
        self.copies.forget(worker_id)
        self._observe_use(before)
        self.outstanding.gone(worker_id)
        self._pushed_s.pop(worker_id, None)

    def _observe_use(self, *reports: WorkerHeartbeat | None) -> None:
        for report in reports:
            if report is not None and report.instance is not None:
                model_hash = report.instance.model_hash
                copies = self.copies.by_hash.get(model_hash)
                self.usage.observe(model_hash, self.now_s, in_use=copies is not None and bool(copies.instances))

    def disk_answered(self, model_hash: str, now_s: float, *, readable: bool) -> None:
        """A worker said whether it can read the model from disk."""
        self.now_s = now_s
        if self.on_disk.answered(model_hash, now_s, readable=readable):
            self.version += 1

    def pushed_out(self, worker_id: str) -> None:
        """The worker drops a last copy now."""
        self._pushed_s[worker_id] = self.now_s

    def refresh(self) -> None:
        """Call this after changes and before questions."""
        asked = self.outstanding.take_changed()
        for worker_id, model_hash in asked:
            if not model_hash:
                self.copies.set_leaving(worker_id, leaving=self.outstanding.is_leaving(worker_id))
        models, workers = self.copies.take_changed()
        if not (asked or models or workers):
            return
        self.version += 1
        self.memory_version += bool(asked or workers)
        workers.update(worker_id for worker_id, _ in asked)
        models.update(model_hash for _, model_hash in asked if model_hash)
        # In an order that no hash seed changes, as what is kept has it.
        for worker_id in sorted(workers):
            self._refresh_worker(worker_id)
        for model_hash in sorted(models):
            self._refresh_model(model_hash)

    def _refresh_worker(self, worker_id: str) -> None:
        report = self.copies.report(worker_id)
        if report is None:
            self.memory.remove(worker_id)
            self.strangers.pop(worker_id, None)
            self._unsure.discard(worker_id)
            self._evictable.pop(worker_id, None)
            return
        taken = leaving = placed = 0
        strangers = []
        for copy in self.copies.host_copies(worker_id).values():
            taken += copy.num_bytes
            dropped = self.outstanding.is_dropped((worker_id, copy.model_hash))
            if copy.state == "retired" or dropped:
                leaving += copy.num_bytes
            elif not copy.cached:
                placed += copy.num_bytes
            if copy.state != "retired" and not dropped and (why := self._why_strange(copy)):
                strangers.append((Held(report.worker, copy), why))
        offers = report.worker.host_cache_bytes > 0 and not self.outstanding.is_leaving(worker_id)
        for model_hash, num_bytes in self.outstanding.holds(worker_id).items() if offers else ():
            held = self.copies.host_copy((worker_id, model_hash))
            taken += num_bytes if held is None else 0
            # A copy that the worker cached for itself becomes the placed one.
            placed += num_bytes if held is None or (held.cached and held.state != "retired") else 0
        self.memory.put(report.worker, offers=offers, taken_bytes=taken, leaving_bytes=leaving, placed_bytes=placed)
        self._unsure.add(worker_id)
        if strangers:
            self.strangers[worker_id] = tuple(strangers)
        else:
            self.strangers.pop(worker_id, None)

    def _why_strange(self, copy: HostCopy) -> str:
        copies = self.copies.by_hash[copy.model_hash]
        if copies.record is not None:
            return "" if copy.layout_hash == copies.record.layout_hash else "its layout is of another version"
        known = self.copies.is_registered(copy.model) or copy.model in self._removed
        return "the model was removed or replaced" if known else ""

    def _refresh_model(self, model_hash: str) -> None:
        copies = self.copies.by_hash.get(model_hash)
        registered = copies is not None and copies.record is not None
        if copies is not None and self._spare.get(model_hash) != (spare := self._spares(copies)):
            self._spare[model_hash] = spare
            self._unsure.update(copies.present)
        elif copies is None:
            self._spare.pop(model_hash, None)
        ready = [h for h in copies.placed.values() if h.copy.state == "ready"] if copies is not None else []
        _keep(self.without_copy, model_hash, registered and copies is not None and not copies.num_complete)
        _keep(self.without_host_copy, model_hash, registered and not ready)
        _keep(self.needy, model_hash, registered and copies is not None and self._needs_copy(copies))
        kept = sum(not self.outstanding.is_dropped(h.key) for h in ready)
        _keep(self.surplus, model_hash, registered and kept > 1)
        self._refresh_hosts(model_hash, copies if registered else None)
        self._refresh_exposed(model_hash, copies if registered else None)
        if copies is None or not registered:
            self.usage.forget(model_hash)
            self.on_disk.forget(model_hash)
        else:
            self.usage.know(model_hash, self.now_s)
        if copies is not None and registered and self.idle_copy(copies) is not None:
            self.idle.put(model_hash, int(1000 * self.usage.unused_since_s(model_hash)))
        else:
            self.idle.discard(model_hash)

    def _refresh_hosts(self, model_hash: str, copies: ModelCopies | None) -> None:
        """``copies``: of a registered model."""
        stays = self.stay(copies) if copies is not None else []
        _keep(self.crowded, model_hash, any(n > 1 for n in Counter(h.worker.host for h in stays).values()))
        used = copies.instances_at if copies is not None else {}
        unused = [held for held in stays if held.copy.cached and held.worker.host not in used]
        self.unused.put(model_hash, unused, self.now_s)

    def _refresh_exposed(self, model_hash: str, copies: ModelCopies | None) -> None:
        """``copies``: of a registered model. Of one that scales out it is not known yet where its instances will be."""
        settled = copies is not None and bool(copies.all_serving) and not copies.coming
        held = self.only_copy(copies) if copies is not None and settled else None
        if copies is None or held is None:
            self.exposed.put(model_hash, None, FailureDomain.NONE, self.now_s)
        else:
            self.exposed.put(model_hash, held.key, copies.domain_of(held.worker), self.now_s)

    def _needs_copy(self, copies: ModelCopies) -> bool:
        if not all(self.is_lost(held.key) for held in copies.placed.values()):
            return False
        return all(self.outstanding.is_leaving(w) for w in self.outstanding.assigned_workers(copies.model_hash))

    # --- questions ---------------------------------------------------------------------------

    def record(self, model_hash: str) -> ModelRecord | None:
        """Of the registered model with this hash; of several the first by name."""
        copies = self.copies.by_hash.get(model_hash)
        return copies.record if copies is not None else None

    def stay(self, copies: ModelCopies) -> list[Held]:
        """A model's ready host copies, placed and cached, that no worker was told to drop."""
        held = (*copies.placed.values(), *copies.cached.values())
        return [h for h in held if h.copy.state == "ready" and not self.outstanding.is_dropped(h.key)]

    def idle_copy(self, copies: ModelCopies) -> Held | None:
        """The one host copy of a model that nobody uses, reads for another copy, or is about to let go; else None."""
        return self.only_copy(copies) if not copies.instances else None

    def only_copy(self, copies: ModelCopies) -> Held | None:
        """The one placed host copy of a model; None if there are others or one is on its way, or it does not count."""
        if len(copies.placed) != 1 or self.outstanding.assigned_workers(copies.model_hash):
            return None
        (held,) = copies.placed.values()
        return held if held.copy.state == "ready" and not self.is_lost(held.key) else None

    def may_push_out(self, worker_id: str) -> bool:
        """Whether the worker may drop a last copy: not so soon after another."""
        return self.now_s - self._pushed_s.get(worker_id, -PUSH_EVERY_S) >= PUSH_EVERY_S

    def is_readable(self, model_hash: str) -> bool | None:
        """Whether some worker can read the model from disk; None: not known."""
        return self.on_disk.is_readable(model_hash, self.now_s)

    def is_lost(self, key: Key) -> bool:
        """A host copy that does not count: it is about to go, or takes too long to load."""
        out = self.outstanding
        return out.is_dropped(key) or out.is_overdue(key) or out.is_going(key)

    def wanted_bytes(self, copies: ModelCopies, worker_id: str) -> int | None:
        """How many bytes the worker needs for a copy of a registered model; None if it cannot hold one now."""
        key = worker_id, copies.model_hash
        if self.outstanding.is_avoided(key) or self.outstanding.is_dropped(key) or copies.record is None:
            return None
        if worker_id in copies.cached:
            return 0  # its own becomes the placed one
        return None if worker_id in copies.present else copies.record.weights_bytes

    @property
    def num_unsure(self) -> int:
        """Workers whose ``evictable`` may be outdated."""
        return len(self._unsure)

    def find_evictable(self, most: int | None = None) -> int:
        """Brings ``evictable`` and the ranking that follows from it up to date, for ``most`` workers; returns their
        number."""
        unsure = sorted(self._unsure) if most is None else nsmallest(most, self._unsure)
        self._unsure.difference_update(unsure)
        for worker_id in unsure:
            self._evictable[worker_id] = found = self._find_evictable(worker_id)
            self.memory.set_evictable(worker_id, sum(h.copy.num_bytes for h, _ in found))
        return len(unsure)

    def evictable(self, worker_id: str) -> list[tuple[Held, ModelCopies]]:
        """A worker's copies that their models can do without, because a GPU serves the model or another host holds it,
        too. As of ``find_evictable``."""
        return self._evictable.get(worker_id, [])

    def _find_evictable(self, worker_id: str) -> list[tuple[Held, ModelCopies]]:
        found = []
        for model_hash in self.copies.host_copies(worker_id):
            copies = self.copies.by_hash[model_hash]
            held = copies.placed.get(worker_id) or copies.cached.get(worker_id)
            if held is None or held.copy.state != "ready" or self.outstanding.is_dropped(held.key):
                continue
            if self._spares(copies)[held.copy.cached]:
                found.append((held, copies))
        return found

    def _spares(self, copies: ModelCopies) -> tuple[bool, bool]:
        out, served = self.outstanding, bool(copies.serving)
        stays = (
            h.copy.state == "ready" and not out.is_dropped(h.key) and not out.is_going(h.key)
            for h in copies.placed.values()
        )
        return served, served or any(stays)


def _keep(names: set[str], name: str, there: bool) -> None:
    if there:
        names.add(name)
    else:
        names.discard(name)
