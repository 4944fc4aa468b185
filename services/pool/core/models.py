"""The registered models: their records, floors, and those that were removed on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from services.pool.core.table import Table, Version
from shared.messages.common import Role
from shared.messages.registry import Floor, ModelRecord, Unplaced, WorkerHeartbeat

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class HeldFloor:
    """A floor, and until when it lasts (monotonic)."""

    floor: Floor
    until_s: float

    def at(self, now_s: float) -> Floor:
        """With what it has left."""
        return msgspec.structs.replace(self.floor, left_s=max(0.0, self.until_s - now_s))


@dataclass(slots=True)
class ModelEntry:
    """A model's record, and what else is known of the model."""

    record: ModelRecord
    record_bytes: int
    """On the wire."""
    floors: dict[Role, HeldFloor] = field(default_factory=dict)
    unplaced: Unplaced | None = None

    @property
    def num_bytes(self) -> int:
        """About the size of all this on the wire."""
        return self.record_bytes + 160 * len(self.floors) + (300 if self.unplaced is not None else 0)


class Models:
    """Follows what is asked for."""

    def __init__(self, version: Version) -> None:
        self.entries: Table[ModelEntry] = Table(version)
        self._floor_ends: list[tuple[float, str, Role]] = []
        """Heap of (until, model, role); the entry of a floor that was replaced or lifted means nothing."""
        self._removed: dict[str, float] = {}
        self._warm: dict[str, ModelRecord] = {}
        """Of each kind of those that are kept warm, by the kind, one."""
        self._unplaced: set[str] = set()
        """Names of the models in the last call of ``set_unplaced``."""

    def get(self, name: str) -> ModelRecord | None:
        entry = self.entries.get(name)
        return entry.record if entry is not None else None

    def records(self) -> tuple[ModelRecord, ...]:
        """In the order of names."""
        return tuple(entry.record for entry in self.entries.values())

    def put(self, record: ModelRecord) -> bool:
        """A model is registered, or its record changed; False if nothing is new."""
        known = self.entries.get(record.name)
        self._removed.pop(record.name, None)
        if known is not None and known.record == record:
            return False
        entry = ModelEntry(record, len(_encoder.encode(record)))
        if known is not None:
            entry.floors, entry.unplaced = known.floors, known.unplaced
        self.entries.put(record.name, entry)
        if record.warm or (known is not None and known.record.warm):
            self._look_for_warm()
        return True

    def _look_for_warm(self) -> None:
        self._warm = {entry.record.kind: entry.record for entry in self.entries.values() if entry.record.warm}

    def to_prepare(self, report: WorkerHeartbeat) -> ModelRecord | None:
        """The model for which the worker of this report should have an engine waiting, and has none. Workers take
        different ones, each the same whatever others do (rendezvous hashing)."""
        worker = report.worker
        if not self._warm or report.state != "spare" or report.leaving or report.stopping:
            return None
        if report.warm is not None and report.warm.kind in self._warm:
            return None
        able = [kind for kind, record in self._warm.items() if worker.can_hold(record)]
        if not able:
            return None
        return self._warm[max(able, key=lambda kind: hashlib.sha256(f"{worker.worker_id} {kind}".encode()).digest())]

    # --- removals ----------------------------------------------------------------------------

    def remove(self, name: str, now_s: float) -> bool:
        """A model is no longer registered; False if it was not."""
        entry = self.entries.pop(name)
        if entry is None:
            return False
        if entry.record.warm:
            self._look_for_warm()
        self._removed[name] = now_s
        return True

    def was_removed(self, name: str) -> bool:
        """Whether the model was removed on purpose (rather than lost with Redis's data)."""
        return name in self._removed

    def removed(self) -> Mapping[str, float]:
        """Models that were removed on purpose, and when."""
        return self._removed

    def load_removed(self, names: Mapping[str, float]) -> None:
        """As Redis remembers them."""
        self._removed.update({name: at_s for name, at_s in names.items() if name not in self.entries})

    def forget_removed(self, before_s: float, keep: int, in_use: Collection[str]) -> tuple[str, ...]:
        """Forget removals from before ``before_s``, and those beyond the newest ``keep``; but not those of models of
        which workers still have a copy or an instance (``in_use``)."""
        newest = sorted(self._removed, key=lambda name: (self._removed[name], name), reverse=True)
        surplus = (n for i, n in enumerate(newest) if self._removed[n] < before_s or i >= keep)
        old = tuple(name for name in surplus if name not in in_use)
        for name in old:
            del self._removed[name]
        return old

    # --- floors ------------------------------------------------------------------------------

    def floors(self, now_s: float) -> tuple[Floor, ...]:
        """As of now, in the order of models' names."""
        return tuple(f.at(now_s) for entry in self.entries.values() for _, f in sorted(entry.floors.items()))

    def set_floor(self, floor: Floor, now_s: float) -> None:
        """In place of the role's one before."""
        entry = self.entries.get(floor.model)
        if entry is not None:
            until_s = now_s + floor.left_s
            entry.floors[floor.role] = HeldFloor(floor, until_s)
            heappush(self._floor_ends, (until_s, floor.model, floor.role))
            self.entries.changed(floor.model)

    def lift_floor(self, name: str, role: Role) -> None:
        entry = self.entries.get(name)
        if entry is not None and entry.floors.pop(role, None) is not None:
            self.entries.changed(name)

    def end_floors(self, now_s: float) -> None:
        """Remove floors that have run out."""
        while self._floor_ends and self._floor_ends[0][0] <= now_s:
            until_s, name, role = heappop(self._floor_ends)
            entry = self.entries.get(name)
            held = entry.floors.get(role) if entry is not None else None
            if held is not None and held.until_s == until_s:
                self.lift_floor(name, role)

    # --- host copies -------------------------------------------------------------------------

    def set_unplaced(self, unplaced: Iterable[Unplaced]) -> None:
        """The models without a host copy, and why; all others have one."""
        found = {entry.model: entry for entry in unplaced}
        for name in sorted(found.keys() | self._unplaced):
            entry = self.entries.get(name)
            if entry is not None and entry.unplaced != found.get(name):
                entry.unplaced = found.get(name)
                self.entries.changed(name)
        self._unplaced = set(found)
