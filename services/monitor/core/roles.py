"""What a model needs in each role, by how it is served and within its limits.

Of a model that is served colocated or disaggregated, instances of the other roles are surplus. Those that take prompts
go only as others come to take them: a model is never left without an instance that takes prompts.

``max_instances`` is of all roles together. What stays whatever the load is comes first: roles that were asked for by
hand, and what is surplus and has to stay. Where the rest is too little for what the load needs in several roles, each
gets its minimum, and then a share in proportion to what it needs. What a role could spare, and keeps for what may come,
has the places that are left after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, get_args

from services.monitor.core.demand import DemandSettings, ModelDemand, Verdict
from shared.messages.common import SERVED_BY, TAKES_PROMPTS, Role
from shared.messages.registry import Floor, ModelRecord
from shared.registry_view import bounded

ROLES: tuple[Role, ...] = get_args(Role)
_NONE = Verdict(0, 0.0, "there is none, and none was asked for")


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
    crowded: bool = False,
) -> Mapping[Role, Verdict]:
    """For every role; ``desired`` is within the model's limits and floors, and ``idle`` is beyond these. ``crowded``:
    another model that was asked for lately has no instance, and no worker is spare."""
    settings = DemandSettings(model.slo_ttft_s, model.slo_tbt_s, model.keep_alive_s, connected_since_s, crowded)
    if model.serving == "disaggregated":
        by_load = demand.disaggregated(now_s, {role: there[role].observed for role in ROLES}, settings)
    else:
        alone = model.serving == "colocated"
        by_load = {"colocated": demand.colocated(now_s, there["colocated"].observed, settings, alone=alone)}
    wanted = {role: bounded(verdict.desired, model, there[role].floor, role) for role, verdict in by_load.items()}
    found: dict[Role, Verdict] = {}
    most = model.max_instances
    for role in ROLES:
        if role in by_load:
            continue
        here, verdict = there[role], _NONE
        if here.observed or here.floor is not None:  # nearly all models have instances of one role
            verdict = _by_hand(here)
            if model.serving:
                hears, awake = demand.hears(now_s, settings), demand.is_awake(now_s, settings)
                verdict = _surplus(role, there, wanted, model, hears=hears, awake=awake)
            verdict = _limited(verdict, bounded(verdict.desired, model, here.floor, role), model, here, role)
        found[role] = verdict
        most -= verdict.desired
    if sum(wanted.values()) > most:
        least = {role: bounded(0, model, there[role].floor, role) for role in wanted}
        needed = {role: max(least[role], _needed(v, wanted[role], there[role])) for role, v in by_load.items()}
        wanted = within(wanted, needed, most) if sum(needed.values()) <= most else within(needed, least, most)
    for role, verdict in by_load.items():
        found[role] = _limited(verdict, wanted[role], model, there[role], role)
    return found


def _needed(verdict: Verdict, wanted: int, here: There) -> int:
    """Of the instances that are ``wanted``, those that are not only kept for what may come."""
    return min(wanted, here.observed - verdict.spare) if verdict.spare else wanted


def _limited(verdict: Verdict, desired: int, model: ModelRecord, here: There, role: Role) -> Verdict:
    """With another number; what limits and floors keep is not idle."""
    idle = max(0, min(verdict.idle, here.observed - bounded(0, model, here.floor, role))) if verdict.idle else 0
    limit = verdict.limit if desired == verdict.desired else _Limit(verdict, desired, model, here.floor)
    return Verdict(desired, verdict.needed, verdict.why, idle, min(verdict.spare, idle), verdict.urgent, limit)


class _Limit(NamedTuple):
    """Why it is another number."""

    verdict: Verdict
    desired: int
    model: ModelRecord
    floor: Floor | None

    def __str__(self) -> str:
        if self.desired < self.verdict.desired:
            for_what = "kept" if self.verdict.spare else "needed"
            return f"{self.verdict.desired} would be {for_what}, and max_instances is {self.model.max_instances}"
        if self.floor is not None and self.desired == min(self.floor.instances, self.model.max_instances):
            return f"{self.desired} asked for by hand"
        return f"min_instances is {self.model.min_instances}"


def _by_hand(there: There) -> Verdict:
    if there.floor is None:
        return Verdict(there.observed, there.observed, "no other number was asked for")
    return Verdict(there.floor.instances, there.floor.instances, "asked for by hand")


def _surplus(
    role: Role,
    there: Mapping[Role, There],
    wanted: Mapping[Role, int],
    model: ModelRecord,
    *,
    hears: bool,
    awake: bool,
) -> Verdict:
    """Of a role that the model is not served by. ``hears``: whether it is known what is ``wanted``; ``awake``: whether
    a last instance stays though nothing is."""
    stays, ours = 0, SERVED_BY[model.serving] & TAKES_PROMPTS
    if role in TAKES_PROMPTS and not hears:
        stays = there[role].observed
    elif role in TAKES_PROMPTS:
        stays = staying(
            there[role].observed,
            wanted=sum(wanted[mine] for mine in ours),
            serving=sum(there[mine].serving for mine in ours),
            coming=sum(there[mine].observed - there[mine].serving for mine in wanted),
            lacking=sum(max(0, wanted[mine] - there[mine].observed) for mine in wanted),
        )
    going = there[role].observed - stays
    if role in TAKES_PROMPTS and awake and not any(there[mine].serving for mine in ours):
        # Nothing needs it, so others may have it; nor does it take the place of what is needed.
        has_room = sum(each.observed for each in there.values()) < model.max_instances
        stays = max(stays, min(there[role].observed, 1)) if has_room else stays
    why = f"the model is served {model.serving}"
    return Verdict(stays, stays, f"{why}, once others take their prompts" if stays else why, going, going)


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


def within(wanted: Mapping[Role, int], least: Mapping[Role, int], most: int) -> dict[Role, int]:
    """At most ``most`` of the ``wanted`` in all; each role's ``least`` first."""
    most = max(0, most)
    if sum(wanted.values()) <= most:
        return dict(wanted)
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
