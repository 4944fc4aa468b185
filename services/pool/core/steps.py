"""What workers are to do about host copies, as one look at the cluster decides it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Held, Key, ModelCopies
from services.pool.core.loads import nic_between
from services.pool.core.places import Sources
from shared.messages.copies import CopySource
from shared.messages.registry import ModelRecord, Unplaced
from shared.subjects import Process

NIC_SHARE = 0.5
"""What the loading of one host copy takes at most of a NIC's bandwidth."""
MAX_DROPS = 64
"""Of one look."""
MAX_ASKS = 4
"""Questions of one look."""
MAX_ASKED = 3
"""Workers that one question goes to."""
MAX_COMPARED = 64
"""Workers among which those to ask are chosen."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Have a worker load and keep a host copy."""

    worker: Process
    record: ModelRecord
    sources: tuple[CopySource, ...]
    """In order of preference; empty: from disk."""
    reason: str
    cap_gbps: float = 0.0
    """Of what comes through a NIC; 0: nothing does."""

    @property
    def key(self) -> Key:
        return self.worker.id, self.record.model_hash


@dataclass(frozen=True, slots=True)
class Drop:
    """Have a worker retire a host copy and, once that is confirmed, free it."""

    worker: Process
    model: str
    model_hash: str
    reason: str

    @property
    def key(self) -> Key:
        return self.worker.id, self.model_hash


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask these workers, one after the other, whether they can read a model from disk."""

    record: ModelRecord
    workers: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """What to do now, and which models have no host copy and none on its way."""

    steps: tuple[Hold | Drop, ...]
    unplaced: tuple[Unplaced, ...]
    waiting: frozenset[str] = frozenset()
    """Names of the unplaced models that only wait for their turn."""
    unfinished: bool = False
    """There was more to look at than one look may: the next one continues."""
    asks: tuple[Ask, ...] = ()


class CopyRules(Protocol):
    """Which host copies there are to be. Decides from a ``ClusterView``; what it decides is outstanding there at once.
    The same changes in the same order give the same steps."""

    def look(self, now_s: float) -> PlacementDecision:
        """The next steps; a bounded amount of work."""

    def could_take(self, model_hash: str) -> bool:
        """Whether some worker has, or could get, a host copy of the model that counts."""

    def may_stay_on_disk(self, key: Key) -> bool:
        """Whether a host copy may go though it is its model's last, if the model can be read from disk."""


class Steps:
    """Those of one look. Each is outstanding in the cluster from the moment that it is decided."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._now_s = 0.0
        self._decided: list[Hold | Drop] = []
        self._asks: list[Ask] = []

    def begin(self, now_s: float) -> None:
        """A new look."""
        self._now_s, self._decided, self._asks = now_s, [], []
        self._cluster.now_s = now_s
        self._cluster.refresh()

    @property
    def decided(self) -> tuple[Hold | Drop, ...]:
        return tuple(self._decided)

    @property
    def asks(self) -> tuple[Ask, ...]:
        return tuple(self._asks)

    @property
    def may_drop(self) -> bool:
        """Whether the look may drop one more copy."""
        return sum(isinstance(step, Drop) for step in self._decided) < MAX_DROPS

    def hold(self, record: ModelRecord, worker_id: str, sources: Sources, reason: str) -> None:
        """A worker is to load a copy."""
        worker = self._cluster.memory.workers[worker_id]
        nic, cap_gbps = None, 0.0
        if sources.first is not None and (nic := nic_between(sources.first, worker)) is not None:
            cap_gbps = NIC_SHARE * min(sources.first.nic_gbps, worker.nic_gbps)
        step = Hold(worker.process, record, sources.found, reason, cap_gbps)
        self._decided.append(step)
        self._cluster.outstanding.hold_sent(step.key, record.weights_bytes, self._now_s, worker.host, nic)
        self._cluster.refresh()

    def drop(self, held: Held, reason: str, *, to_disk: bool = False) -> None:
        """A worker is to let a copy go; ``to_disk``: it may be the last in any memory."""
        self._decided.append(Drop(held.worker.process, held.copy.model, held.copy.model_hash, reason))
        self._cluster.outstanding.drop_sent(held.key, self._now_s, to_disk=to_disk)
        self._cluster.refresh()

    def ask(self, copies: ModelCopies, record: ModelRecord) -> None:
        """Have workers asked whether they can read the model from disk, if that is not known: first who holds it, then
        those whose arenas it fits."""
        on_disk = self._cluster.on_disk
        if len(self._asks) >= MAX_ASKS or not on_disk.wants_asking(copies.model_hash, self._now_s):
            return
        some = islice(self._cluster.copies.capacities.falling(), MAX_COMPARED)
        reports = (self._cluster.copies.report(worker_id) for _, worker_id in some)
        fit = (r.worker.worker_id for r in reports if r is not None and r.worker.arena_bytes >= record.weights_bytes)
        own = (*sorted(copies.present), *sorted(copies.instances))
        found = (self._cluster.copies.report(worker_id) for worker_id in dict.fromkeys((*own, *fit)))
        workers = tuple(islice((report.worker.process for report in found if report is not None), MAX_ASKED))
        if workers:
            on_disk.asked(copies.model_hash, self._now_s)
            self._asks.append(Ask(record, workers))

    # --- what every rule lets go -------------------------------------------------------------

    def drop_strangers(self) -> None:
        """Copies of models that were removed or replaced."""
        for worker_id in sorted(self._cluster.strangers):
            for held, why in self._cluster.strangers.get(worker_id, ()):
                if not self.may_drop:
                    return
                self.drop(held, why)

    def drop_crowded(self) -> None:
        """All but one of a model's copies on the same host."""
        for model_hash in sorted(self._cluster.crowded):
            kept: dict[str, Held] = {}
            for held in sorted(self._cluster.stay(self._cluster.copies.by_hash[model_hash]), key=self._last_to_keep):
                keep = kept.setdefault(held.worker.host, held)
                if not self.may_drop:
                    return
                if keep is not held:
                    self.drop(held, f"worker {keep.worker.worker_id} on the same host holds one too")

    def _last_to_keep(self, held: Held) -> tuple[bool, bool, str]:
        return self._cluster.outstanding.is_going(held.key), held.copy.cached, held.worker.worker_id

    def drop_unused(self, keep_copies_s: float, *, last_too: bool = False) -> None:
        """Cached copies, once no instance of their model has been on their host for so long. ``last_too``: also the
        last in any memory, if the model can be read from disk."""
        for held, since_s in self._cluster.unused.before(self._now_s - keep_copies_s):
            if not self.may_drop:
                return
            copies = self._cluster.copies.by_hash[held.copy.model_hash]
            others = len(copies.serving) + len(copies.draining) + len(self._cluster.stay(copies)) - 1
            if not others and (not last_too or not self._is_on_disk(copies)):
                continue
            self.drop(held, f"unused on its host for {self._now_s - since_s:.0f} s", to_disk=not others)

    def _is_on_disk(self, copies: ModelCopies) -> bool:
        """Asks if that is not known."""
        readable = self._cluster.is_readable(copies.model_hash)
        if readable is None and copies.record is not None:
            self.ask(copies, copies.record)
        return readable is True
