"""Where host copies live: one per model in the whole cluster, spread evenly over the hosts (paper section 4).

Invariant: every registered model has a complete copy in some GPU or host memory. Rules:

1. A model without a placed host copy gets one, on the host that holds the fewest bytes of them. It is loaded from a
   GPU that serves the model, else from another host copy, else from disk. One that loads counts as placed.
2. Of several ready ones all but one are dropped; copies of models that were removed are dropped.
3. A model of which no copy is left, and that fits nowhere, evicts host copies of models that a GPU serves. A model that
   is served itself evicts nothing: it has a copy, and two models would push each other out for ever.
4. Once all is in place, one copy at a time moves from a fuller host to an emptier one: a second copy, then rule 2.

No drop takes a model's last complete copy; should the reports be outdated, the registry refuses it (``retire``).
Copies of workers that leave do not count as placed, nor do those that load for ever.
Copies that workers cache for themselves count as copies, not as placed ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from services.pool.core.copies import Held, Key, ModelCopies, copies_by_hash
from services.pool.core.room import Room
from services.pool.core.steps import Drop, Hold, Outstanding, Placement
from shared.messages.copies import CopySource
from shared.messages.registry import ModelRecord, Unplaced, WorkerHeartbeat, WorkerInfo

MAX_SOURCES = 8
"""Of one hold: the first is used, the others are for when it dies."""


def place(
    models: Sequence[ModelRecord],
    reports: Sequence[WorkerHeartbeat],
    *,
    removed: Collection[str] = (),
    outstanding: Outstanding | None = None,
) -> Placement:
    """The next steps. ``removed``: names of models that were removed on purpose. The same input gives the same steps.

    Copies of models that are neither registered nor removed are left alone: a registry that lost its data gets
    their records back from the workers that hold them.
    """
    return _Placing(models, reports, removed, outstanding or Outstanding()).run()


class _Placing:
    def __init__(
        self,
        models: Sequence[ModelRecord],
        reports: Sequence[WorkerHeartbeat],
        removed: Collection[str],
        outstanding: Outstanding,
    ) -> None:
        self._models = copies_by_hash(models, reports, leaving=outstanding.leaving)
        self._names = {m.name for m in models} | set(removed)
        self._reports = sorted(reports, key=lambda r: r.worker.worker_id)
        self._out = outstanding
        self._room = Room(reports, self._out)
        self._going = {
            *self._out.given_up,
            *(
                (w, c.model_hash)
                for r in reports
                if (w := r.worker.worker_id) in self._out.leaving
                for c in r.host_copies
            ),
        }
        """Ready copies that their workers want to be rid of."""
        self._steps: list[Hold | Drop] = []
        self._unplaced: list[Unplaced] = []
        self._hopeless: set[str] = set()

    def run(self) -> Placement:
        self._drop_strangers()
        for copies in self._models.values():
            self._drop_surplus(copies)
        needy = [copies for copies in self._models.values() if self._needs_copy(copies)]
        for copies in sorted(needy, key=lambda c: (c.num_complete, c.record.name)):
            self._find_place(copies)
        if not self._steps and not self._out.holds and not self._out.drops:
            self._even_out()
        return Placement(tuple(self._steps), tuple(self._unplaced), frozenset(self._hopeless))

    # --- dropping ----------------------------------------------------------------------------

    def _drop_strangers(self) -> None:
        for report in self._reports:
            for copy in report.host_copies:
                known = self._models.get(copy.model_hash)
                if known is not None:
                    why = "" if copy.layout_hash == known.record.layout_hash else "its layout is of another version"
                else:
                    why = "the model was removed or replaced" if copy.model in self._names else ""
                if why and copy.state != "retired":
                    self._drop(Held(report.worker, copy), why)

    def _drop_surplus(self, copies: ModelCopies) -> None:
        ready = [h for h in copies.placed if h.copy.state == "ready" and h.key not in self._out.drops]
        if len(ready) < 2:
            return
        keep = min(
            ready,
            key=lambda h: (
                h.key in self._going,
                self._room.host_bytes.get(h.worker.host, 0) - h.copy.num_bytes,
                h.worker.worker_id,
            ),
        )
        for held in ready:
            if held is not keep:
                self._drop(held, f"worker {keep.worker.worker_id} on {keep.worker.host} holds one too")

    def _drop(self, held: Held, reason: str) -> None:
        if held.key in self._out.drops:
            return
        self._steps.append(Drop(held.worker.worker_id, held.copy.model, held.copy.model_hash, reason))
        self._room.leaving_bytes[held.worker.worker_id] += held.copy.num_bytes
        if not held.copy.cached:
            self._room.count(held.worker, -held.copy.num_bytes)

    # --- placing -----------------------------------------------------------------------------

    def _needs_copy(self, copies: ModelCopies) -> bool:
        lost = {*self._out.drops, *self._out.overdue, *self._going}
        if any(held.key not in lost for held in copies.placed):
            return False
        told = (w for w, model_hash in self._out.holds if model_hash == copies.record.model_hash)
        return all(worker_id in self._out.leaving for worker_id in told)

    def _find_place(self, copies: ModelCopies) -> None:
        wanted = {worker: self._wanted_bytes(copies, worker) for worker in self._room.workers}
        able = {w: n for w, n in wanted.items() if n is not None and n <= self._room.workers[w].host_cache_bytes}
        fitting = [self._room.workers[w] for w, num_bytes in able.items() if num_bytes <= self._room.now(w)]
        if fitting:
            worker = min(fitting, key=lambda w: self._room.rank(w, copies.serving))
            self._hold(
                copies, worker, f"no host copy; {worker.host} holds {self._room.host_bytes[worker.host]} bytes of them"
            )
            return
        reason = self._wait_or_evict(copies, able)
        if not reason:
            self._hopeless.add(copies.record.model_hash)
            reason = self._why_not(copies, able)
        self._unplaced.append(Unplaced(model=copies.record.name, model_hash=copies.record.model_hash, reason=reason))

    def _wanted_bytes(self, copies: ModelCopies, worker_id: str) -> int | None:
        """How much room the worker needs for a copy; None if it cannot hold one now."""
        model_hash = copies.record.model_hash
        if (worker_id, model_hash) in self._out.avoided or (worker_id, model_hash) in self._out.drops:
            return None
        if any(h.worker.worker_id == worker_id for h in copies.cached):
            return 0  # its own becomes the placed one
        return None if (worker_id, model_hash) in self._room.present else copies.record.weights_bytes

    def _hold(self, copies: ModelCopies, worker: WorkerInfo, reason: str) -> None:
        num_bytes = copies.record.weights_bytes
        self._steps.append(Hold(worker.worker_id, copies.record, self._sources(copies, worker), reason))
        self._room.take(worker.worker_id, self._wanted_bytes(copies, worker.worker_id) or 0)
        self._room.count(worker, num_bytes)

    def _sources(self, copies: ModelCopies, target: WorkerInfo) -> tuple[CopySource, ...]:
        def near_first(workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
            return sorted(workers, key=lambda w: (w.worker_id != target.worker_id, w.host != target.host, w.worker_id))

        ready = (
            h.worker
            for h in copies.placed + copies.cached
            if h.copy.state == "ready" and h.key not in self._out.drops and h.worker.worker_id != target.worker_id
        )
        found = [_source(w, "gpu") for w in near_first(copies.serving)]
        found += [_source(w, "host") for w in near_first(ready)]
        found += [_source(w, "gpu") for w in near_first(copies.draining)]
        return tuple(found[:MAX_SOURCES])

    # --- making room -------------------------------------------------------------------------

    def _wait_or_evict(self, copies: ModelCopies, able: Mapping[str, int]) -> str:
        """Claims room that becomes free, making some if nothing else saves the model; says what it waits for."""
        ordered = sorted(able, key=lambda w: self._room.rank(self._room.workers[w]))
        for worker_id in ordered:
            if able[worker_id] <= self._room.later(worker_id):
                self._room.claimed_bytes[worker_id] += able[worker_id]
                return f"waits for room on worker {worker_id}"
        if copies.serving or any(h.copy.state == "ready" and h.key not in self._going for h in copies.cached):
            return ""
        options = [(victims, w) for w in ordered if (victims := self._victims(w, able[w]))]
        if not options:
            return ""
        victims, worker_id = min(
            options,
            key=lambda o: (len(o[0]), sum(h.copy.num_bytes for h in o[0]), self._room.rank(self._room.workers[o[1]])),
        )
        for held in victims:
            self._drop(held, f"{copies.record.name} has no copy left and needs the room; this model is served by a GPU")
        self._room.claimed_bytes[worker_id] += able[worker_id]
        return f"waits for room on worker {worker_id}: {', '.join(h.copy.model for h in victims)} has to go"

    def _victims(self, worker_id: str, num_bytes: int) -> tuple[Held, ...]:
        """The copies on a worker that can make so much room: cached ones first, then the most served, the largest."""
        found = []
        for copies in self._models.values():
            mine = [h for h in copies.placed + copies.cached if h.worker.worker_id == worker_id]
            found += [(h, copies) for h in mine if self._expendable(h, copies)]
        found.sort(key=lambda o: (not o[0].copy.cached, -len(o[1].serving), -o[0].copy.num_bytes, o[0].copy.model_hash))
        missing = num_bytes - self._room.later(worker_id)
        taken: list[Held] = []
        for held, _ in found:
            if missing <= 0:
                break
            taken.append(held)
            missing -= held.copy.num_bytes
        if missing > 0:
            return ()
        for held in list(taken):  # the last ones may have made the first ones needless
            if missing + held.copy.num_bytes <= 0:
                taken.remove(held)
                missing += held.copy.num_bytes
        return tuple(taken)

    def _expendable(self, held: Held, copies: ModelCopies) -> bool:
        if held.copy.state != "ready" or held.key in self._out.drops or self._dropped_now(held.key):
            return False
        if not held.copy.cached:
            return bool(copies.serving)
        lost = {*self._out.drops, *self._going}
        stay = (h for h in copies.placed if h.copy.state == "ready" and h.key not in lost)
        return bool(copies.serving) or any(not self._dropped_now(h.key) for h in stay)

    def _dropped_now(self, key: Key) -> bool:
        return any(isinstance(step, Drop) and step.key == key for step in self._steps)

    def _why_not(self, copies: ModelCopies, able: Mapping[str, int]) -> str:
        if not self._room.workers:
            return "no worker offers host memory"
        if not able:
            tried = sorted(w for w, model_hash in self._out.avoided if model_hash == copies.record.model_hash)
            if tried:
                return f"could not be loaded on {', '.join(tried)}; it is tried again soon"
        most = max(self._room.workers, key=lambda w: (self._room.now(w), w))
        return (
            f"needs {copies.record.weights_bytes} bytes of host memory; "
            f"the most that is free is {max(0, self._room.now(most))}, on worker {most}"
        )

    # --- evening out -------------------------------------------------------------------------

    def _even_out(self) -> None:
        """Move one copy if that makes the fuller of two hosts less full than it was."""
        movable: dict[str, list[tuple[Held, ModelCopies]]] = {}
        for copies in self._models.values():
            if any(h.copy.state == "loading" and h.key not in self._out.overdue for h in copies.placed):
                return
            for held in copies.placed:
                stays = held.copy.state == "ready" and held.key not in self._going
                if stays and held.worker.host in self._room.host_bytes:
                    movable.setdefault(held.worker.host, []).append((held, copies))
        hosts = sorted(self._room.host_bytes, key=lambda h: (self._room.host_bytes[h], h))
        for full in sorted(movable, key=lambda h: (-self._room.host_bytes[h], h)):
            smallest = min(h.copy.num_bytes for h, _ in movable[full])
            for empty in hosts:
                gap = self._room.host_bytes[full] - self._room.host_bytes[empty]
                if gap <= smallest:
                    break
                if self._move(movable[full], empty, gap):
                    return

    def _move(self, movable: Sequence[tuple[Held, ModelCopies]], host: str, gap: int) -> bool:
        workers = sorted((w for w in self._room.workers.values() if w.host == host), key=self._room.rank)
        fair = [(h, c) for h, c in movable if h.copy.num_bytes < gap]
        for held, copies in sorted(
            fair, key=lambda o: (abs(gap - 2 * o[0].copy.num_bytes), o[0].copy.num_bytes, o[0].copy.model_hash)
        ):
            for worker in workers:
                wanted = self._wanted_bytes(copies, worker.worker_id)
                if wanted is not None and wanted <= self._room.now(worker.worker_id):
                    reason = f"{held.worker.host} holds {gap} bytes more than {host}"
                    self._hold(copies, worker, reason)
                    return True
        return False


def _source(worker: WorkerInfo, kind: Literal["gpu", "host"]) -> CopySource:
    return CopySource(
        worker_id=worker.worker_id,
        host=worker.host,
        transport_address=worker.transport_address,
        kind=kind,
    )
