"""All copies in the cluster, by model; updated by each change, never rebuilt.

The index collects the names of models and workers that changed until ``take_changed`` takes them, so that whatever is
derived from the copies is derived again for these alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection

from services.pool.core.copies import Held, Key, ModelCopies
from services.pool.core.ranking import Ranking
from shared.messages.registry import HostCopy, ModelRecord, WorkerHeartbeat


class CopyIndex:
    """Models, workers and what they hold. Copies of models that are not registered are in it, too."""

    def __init__(self) -> None:
        self.by_hash: dict[str, ModelCopies] = {}
        """Of every model that is registered, or of which a worker has a copy."""
        self.host_bytes: Counter[str] = Counter()
        """Of all host copies, by host; every host with a worker is in it."""
        self.capacities = Ranking()
        """Workers by the host memory that they offer."""
        self._records: dict[str, ModelRecord] = {}
        self._names: dict[str, list[str]] = {}
        """Of the registered models with each hash, in order."""
        self._reports: dict[str, WorkerHeartbeat] = {}
        self._host_copies: dict[str, dict[str, HostCopy]] = {}
        """By worker and hash."""
        self._copies_named: dict[str, set[Key]] = {}
        """Host copies by the name that their workers know the model by."""
        self._host_workers: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._changed_models: set[str] = set()
        self._changed_workers: set[str] = set()

    # --- models ------------------------------------------------------------------------------

    def put_model(self, record: ModelRecord) -> None:
        """A model is registered, or its record changed."""
        before = self._records.get(record.name)
        if before == record:
            return
        if before is not None and before.model_hash != record.model_hash:
            self.remove_model(record.name)
            before = None
        self._records[record.name] = record
        if before is None:
            insort(self._names.setdefault(record.model_hash, []), record.name)
        self._register(record)

    def remove_model(self, name: str) -> None:
        """A model is no longer registered."""
        record = self._records.pop(name, None)
        if record is None:
            return
        names = self._names[record.model_hash]
        del names[bisect_left(names, name)]
        if not names:
            del self._names[record.model_hash]
        self._register(record)

    def _register(self, changed: ModelRecord) -> None:
        copies = self._of(changed.model_hash)
        names = self._names.get(changed.model_hash)
        copies.register(self._records[names[0]] if names else None)
        self._changed_models.add(changed.model_hash)
        self._changed_workers.update(copies.present)
        self._changed_workers.update(worker_id for worker_id, _ in self._copies_named.get(changed.name, ()))
        self._tidy(copies)

    def is_registered(self, name: str) -> bool:
        return name in self._records

    def names(self) -> Collection[str]:
        """Of all registered models."""
        return self._records.keys()

    def names_of(self, model_hash: str) -> Collection[str]:
        """Of the registered models with this hash."""
        return self._names.get(model_hash, ())

    # --- workers -----------------------------------------------------------------------------

    def put(self, report: WorkerHeartbeat) -> bool:
        """A worker's newest report; whether it says anything new of the worker or its copies."""
        worker_id = report.worker.worker_id
        known = self._reports.get(worker_id)
        same_worker = known is not None and known.worker == report.worker
        same_instance = same_worker and known is not None and known.instance == report.instance
        same_copies = same_worker and known is not None and known.host_copies == report.host_copies
        if same_instance and same_copies:
            return False
        if known is not None and not same_instance:
            self._put_instance(known, there=False)
        if known is not None and not same_copies:
            self._put_host_copies(known, there=False)
        self._reports[worker_id] = report
        self.capacities.put(worker_id, report.worker.host_cache_bytes)
        if not same_instance:
            self._put_instance(report, there=True)
        if not same_copies:
            self._put_host_copies(report, there=True)
            self._changed_workers.add(worker_id)
        return True

    def forget(self, worker_id: str) -> None:
        """The worker is gone, and all that it had."""
        known = self._reports.pop(worker_id, None)
        if known is None:
            return
        self._put_instance(known, there=False)
        self._put_host_copies(known, there=False)
        self._leaving.discard(worker_id)
        self.capacities.discard(worker_id)
        self._changed_workers.add(worker_id)

    def set_leaving(self, worker_id: str, *, leaving: bool) -> None:
        """Whether a worker stops: its instance counts as draining, whatever its reports still say."""
        report = self._reports.get(worker_id)
        if report is None or leaving == (worker_id in self._leaving):
            return
        self._put_instance(report, there=False)
        (self._leaving.add if leaving else self._leaving.discard)(worker_id)
        self._put_instance(report, there=True)
        self._changed_workers.add(worker_id)
        self._changed_models.update(self._host_copies[worker_id])

    def _put_instance(self, report: WorkerHeartbeat, *, there: bool) -> None:
        instance, worker_id = report.instance, report.worker.worker_id
        if instance is None:
            return
        copies = self._of(instance.model_hash)
        copies.take_out_instance(report.worker)
        if there:
            copies.put_instance(report.worker)
        for workers in (copies.serving, copies.draining, copies.without_copy):
            workers.pop(worker_id, None)
        copies.coming.discard(worker_id)
        serves = instance.state == "serving" and worker_id not in self._leaving
        if not there:
            pass
        elif not instance.is_complete:
            copies.coming.add(worker_id)
        elif instance.copy == "there" and serves:
            copies.serving[worker_id] = report.worker
        elif instance.copy != "gone":
            copies.draining[worker_id] = report.worker
        elif serves:
            copies.without_copy[worker_id] = report.worker
        self._changed_models.add(instance.model_hash)
        self._tidy(copies)

    def _put_host_copies(self, report: WorkerHeartbeat, *, there: bool) -> None:
        worker_id, host = report.worker.worker_id, report.worker.host
        self._host_workers[host] += 1 if there else -1
        self.host_bytes[host] += sum(c.num_bytes for c in report.host_copies) * (1 if there else -1)
        if not self._host_workers[host]:
            del self._host_workers[host], self.host_bytes[host]
        if there:
            self._host_copies[worker_id] = {c.model_hash: c for c in report.host_copies}
        else:
            del self._host_copies[worker_id]
        for copy in report.host_copies:
            key, copies = (worker_id, copy.model_hash), self._of(copy.model_hash)
            self._changed_models.add(copy.model_hash)
            if there:
                copies.put(Held(report.worker, copy))
                self._copies_named.setdefault(copy.model, set()).add(key)
            else:
                copies.take_out(worker_id)
                named = self._copies_named.get(copy.model, set())
                named.discard(key)
                if not named:
                    self._copies_named.pop(copy.model, None)
                self._tidy(copies)

    def report(self, worker_id: str) -> WorkerHeartbeat | None:
        """The newest of one worker."""
        return self._reports.get(worker_id)

    def workers(self) -> Collection[str]:
        """Ids of all that report."""
        return self._reports.keys()

    def host_copy(self, key: Key) -> HostCopy | None:
        """A worker's host copy of a model, in any state."""
        return self._host_copies.get(key[0], {}).get(key[1])

    def host_copies(self, worker_id: str) -> dict[str, HostCopy]:
        """A worker's host copies by hash."""
        return self._host_copies.get(worker_id, {})

    # --- changes -----------------------------------------------------------------------------

    def take_changed(self) -> tuple[set[str], set[str]]:
        """Hashes of models and ids of workers that changed since the last call."""
        changed = self._changed_models, self._changed_workers
        self._changed_models, self._changed_workers = set(), set()
        return changed

    def _of(self, model_hash: str) -> ModelCopies:
        copies = self.by_hash.get(model_hash)
        if copies is None:
            copies = self.by_hash[model_hash] = ModelCopies(model_hash)
        return copies

    def _tidy(self, copies: ModelCopies) -> None:
        if copies.is_unknown:
            self.by_hash.pop(copies.model_hash, None)
