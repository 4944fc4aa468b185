"""Which instances get another role of their model, so that none has to load for it (paper section 5.4). Pure.

1. Where a role lacks instances and another one of the model has more than it needs, its surplus gets the role that
   lacks them: no weights move. Instances without requests go first, then the newest.
2. Where decode instances are lacking and no role has a surplus, prefill instances become decode instances, and as many
   prefill instances load in their place, which can be live. A decode instance cannot be loaded live: weights and KV
   would both come in. The monitor says how many decode instances are worth it (``Demand.urgent``): what is only asked
   for ahead loads.

Not the last serving instance that takes prompts becomes one that takes none. A role that has just been given to an
instance of the model gives none for as long as loading twice takes, so that roles do not follow every breath of the
load; unless it would have to go, and by that the monitor has waited for as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from services.planner.core.operations.decision import staying
from shared.messages.common import TAKES_PROMPTS, Role
from shared.messages.registry import WorkerRecord
from shared.registry_view import RegistryView

KEPT_S = 1.0
"""Least time for which a role that was given to an instance gives none."""
KEPT_LOADS = 2.0
"""The same, in times that an instance took to load."""


@dataclass(frozen=True, slots=True)
class RoleSurplus:
    """What a role of the model can give to another one."""

    role: Role
    surplus: int
    """Instances beyond what it needs."""
    why: str
    """What makes them a surplus, in words."""
    records: Sequence[WorkerRecord]
    """Its instances that may go: they serve, and nothing else is about to happen to them."""


@dataclass(frozen=True, slots=True)
class Change:
    """An instance that gets another role."""

    record: WorkerRecord
    was: Role
    why: str


def kept_s(load_s: float) -> float:
    """For how long a role that was given to an instance gives none, where one takes so long to load."""
    return max(KEPT_S, KEPT_LOADS * load_s)


def with_roles(view: RegistryView, roles: Mapping[str, Role]) -> RegistryView:
    """The registry as it will be when instances (by id) have the roles that they were given."""
    return replace(view, workers=tuple([in_role(record, roles) for record in view.workers])) if roles else view


def in_role(record: WorkerRecord, roles: Mapping[str, Role]) -> WorkerRecord:
    """The record, its instance in the role of its id, if that has one."""
    held = record.instance
    if held is None or (role := roles.get(held.instance_id)) is None or role == held.role:
        return record
    return msgspec.structs.replace(record, instance=msgspec.structs.replace(held, role=role))


def surplus_of(there: int, least: int, needed: Iterable[int]) -> int:
    """How many of a role's instances nothing needs. ``least``: what limits and floors keep; ``needed``: what is known
    of its need, of which the smallest counts, and without any it needs all."""
    return max(0, there - max(least, min(needed, default=there)))


def from_surplus(
    role: Role,
    missing: int,
    offers: Sequence[RoleSurplus],
    at_work: Callable[[str], bool],
    num_takers: int,
) -> tuple[Change, ...]:
    """Instances of ``offers`` that get ``role``, at most ``missing``. ``num_takers``: serving instances of the model
    that take prompts."""
    candidates = [(record, offer) for offer in offers for record in offer.records]
    candidates.sort(key=lambda one: staying(one[0], (), at_work))
    taken: Counter[Role] = Counter()
    changes: list[Change] = []
    for record, offer in candidates:
        if len(changes) >= missing:
            break
        ends_taking = offer.role in TAKES_PROMPTS and role not in TAKES_PROMPTS
        if taken[offer.role] >= offer.surplus or (ends_taking and num_takers <= 1):
            continue
        taken[offer.role] += 1
        num_takers -= ends_taking
        changes.append(Change(record, offer.role, offer.why))
    return tuple(changes)


def made_up_for(
    missing: int, prefill: Collection[WorkerRecord], at_work: Callable[[str], bool], num_serving: int
) -> list[WorkerRecord]:
    """Prefill instances that become decode instances while others load in their place. ``prefill``: those that may go,
    of ``num_serving``, of which one stays."""
    ordered = sorted(prefill, key=lambda record: staying(record, (), at_work))
    return ordered[: max(0, min(missing, num_serving - 1))]
