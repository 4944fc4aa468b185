"""What a model needs in each role, by how it is served and within its limits.

Of a model that is served colocated or disaggregated, instances of the other roles are surplus. Those that take prompts
go only as others come to take them: a model is never left without an instance that takes prompts.

``max_instances`` is of all roles together. What stays whatever the load is comes first: roles that were asked for by
hand, and what is surplus and has to stay. Where the rest is too little for what the load needs in several roles, each
gets its minimum, and then a share in proportion to what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from services.monitor.core.demand import ModelDemand, Settings, Verdict
from shared.messages.common import SERVED_BY, TAKES_PROMPTS, Role
from shared.messages.registry import Floor, ModelRecord
from shared.registry_view import bounded

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class There:
    """The instances of one role."""

    observed: int = 0
    """They serve, or are on their way to."""
    serving: int = 0
    floor: Floor | None = None


def verdicts(
    demand: ModelDemand,
    model: ModelRecord,
    there: Mapping[Role, There],
    now_s: float,
    *,
    connected_since_s: float = float("-inf"),
) -> Mapping[Role, Verdict]:
    """For every role; ``desired`` is within the model's limits and floors, and ``idle`` is beyond these."""
    settings = Settings(model.slo_ttft_s, model.slo_tbt_s, model.keep_alive_s, connected_since_s)
    observed = {role: there[role].observed for role in ROLES}
    found: dict[Role, Verdict] = {}
    if model.serving == "disaggregated":
        found |= demand.disaggregated(now_s, observed, settings)
    else:
        alone = model.serving == "colocated"
        found["colocated"] = demand.colocated(now_s, observed["colocated"], settings, alone=alone)
    least = {role: bounded(0, model, there[role].floor, role) for role in ROLES}
    wanted = {role: bounded(verdict.desired, model, there[role].floor, role) for role, verdict in found.items()}
    for role in ROLES:
        if role not in found:
            found[role] = _surplus(role, there, wanted, model) if model.serving else _by_hand(there[role])
    fixed = {role: bounded(found[role].desired, model, there[role].floor, role) for role in ROLES if role not in wanted}
    within_limit = within(wanted, {role: least[role] for role in wanted}, model.max_instances - sum(fixed.values()))
    return {
        role: replace(
            verdict,
            desired=within_limit[role] if role in wanted else fixed[role],
            idle=max(0, min(verdict.idle, observed[role] - least[role])),
        )
        for role, verdict in found.items()
    }


def _by_hand(there: There) -> Verdict:
    if there.floor is None:
        return Verdict(there.observed, there.observed, "no other number was asked for")
    return Verdict(there.floor.instances, there.floor.instances, "asked for by hand")


def _surplus(role: Role, there: Mapping[Role, There], wanted: Mapping[Role, int], model: ModelRecord) -> Verdict:
    """Of a role that the model is not served by."""
    stays = 0
    if role in TAKES_PROMPTS:
        ours = [mine for mine in SERVED_BY[model.serving] if mine in TAKES_PROMPTS]
        stays = staying(
            there[role].observed,
            wanted=sum(wanted[mine] for mine in ours),
            serving=sum(there[mine].serving for mine in ours),
            coming=sum(there[mine].observed - there[mine].serving for mine in wanted),
            lacking=sum(max(0, wanted[mine] - there[mine].observed) for mine in wanted),
        )
    why = f"the model is served {model.serving}"
    return Verdict(
        stays, stays, f"{why}, once others take their prompts" if stays else why, there[role].observed - stays
    )


def staying(surplus: int, *, wanted: int, serving: int, coming: int, lacking: int) -> int:
    """How many of ``surplus`` instances that take prompts are to stay for now: one for each that is ``wanted`` in their
    place and does not serve yet. But one of several goes while instances are ``lacking`` and none is ``coming``, since
    there may be no other worker for these."""
    stays = min(surplus, max(0, wanted - serving))
    if wanted and not serving:
        stays = max(stays, min(surplus, 1))
    if stays == surplus > 1 and lacking and not coming:
        stays -= 1
    return stays


def within(wanted: Mapping[Role, int], least: Mapping[Role, int], most: int) -> Mapping[Role, int]:
    """At most ``most`` of the ``wanted`` in all; each role's ``least`` first."""
    most = max(0, most)
    if sum(wanted.values()) <= most:
        return wanted
    if sum(least.values()) >= most:
        return _shares(least, most)
    more = _shares({role: wanted[role] - least[role] for role in wanted}, most - sum(least.values()))
    return {role: least[role] + more[role] for role in wanted}


def _shares(of: Mapping[Role, int], most: int) -> dict[Role, int]:
    """Whole numbers in proportion; what is left over goes to the largest remainders, prompts first."""
    total = max(1, sum(of.values()))
    shares = {role: most * number // total for role, number in of.items()}
    by_remainder = sorted(of, key=lambda role: (-(most * of[role] % total), role not in TAKES_PROMPTS))
    for role in by_remainder[: most - sum(shares.values())]:
        shares[role] += 1
    return shares
