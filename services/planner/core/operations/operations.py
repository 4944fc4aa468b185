"""All scale operations that the planner remembers, and what they mean for the next one."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from services.planner.core.multicast.traffic import SETTLING_S, Transfers
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.pair_record import LivePair
from services.planner.core.operations.plan_events import base_id
from shared.messages.common import Role
from shared.messages.operations import LiveRecord, ScaleRecord

MAX_RECORDS = 500
MAX_RUNNING = 10_000
"""Operations that have not ended: far more than a cluster's workers, of which each takes part in one or two."""
MAX_RECORD_BYTES = 200 * 1024
MAX_MUTATED_S = 120.0
"""For how long it is remembered when an instance got another role."""
_DETAILS = frozenset({"batches", "bucket_ms", "source_layers", "target_layers", "tokens"})
"""Of a pair's record."""

T = TypeVar("T")


class Operations:
    """Operations by plan id: those that run, and the newest ones that ended, ``keep`` together if no more run."""

    def __init__(self, keep: int = MAX_RECORDS) -> None:
        self._keep = keep
        self._by_id: OrderedDict[str, Operation] = OrderedDict()
        # Hundreds are remembered, and a round asks about those that matter for each of its requests.
        self._open: dict[str, Operation] = {}
        """Those that had not ended at the last look."""
        self._settling: dict[str, float] = {}
        """Those whose transfers may just have ended, and since when it is known that they have."""
        self._past: OrderedDict[str, ScaleRecord] = OrderedDict()
        """Records of operations that ended under an earlier planner."""
        self._told: set[str] = set()
        """Operations that ``just_finished`` has returned."""
        self._mutations: OrderedDict[str, tuple[str, Operation]] = OrderedDict()
        """By instance id, its worker's id and the newest that gave, or gives, it a role; the newest last."""
        self._answers: dict[str, Any] | None = None
        """What was asked since nothing happens."""

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """For as long as nothing happens to operations: what a round asks for each of its requests is made out once,
        however many run."""
        self._answers = {}
        try:
            yield
        finally:
            self._answers = None

    def _once(self, question: str, make: Callable[[], T]) -> T:
        if self._answers is None:
            return make()
        if question not in self._answers:
            self._answers[question] = make()
        answer: T = self._answers[question]
        return answer

    def add(self, operation: Operation) -> None:
        if self._answers:
            self._answers.clear()
        self._by_id[operation.plan_id] = operation
        if operation.finished:
            self._settling[operation.plan_id] = float("inf")
        else:
            self._open[operation.plan_id] = operation
        if operation.direction == "mutate":
            for worker_id, instance_id in operation.open_targets:
                self._mutations.pop(instance_id, None)
                self._mutations[instance_id] = worker_id, operation
        while len(self._by_id) > self._keep:
            # One that runs is needed: it says what its workers are about to do, and somebody may wait for its record.
            oldest = next((i for i in self._by_id if i not in self._open), None)
            if oldest is None and len(self._by_id) <= MAX_RUNNING:
                break
            oldest = oldest or next(iter(self._by_id))
            del self._by_id[oldest]
            self._told.discard(oldest)
            self._open.pop(oldest, None)
            self._settling.pop(oldest, None)
        while self._past and len(self._by_id) + len(self._past) > self._keep:
            self._past.popitem(last=False)

    def reset(self) -> None:
        """Forget everything: another planner led in the meantime."""
        self._by_id.clear()
        self._open.clear()
        self._settling.clear()
        self._past.clear()
        self._told.clear()
        self._mutations.clear()

    def remember(self, record: ScaleRecord) -> None:
        """An operation that ended under an earlier planner."""
        if record.plan_id not in self._by_id:
            self._past[record.plan_id] = record
            while len(self._past) > self._keep:
                self._past.popitem(last=False)

    def get(self, plan_id: str) -> Operation | None:
        """The operation of a plan, or of a part of one."""
        return self._by_id.get(base_id(plan_id))

    def past(self, plan_id: str) -> ScaleRecord | None:
        """The record of an operation that ended under an earlier planner."""
        return self._past.get(plan_id)

    def newest(self, limit: int) -> list[ScaleRecord]:
        """At most ``limit`` records, newest first; pairs without their batches and timelines."""
        limit = max(0, limit)
        mine = [o.record(details=False) for o in itertools.islice(reversed(self._by_id.values()), limit)]
        past = itertools.islice(reversed(self._past.values()), limit - len(mine))
        return [*mine, *map(_without_details, past)]

    def just_finished(self) -> list[Operation]:
        """Operations that ended since this was last asked."""
        found = [o for i, o in self._by_id.items() if i not in self._told and o.finished]
        self._told.update(o.plan_id for o in found)
        return found

    def overrule_drains(self, targets: Iterable[tuple[str, str]], plan_id: str) -> None:
        """These (worker_id, instance_id) were revived by a newer plan: older drains of them end there."""
        revived = set(targets)
        for operation in self.running():
            if operation.direction == "in":
                for worker_id, _ in revived.intersection(operation.open_targets):
                    operation.fail_target(worker_id, f"revived by {plan_id}")

    def running(self) -> list[Operation]:
        """Operations with targets, or pairs, that have not ended."""
        ended = [o for o in self._open.values() if o.finished]
        for operation in ended:
            # What has ended stays so.
            del self._open[operation.plan_id]
            self._settling[operation.plan_id] = float("inf")
        return list(self._open.values())

    def under_way(self, model: str, role: Role) -> Operation | None:
        """The newest that has not ended of a model's role."""
        return next((o for o in reversed(self.running()) if o.model == model and o.role == role), None)

    def transfers(self, now_s: float) -> Transfers:
        """Weights on their way by the plans that are known."""
        since_s = now_s - SETTLING_S
        running, settled = self.running(), []
        for plan_id, ended_s in list(self._settling.items()):
            operation = self._by_id[plan_id]
            if ended_s >= since_s or operation.settled_links(since_s):
                settled.append(operation)
            else:
                del self._settling[plan_id]
        return Transfers(
            tuple(dict.fromkeys(link for o in running for link in o.running_links())),
            tuple(dict.fromkeys(link for o in (*settled, *running) for link in o.settled_links(since_s))),
            {link: gbps for o in running for link, gbps in o.running_gbps().items()},
        )

    def remaining_s(self, now_s: float) -> dict[tuple[str, str], float]:
        """Predicted seconds until each instance that loads is whole, by (worker_id, instance_id)."""
        return self._once(
            "remaining", lambda: {key: left_s for o in self.running() for key, left_s in o.remaining_s(now_s).items()}
        )

    def pair(self, pair_id: str) -> LivePair | None:
        """The pair of that id, ended or not."""
        for operation in reversed(self._by_id.values()):
            pair = operation.pairs.get(pair_id)
            if pair is not None:
                return pair
        return None

    def instances_in_pairs(self) -> frozenset[str]:
        """Sources and targets of the pairs that run."""
        return self._once("pairs", self._instances_in_pairs)

    def _instances_in_pairs(self) -> frozenset[str]:
        running = [p for o in self.running() for p in o.pairs.values() if p.running]
        return frozenset([instance_id for pair in running for instance_id in pair.instance_ids])

    def instances_to_drain(self, until_s: float = float("inf")) -> frozenset[str]:
        """Instances that drain, or were told to and may not show it yet, for what was triggered ``until_s``."""
        return self._once(f"drain until {until_s}", lambda: self._instances_to_drain(until_s))

    def _instances_to_drain(self, until_s: float) -> frozenset[str]:
        draining = [o for o in self.running() if o.direction == "in" and o.triggered_s <= until_s]
        return frozenset([i for o in draining for _, i in o.open_targets])

    def roles_given(self, model: str, now_s: float, within_s: float) -> frozenset[Role]:
        """Roles that instances of the model were given within so many seconds, as far as that has not failed."""
        given = [
            operation.role
            for worker_id, operation in self._mutations.values()
            if operation.model == model and now_s - operation.made_s <= within_s and not operation.has_failed(worker_id)
        ]
        return frozenset(given)

    def mutated(self, now_s: float, within_s: float) -> dict[str, Role]:
        """The roles that instances were given within so many seconds, by instance id; not where that failed."""
        while self._mutations and now_s - next(iter(self._mutations.values()))[1].made_s > MAX_MUTATED_S:
            self._mutations.popitem(last=False)
        return {
            instance_id: operation.role
            for instance_id, (worker_id, operation) in self._mutations.items()
            if now_s - operation.made_s <= within_s and not operation.has_failed(worker_id)
        }


def _without_details(record: ScaleRecord) -> ScaleRecord:
    """As that of an operation of this planner's own."""
    live = [msgspec.structs.asdict(pair) for pair in record.live]
    brief = (LiveRecord(**{name: value for name, value in one.items() if name not in _DETAILS}) for one in live)
    return msgspec.structs.replace(record, live=tuple(brief)) if live else record


def bounded_record(operation: Operation) -> ScaleRecord:
    """The record of an operation that has ended, as small as a message has to be."""
    brief = operation.record(details=False)
    targets = tuple(msgspec.structs.replace(t, layer_ready_ms=()) for t in brief.targets)
    briefest = msgspec.structs.replace(brief, targets=targets, hops=())
    for record in (operation.record(), brief, briefest):
        if len(msgspec.msgpack.encode(record)) <= MAX_RECORD_BYTES:
            return record
    kept = [t for t in targets if t.failure] or targets
    note = f"the record leaves out {len(targets) - len(kept[:500])} of {len(targets)} targets"
    return msgspec.structs.replace(record, targets=tuple(kept[:500]), left_out=(*record.left_out[:50], note))
