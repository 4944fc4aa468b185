"""Where a target's bytes come from, as its plan says: one planned upstream per stripe, and others to climb to. Pure.

A target whose upstream is lost continues at its first missing piece from the nearest holder upstream of it: the lost
one's own sources, theirs, and so on to the chain's head; then the plan's fallbacks; at last the disk. Climbing never
goes sideways or down, so no worker ever waits for one that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.errors import BadRequest
from shared.messages.plans import Chain, ChainMember, ScalePlan, SourceKind, Stripe
from shared.subjects import Process


@dataclass(frozen=True, slots=True)
class Upstream:
    """A copy in the memory of a worker's GPU or host, in the target's own process (``local``), or its checkpoint
    directory (``disk``)."""

    kind: Literal["gpu", "host", "local", "disk"]
    worker_id: str = ""
    host: str = ""
    transport_address: bytes = b""
    instance_id: str = ""
    """Of a GPU copy."""
    incarnation: str = ""
    """Of the worker's process."""

    @property
    def worker(self) -> Process:
        """Whom to ask for it."""
        return Process(self.worker_id, self.incarnation)


DISK = Upstream("disk")


@dataclass(frozen=True, slots=True)
class StripeSources:
    """One stripe of a target's copy: its share of the bytes, and where from, in the order to try."""

    share: float
    upstreams: tuple[Upstream, ...]
    cap_gbps: float = 0.0
    """Of the first upstream's link."""


@dataclass(frozen=True, slots=True)
class PlanPart:
    """A worker's part of a plan, as a target."""

    member: ChainMember
    chain: Chain
    position: int
    """Hops before it."""
    stripes: tuple[StripeSources, ...]


def part_of(plan: ScalePlan, worker_id: str) -> PlanPart | None:
    """What the plan wants from this worker as a target; None if it is none.

    Raises ``BadRequest`` for a plan that names unknown members or whose hop lacks stripes.
    """
    for chain in plan.chains:
        for position, hop in enumerate(chain.hops):
            if worker_id in hop.targets:
                if not hop.stripes:
                    raise BadRequest(f"{plan.plan_id}: the hop of {worker_id} has no stripes", param="stripes")
                try:
                    stripes = tuple(_sources(plan, stripe, worker_id) for stripe in hop.stripes)
                    return PlanPart(plan.member(worker_id), chain, position, stripes)
                except KeyError as error:
                    raise BadRequest(f"{plan.plan_id} names {error}, which is no member", param="members") from error
    return None


def _sources(plan: ScalePlan, stripe: Stripe, me: str) -> StripeSources:
    first = _upstream(plan, stripe.source, stripe.source_kind, me)
    planned = first if stripe.target == me else _upstream(plan, stripe.target, "gpu", me)
    found: list[Upstream] = [planned]
    frontier = [planned] if planned is first else [planned, first]
    if planned is not first:
        found.append(first)
    while frontier:
        lost = frontier.pop(0)
        for upstream in _upstreams_of(plan, lost, me):
            if upstream not in found:
                found.append(upstream)
                frontier.append(upstream)
    found += [_upstream(plan, copy.worker_id, copy.kind, me) for copy in plan.fallbacks]
    # The disk comes last, unless it is what was planned. No worker climbs to itself.
    others = [u for u in found if u.kind == "local" or (u.worker_id != me and u is not DISK)]
    ordered = dict.fromkeys([planned, *others, DISK])
    return StripeSources(stripe.share, tuple(ordered), stripe.cap_gbps if stripe.target == me else 0.0)


def _upstreams_of(plan: ScalePlan, upstream: Upstream, me: str) -> list[Upstream]:
    if upstream.kind != "gpu":
        return []
    return [
        _upstream(plan, stripe.source, stripe.source_kind, me)
        for chain in plan.chains
        for hop in chain.hops
        if upstream.worker_id in hop.targets
        for stripe in hop.stripes
    ]


def _upstream(plan: ScalePlan, worker_id: str, kind: SourceKind, me: str) -> Upstream:
    if kind == "disk":
        return DISK
    member = plan.member(worker_id)
    if kind == "host" and worker_id == me:
        return Upstream("local", worker_id)
    instance_id = member.instance_id if kind == "gpu" else ""
    return Upstream(kind, worker_id, member.host, member.transport_address, instance_id, member.incarnation)
