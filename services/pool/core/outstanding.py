"""What workers were asked to do and do not show in their reports yet. Times are monotonic seconds.

New reports and alarms update it; nothing is polled.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from services.pool.core.copies import Key
from services.pool.core.loads import Loads, Nic
from services.pool.core.outstanding_entry import Avoided, Entry, Leaving, Loading, OutstandingHold
from shared.messages.registry import HostCopy, WorkerInfo

HOLD_TIMEOUT_S = 5.0
"""From the request to the first report that shows the copy."""
LOAD_TIMEOUT_S = 120.0
SLOWEST_GBPS = 0.1
"""A copy that loads for longer than ``LOAD_TIMEOUT_S``, and than its bytes take at this rate, does not count."""
DROP_TIMEOUT_S = 10.0
"""After this the pool tells the worker again: it may have waited for a reader of the copy, or have been refused."""
AVOID_S = 10.0
AVOID_MAX_S = 300.0
"""A worker that failed to load a model is not asked for the same model again for ``AVOID_S``; for twice as long after
every further failure, up to this."""
GIVEN_UP_S = 10.0
"""How long a worker's request to give up a last copy counts; the worker repeats it while it stands."""
LEAVING_S = 10.0
"""How long a worker that asked because it stops counts as leaving."""


class OutstandingSteps:
    """Steps, from the decision until reports show them. They are lost when the pool restarts: then only reports count.

    ``loads`` is kept up to date with them.
    """

    def __init__(self, loads: Loads) -> None:
        self.num_busy = 0
        """Holds and drops that are outstanding."""
        self._loads = loads
        self.entries: dict[str, dict[str, Entry]] = {}
        """By worker and hash."""
        self._of_model: dict[str, set[str]] = {}
        """Workers with an entry for each hash."""
        self._leaving: dict[str, Leaving] = {}
        self._alarms: list[tuple[float, str, str]] = []
        """When to look at an entry (or, without a hash, at a worker that leaves) again."""
        self._changed: set[Key] = set()

    # --- what is done ------------------------------------------------------------------------

    def hold_sent(self, key: Key, num_bytes: int, now_s: float, host: str = "", nic: Nic | None = None) -> None:
        """A worker on ``host`` is to load a copy, through the source's ``nic``."""
        entry = self._entry(key)
        self.num_busy += entry.hold is None
        entry.hold = OutstandingHold(num_bytes, now_s + HOLD_TIMEOUT_S)
        self._loads.begin(key, host, nic)
        self._wake(entry.hold.until_s, key)
        self._update(key, entry)

    def hold_failed(self, key: Key, now_s: float) -> None:
        """The worker refused, or did not report the copy in time, or lost it while it loaded, or never finishes loading
        it."""
        entry = self._entry(key)
        self._end_hold(entry)
        failures = entry.avoided.failures + 1 if entry.avoided is not None else 1
        entry.avoided = Avoided(now_s + min(AVOID_MAX_S, AVOID_S * 2.0 ** min(failures - 1, 10)), failures)
        self._wake(entry.avoided.until_s, key)
        self._update(key, entry)

    def hold_not_sent(self, key: Key) -> None:
        """It was decided, but the worker was never told: that is not a failure."""
        entry = self._entry(key)
        self._end_hold(entry)
        self._update(key, entry)

    def drop_sent(self, key: Key, now_s: float, *, to_disk: bool = False) -> None:
        """``to_disk``: it may be the last copy in any memory."""
        entry = self._entry(key)
        self.num_busy += entry.drop_until_s is None
        entry.to_disk = to_disk
        entry.drop_until_s = now_s + DROP_TIMEOUT_S
        self._wake(entry.drop_until_s, key)
        self._update(key, entry)

    def drop_over(self, key: Key) -> bool:
        """The drop failed or was refused; False if there was none."""
        entry = self._entry(key)
        over = self._end_drop(entry)
        self._update(key, entry)
        return over

    def give_up(self, key: Key, now_s: float) -> None:
        """A worker wants to give up its copy of a model, which is the last."""
        entry = self._entry(key)
        entry.given_up_until_s = now_s + GIVEN_UP_S
        self._wake(entry.given_up_until_s, key)
        self._update(key, entry)

    def take_back(self, key: Key) -> None:
        """The worker keeps the copy after all."""
        entry = self._entry(key)
        entry.given_up_until_s = None
        self._update(key, entry)

    def leaves(self, worker_id: str, incarnation: str, now_s: float) -> None:
        """A worker said that it stops."""
        self._leaving[worker_id] = Leaving(incarnation, now_s + LEAVING_S)
        self._wake(now_s + LEAVING_S, (worker_id, ""))
        self._changed.add((worker_id, ""))

    def stays(self, worker_id: str) -> None:
        """It does not leave after all."""
        if self._leaving.pop(worker_id, None) is not None:
            self._changed.add((worker_id, ""))

    # --- what is seen ------------------------------------------------------------------------

    def observe(self, worker: WorkerInfo, copies: Mapping[str, HostCopy], now_s: float) -> tuple[str, ...]:
        """Strike off what a worker's report shows, by hash; returns a reason for each hold that failed."""
        worker_id, failures = worker.worker_id, []
        leaving = self._leaving.get(worker_id)
        if leaving is not None and leaving.incarnation != worker.incarnation:
            self.stays(worker_id)
        loading = {h for h, c in copies.items() if c.state == "loading" and not c.cached}
        for model_hash in sorted(loading | self.entries.get(worker_id, {}).keys()):
            key = worker_id, model_hash
            failures += self._observe_copy(key, worker.host, copies.get(model_hash), now_s)
        return tuple(failures)

    def _observe_copy(self, key: Key, host: str, copy: HostCopy | None, now_s: float) -> list[str]:
        entry, failures = self._entry(key), []
        placed = copy is not None and not copy.cached
        if placed and copy is not None and copy.state == "loading":
            if entry.loading is None or entry.loading.serial != copy.serial:
                limit_s = max(LOAD_TIMEOUT_S, copy.num_bytes * 8 / (SLOWEST_GBPS * 1e9))
                entry.loading, entry.overdue = Loading(copy.model, copy.serial, now_s, limit_s), False
                self._wake(now_s + limit_s, key)
                self._loads.begin(key, host, None)
        else:
            entry.loading, entry.overdue = None, False
        if copy is None:
            self._end_drop(entry)
            entry.given_up_until_s = None
        if entry.hold is not None:
            if placed and copy is not None and copy.state == "ready":
                self._end_hold(entry)
                entry.avoided = None
            elif placed:
                entry.hold.reported = True
            elif entry.hold.reported:
                failures.append(_failed(key, "lost it while loading"))
                self.hold_failed(key, now_s)
        self._update(key, entry)
        return failures

    def gone(self, worker_id: str) -> None:
        """The worker is dead, or left."""
        for model_hash in list(self.entries.get(worker_id, ())):
            entry = self.entries[worker_id][model_hash]
            self._end_hold(entry)
            self._end_drop(entry)
            self.entries[worker_id][model_hash] = Entry()
            self._update((worker_id, model_hash), self.entries[worker_id][model_hash])
        self.stays(worker_id)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Strike off what took too long; returns a reason for each hold that failed."""
        due: set[Key] = set()
        while self._alarms and self._alarms[0][0] <= now_s:
            _, worker_id, model_hash = heappop(self._alarms)
            due.add((worker_id, model_hash))
        failures: list[str] = []
        for key in sorted(due):
            if key[1]:
                failures += self._expire_entry(key, now_s)
            elif (leaving := self._leaving.get(key[0])) is not None and now_s >= leaving.until_s:
                self.stays(key[0])
        return tuple(failures)

    def _expire_entry(self, key: Key, now_s: float) -> list[str]:
        entry, failures = self._entry(key), []
        loading = entry.loading
        if loading is not None and not entry.overdue:
            if now_s - loading.since_s > loading.limit_s:
                entry.overdue = True
                took_s = now_s - loading.since_s
                failures.append(f"worker {key[0]} loads a copy of {loading.model} for more than {took_s:.0f} s")
                self.hold_failed(key, now_s)
            elif now_s >= loading.since_s + loading.limit_s:
                self._wake(now_s, key)
        if entry.hold is not None and not entry.hold.reported and now_s >= entry.hold.until_s:
            failures.append(_failed(key, f"did not report it within {HOLD_TIMEOUT_S:g} s"))
            self.hold_failed(key, now_s)
        if entry.drop_until_s is not None and now_s >= entry.drop_until_s:
            self._end_drop(entry)
        if entry.given_up_until_s is not None and now_s >= entry.given_up_until_s:
            entry.given_up_until_s = None
        if (avoided := entry.avoided) is not None and now_s >= avoided.until_s:
            if now_s >= avoided.until_s + AVOID_MAX_S:
                entry.avoided = None
            elif not avoided.over:
                avoided.over = True
                self._wake(avoided.until_s + AVOID_MAX_S, key)
        self._update(key, entry)
        return failures

    # --- what is known -----------------------------------------------------------------------

    def holds(self, worker_id: str) -> dict[str, int]:
        """Bytes of the copies that a worker was told to hold, by hash."""
        return {h: e.hold.num_bytes for h, e in self.entries.get(worker_id, {}).items() if e.hold is not None}

    def assigned_workers(self, model_hash: str) -> list[str]:
        """Workers that were told to hold a model and do not yet."""
        return [w for w in self._of_model.get(model_hash, ()) if self.entries[w][model_hash].hold is not None]

    def is_dropped(self, key: Key) -> bool:
        """The worker was told to drop its copy."""
        entry = self._get(key)
        return entry is not None and entry.drop_until_s is not None

    def goes_to_disk(self, key: Key) -> bool:
        """The worker was told to drop its copy, though it may be the last in any memory."""
        entry = self._get(key)
        return entry is not None and entry.drop_until_s is not None and entry.to_disk

    def is_avoided(self, key: Key) -> bool:
        """The worker failed to hold the model a short while ago."""
        entry = self._get(key)
        return entry is not None and entry.avoided is not None and not entry.avoided.over

    def avoided(self, model_hash: str) -> list[str]:
        """Workers that are avoided for a model, in order."""
        return sorted(w for w in self._of_model.get(model_hash, ()) if self.is_avoided((w, model_hash)))

    def is_overdue(self, key: Key) -> bool:
        """It has been loading for so long that it does not count."""
        entry = self._get(key)
        return entry is not None and entry.overdue

    def is_leaving(self, worker_id: str) -> bool:
        """The worker stops: its copies must be replaced, and it gets no new ones."""
        return worker_id in self._leaving

    def is_going(self, key: Key) -> bool:
        """A copy that its worker wants to give up: another worker must get one."""
        entry = self._get(key)
        return key[0] in self._leaving or (entry is not None and entry.given_up_until_s is not None)

    def take_changed(self) -> set[Key]:
        """Keys of entries that changed since the last call. Without a hash: whether the worker leaves."""
        changed, self._changed = self._changed, set()
        return changed

    # --- entries -----------------------------------------------------------------------------

    def _get(self, key: Key) -> Entry | None:
        mine = self.entries.get(key[0])
        return mine.get(key[1]) if mine is not None else None

    def _entry(self, key: Key) -> Entry:
        """Call ``_update`` after changing it."""
        mine = self.entries.setdefault(key[0], {})
        if key[1] not in mine:
            mine[key[1]] = Entry()
            self._of_model.setdefault(key[1], set()).add(key[0])
        return mine[key[1]]

    def _update(self, key: Key, entry: Entry) -> None:
        self._changed.add(key)
        if entry.hold is None and (entry.loading is None or entry.overdue):
            self._loads.end(key)
        if entry.is_empty and self._get(key) is entry:
            del self.entries[key[0]][key[1]]
            if not self.entries[key[0]]:
                del self.entries[key[0]]
            self._of_model[key[1]].discard(key[0])
            if not self._of_model[key[1]]:
                del self._of_model[key[1]]

    def _end_hold(self, entry: Entry) -> None:
        self.num_busy -= entry.hold is not None
        entry.hold = None

    def _end_drop(self, entry: Entry) -> bool:
        found = entry.drop_until_s is not None
        self.num_busy -= found
        entry.drop_until_s = None
        return found

    def _wake(self, at_s: float, key: Key) -> None:
        heappush(self._alarms, (at_s, *key))


def _failed(key: Key, what: str) -> str:
    return f"worker {key[0]} was to hold a copy of model {key[1][:12]} and {what}"
