"""Plans of the planner as events: instances that load, drain, change their role, or give requests away.

Plans travel through JetStream with the plan id as ``Nats-Msg-Id``; workers start at new
messages and ignore a plan whose lease (epoch) is not theirs any more. For how long one holds is said in seconds from
when the stream took it (``shared.bus.base.Stored``), for hosts' clocks may differ: what is left when it is sent of the
time for which it was decided.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import AtWorker, Count, Role
from shared.messages.destinations import Destination, SendBack
from shared.messages.registry import ModelRecord
from shared.subjects import Process

SourceKind = Literal["gpu", "host", "disk"]


class ChainMember(AtWorker, frozen=True, kw_only=True):
    """A worker that takes part in a plan, as target or with a copy to read from."""

    instance_id: str
    """A target's instance, or the source's. Empty for a source of which only the host copy is used."""
    host: str
    transport_address: bytes
    epoch: int = 0
    """A target's lease epoch, unique in the cluster: the tags of everything it receives carry it. 0 for sources."""


class Stripe(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the model's bytes, on its way from one copy to one target of a hop (paper section 5.1, Figure 14)."""

    source: str
    """Worker id of the copy's holder; empty for a disk."""
    source_kind: SourceKind
    target: str
    share: float = 1.0
    """Of the model's bytes. The shares of a hop's stripes sum to 1."""
    cap_gbps: float = 0.0
    """Send no faster than this: the way is shared with serving traffic. 0: no cap."""


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A scale-up group that loads together: each target receives its own stripes from their sources, and the
    other stripes from the group's members that receive those (all-gather)."""

    targets: tuple[str, ...]
    """Worker ids."""
    stripes: tuple[Stripe, ...]
    predicted_finish_s: float = 0.0
    """From the start of the transfer."""
    overhead_s: float = 0.0
    """What the load is expected to take beside that."""


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """A serial forwarding chain (paper section 5.1): each hop sends to the next while it receives."""

    hops: tuple[Hop, ...]
    chunk_bytes: int


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A complete copy of the model in the memory of a worker's GPU, or of its host."""

    worker_id: str
    kind: Literal["gpu", "host"]


class ScalePlan(Message, frozen=True, kw_only=True, tag="scale_plan.v2"):
    """Load ``model`` on the targets of ``chains``. Supersedes only the targets that it names."""

    plan_id: str
    model: ModelRecord
    role: Role
    members: tuple[ChainMember, ...]
    """Everyone that chains and fallbacks name, by worker id."""
    chains: tuple[Chain, ...]
    fallbacks: tuple[Copy, ...] = ()
    """Where a target whose upstreams are all lost continues, in this order; after them its disk."""
    keep_on_host: bool = False
    """Targets also keep a copy in their host's memory (the ``host-cache`` baseline)."""
    early: bool = False
    """Targets take requests before they have all weights, where their engines can: no instance serves the model."""
    keepers: tuple[str, ...] = ()
    """If not empty, only these of them do: worker ids."""
    triggered_at_s: float
    """Unix time, for people."""
    triggered_ago_s: float = 0.0
    """Before it was planned."""
    valid_s: float
    """From when the stream took it. A target that has not accepted by then never does."""
    give_up_s: float = 0.0
    """From then, too. A target that does not serve by then has failed. 0: never."""
    reason: str = ""
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """What was asked for and not planned, and why."""
    term: Count
    """Of the planner whose plan it is (``shared.messages.registry.Lead``)."""
    desired: int = 0
    """Instances that the operation leads to."""
    trace_id: str = ""
    num_parts: int = 1
    """A plan with many targets is published in parts, each with an id of its own: ``<plan>.<number>``."""

    def keeps_on_host(self, worker_id: str) -> bool:
        """Whether this target also keeps a copy in its host's memory."""
        return self.keep_on_host and (not self.keepers or worker_id in self.keepers)

    def member(self, worker_id: str) -> ChainMember:
        """The member of that worker id. Raises ``KeyError``."""
        for member in self.members:
            if member.worker_id == worker_id:
                return member
        raise KeyError(worker_id)

    @property
    def targets(self) -> tuple[ChainMember, ...]:
        """All targets, in the order of chains and hops."""
        members = {m.worker_id: m for m in self.members}
        return tuple(members[t] for chain in self.chains for hop in chain.hops for t in hop.targets)


class DrainTarget(AtWorker, frozen=True, kw_only=True):
    """One instance to drain, or to revive if it drains."""

    instance_id: str
    destinations: tuple[Destination, ...] = ()
    """Where its running requests may go with their KV."""
    send_back: SendBack = "none"


class DrainPlan(Message, frozen=True, kw_only=True, tag="drain_plan.v1"):
    """Drain these instances and give their workers back; ``revive`` takes drains back instead."""

    plan_id: str
    model: str
    targets: tuple[DrainTarget, ...]
    revive: bool = False
    reason: str = ""
    term: Count
    """As in ``ScalePlan``."""
    role: Role = "colocated"
    desired: int = 0
    triggered_at_s: float = 0.0
    triggered_ago_s: float = 0.0
    trace_id: str = ""
    num_parts: int = 1


class MigratePlan(Message, frozen=True, kw_only=True, tag="migrate_plan.v1"):
    """Move some of an instance's running requests with their KV, and leave the instance as it is."""

    plan_id: str
    model: str
    worker_id: str
    incarnation: str
    """Of that worker's process."""
    instance_id: str
    destinations: tuple[Destination, ...]
    """Not more than their ``kv_tokens`` in all."""
    valid_s: float
    """A worker that hears of it later does nothing."""
    reason: str = ""
    term: Count
    """As in ``ScalePlan``."""
    for_head: bool = False
    """Only as much as lets the first waiting request begin; nothing, if none waits for KV when it is heard of."""

    @property
    def worker(self) -> Process:
        """Whom it is for."""
        return Process(self.worker_id, self.incarnation)


class MutateTarget(AtWorker, frozen=True, kw_only=True):
    """One instance that is to have another role, and the role that it has."""

    instance_id: str
    was: Role


class MutatePlan(Message, frozen=True, kw_only=True, tag="mutate_plan.v1"):
    """Give these instances another role (paper section 5.4). No weights move, and requests under way finish as they
    began."""

    plan_id: str
    model: str
    targets: tuple[MutateTarget, ...]
    role: Role
    """From now on."""
    planned_s: float
    """By the monotonic clock of the planner of this term: of two plans for one instance, the one with the higher term,
    then the later one holds."""
    valid_s: float
    """A worker that hears of it later says so, and changes nothing."""
    reason: str = ""
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """As in ``ScalePlan``."""
    term: Count
    """As in ``ScalePlan``."""
    desired: int = 0
    """Instances in the new role that the operation leads to."""
    triggered_at_s: float = 0.0
    triggered_ago_s: float = 0.0
    trace_id: str = ""
    num_parts: int = 1
