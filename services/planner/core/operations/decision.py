"""What is asked of the planner, and what to do about it: revive, load or drain. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shared.failure_domains import shared_domain
from shared.messages.common import LiveChoice, Role
from shared.messages.registry import Floor, ModelRecord, WorkerInfo, WorkerRecord
from shared.registry_view import bounded, counted_as

Rank = tuple[bool, bool, float, float, float, str, str]
"""A place in a round, the lowest first."""


@dataclass(frozen=True, slots=True)
class ModelStanding:
    """How a model stands for whom instances of a role are wanted."""

    has_instances: bool = True
    """That take prompts. A decode instance is never a model's first: as if it had some."""
    below_least: bool = False
    """It has fewer of the role than its minimum, or than were asked for by hand."""
    waits_since_s: float = float("inf")
    """Since when there is no instance and no worker. It may have wanted more long before, while it had some: what made
    room for another must not get it back at once."""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """How many instances of a model are wanted in a role, since when and why, and whether they shall scale live."""

    model: str
    desired: int
    triggered_s: float
    """Monotonic."""
    reason: str
    live: LiveChoice = "auto"
    role: Role = "colocated"
    by_hand: bool = False
    only: frozenset[str] = frozenset()
    """Worker ids: if not empty, no instance elsewhere is to go."""
    deficit: float = 0.0
    """As in ``Demand``."""
    urgent: int | None = None
    """As in ``Demand``."""
    fewer: bool = False
    """It says what could go. By the time that it is decided on, more may have gone, or have another role: that is no
    reason to get them back."""
    bound: str = ""
    """As in ``Demand``."""
    for_another: bool = False
    """The instances go because another model has requests and no worker."""

    def rank(self, standing: ModelStanding) -> Rank:
        """Its place in a round, the lowest first: what was asked for by hand and what limits and floors keep; models
        without an instance, that has waited for longest first; then by deficit and weight, and what has waited for
        longest. A tenth of an instance more or less is none: the load is not known to that."""
        missed = round(standing.weight * self.deficit, 1) if standing.has_instances else 0.0
        kept = self.by_hand or standing.below_least
        since_s = standing.waits_since_s, self.triggered_s
        return not kept, standing.has_instances, -missed, *since_s, self.model, self.role


@dataclass(frozen=True, slots=True)
class Decision:
    """Steps towards the wanted number."""

    desired: int
    """The wanted number after limits and floors."""
    current: int
    load: int
    revive: tuple[WorkerRecord, ...]
    drain: tuple[WorkerRecord, ...]

    @property
    def nothing(self) -> bool:
        return not (self.load or self.revive or self.drain)


def decide(
    model: ModelRecord,
    workers: Sequence[WorkerRecord],
    desired: int,
    floor: Floor | None,
    in_pairs: Collection[str] = (),
    *,
    role: Role = "colocated",
    leaving: Collection[str] = (),
    at_work: Callable[[str], bool] = lambda _: False,
    promised: Collection[str] = (),
    only: Collection[str] = (),
    mutating: Collection[str] = (),
    until_up: bool = False,
    copies_at: Collection[WorkerInfo] = (),
) -> Decision:
    """Steps from what ``workers`` run to ``desired`` instances of ``model`` in ``role``; those of other roles are
    left alone. ``floor`` is the role's.

    Draining instances are revived before anything is loaded (their weights are there), those first that are apart from
    the model's host copies, which are at ``copies_at``; but not on a worker that is about to end. ``leaving``: instance
    ids that were told to drain, and may not show it yet; of these, the ``promised`` make room for a model that still
    waits, and are not revived. Workers leased for the model and role and not yet reporting count as loading. Scaling in
    drains the instances that serve least, never one that still loads (its plan runs; it can go when it is up). Those of
    ``in_pairs`` (instance ids), which scale live with another, go last, and before them those ``at_work``, which have
    requests. ``only``: if not empty, none but those of these workers go. ``mutating``: instance ids that have only just
    been given the role, and do not go. ``until_up``: what still loads replaces nothing that serves: so many serving
    ones stay as are wanted, until it is up and one of them can go.
    """
    counted, num_others, draining = _of_role(model, workers, role, leaving, promised)
    # What is there of this role has its place; of what is left, other roles have taken theirs.
    room = max(len(counted), model.max_instances - num_others)
    wanted = min(bounded(desired, model, floor, role), room)
    missing = wanted - len(counted)
    draining.sort(key=lambda w: shared_domain(w.worker, copies_at))
    revive = tuple(draining[:missing]) if missing > 0 else ()
    load = max(0, missing - len(revive))
    drain: tuple[WorkerRecord, ...] = ()
    if missing < 0:
        serving = [
            w
            for w in counted
            if w.state == "serving"
            and (not only or w.worker.worker_id in only)
            and (w.instance is None or w.instance.instance_id not in mutating)
        ]
        most = -missing
        if until_up:
            most = max(0, min(most, sum(w.state == "serving" for w in counted) - wanted))
        drain = tuple(sorted(serving, key=lambda w: staying(w, in_pairs, at_work, copies_at))[:most])
    return Decision(wanted, len(counted), load, revive, drain)


def lacking(
    model: ModelRecord,
    workers: Sequence[WorkerRecord],
    desired: int,
    floor: Floor | None,
    role: Role,
    *,
    leaving: Collection[str] = (),
    promised: Collection[str] = (),
) -> int:
    """How many instances of ``role`` are missing that nothing can be revived for, as far as instances of the model's
    other roles may take it: those have their places already. Arguments as ``decide`` takes them."""
    counted, _, draining = _of_role(model, workers, role, leaving, promised)
    return max(0, bounded(desired, model, floor, role) - len(counted) - len(draining))


def _of_role(
    model: ModelRecord, workers: Sequence[WorkerRecord], role: Role, leaving: Collection[str], promised: Collection[str]
) -> tuple[list[WorkerRecord], int, list[WorkerRecord]]:
    """What counts as the role's, how many count as other roles', and what could be revived."""
    registered = {model.name: model}
    in_roles = [(about[1], w) for w in workers if (about := counted_as(w, registered)) and not _leaves(w, leaving)]
    counted = [w for counts_as, w in in_roles if counts_as == role]
    draining = [
        w
        for w in workers
        # Instances of other weights that had this name before do not belong to the model: they drain.
        if w.instance is not None
        and (w.instance.model, w.instance.model_hash, w.instance.role) == (model.name, model.model_hash, role)
        and (w.state == "draining" or _leaves(w, leaving))
        and not w.leaves
        and w.instance.instance_id not in promised
    ]
    return counted, len(in_roles) - len(counted), draining


def _leaves(record: WorkerRecord, leaving: Collection[str]) -> bool:
    """A worker that is about to end no longer counts, whatever it still does."""
    told = record.state == "serving" and record.instance is not None and record.instance.instance_id in leaving
    return told or record.leaves


def staying(
    record: WorkerRecord,
    in_pairs: Collection[str],
    at_work: Callable[[str], bool],
    copies_at: Collection[WorkerInfo] = (),
) -> tuple[bool, bool, int, int, str]:
    """The order in which instances go. Of those with as much to do go first who shares a worker with the only host copy
    (``copies_at``: with all of them), then who shares a host: what stays is not lost together with the copy. Then the
    newest (highest epoch): the oldest are sources and hold warm KV."""
    instance_id, epoch = (record.instance.instance_id, record.instance.epoch) if record.instance else ("", 0)
    with_copy = shared_domain(record.worker, copies_at)
    return instance_id in in_pairs, at_work(instance_id), -with_copy, -epoch, record.worker.worker_id
