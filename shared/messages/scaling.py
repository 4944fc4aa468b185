"""Scale operations: plans as events, progress reports, and the record of each operation.

Plans travel through JetStream with the plan id as ``Nats-Msg-Id``; workers start at new
messages and ignore a plan whose lease (epoch) is not theirs any more.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import Count, Figure, LayerIndex, LiveChoice, LivePolicy, Role
from shared.messages.registry import ModelRecord

SourceKind = Literal["gpu", "host", "disk"]


class ChainMember(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that takes part in a plan, as target or with a copy to read from."""

    worker_id: str
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
    keepers: tuple[str, ...] = ()
    """If not empty, only these of them do: worker ids."""
    triggered_at_s: float
    planned_at_s: float
    expires_at_s: float
    """A target that has not accepted by then never does."""
    give_up_at_s: float = 0.0
    """A target that does not serve by then has failed. 0: never."""
    reason: str = ""
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """What was asked for and not planned, and why."""
    term: int = 0
    """Of the planner whose plan it is (``shared.messages.registry.Lead``). 0: one of 0.1, which knows no terms."""
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


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """An instance of the same weights that takes over requests that run."""

    worker_id: str
    instance_id: str
    kv_tokens: Count
    """Of KV at most: what it is thought to have free, and others do not get."""


SendBack = Literal["none", "waiting", "all"]
"""Which requests an instance that drains sends back to their gateways' queues, beside those that move: none; those that
have not begun, because other instances take such; or all, because it goes for another model, and nobody takes any."""


class DrainTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One instance to drain, or to revive if it drains. A worker of 0.1 drains without moving anything."""

    worker_id: str
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
    term: int = 0
    """As in ``ScalePlan``."""
    role: Role = "colocated"
    desired: int = 0
    triggered_at_s: float = 0.0
    trace_id: str = ""
    num_parts: int = 1


class MigratePlan(Message, frozen=True, kw_only=True, tag="migrate_plan.v1"):
    """Move some of an instance's running requests with their KV, and leave the instance as it is."""

    plan_id: str
    model: str
    worker_id: str
    instance_id: str
    destinations: tuple[Destination, ...]
    """Not more than their ``kv_tokens`` in all."""
    expires_at_s: float
    """A worker that hears of it later does nothing."""
    reason: str = ""
    term: int = 0
    """As in ``ScalePlan``."""
    for_head: bool = False
    """Only as much as lets the first waiting request begin; nothing, if none waits for KV when it is heard of."""


class GetDestinations(Message, frozen=True, kw_only=True, tag="get_destinations.v1"):
    """A worker that is being stopped asks the planner what becomes of its instance's requests."""

    worker_id: str
    instance_id: str


class Destinations(Message, frozen=True, kw_only=True, tag="destinations.v1"):
    """As in ``DrainTarget``."""

    destinations: tuple[Destination, ...]
    send_back: SendBack


class MutateTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that is to have another role, and the role that it has."""

    worker_id: str
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
    planned_at_s: float
    """By the planner's clock: of two plans for one instance, the one with the higher term, then the later one holds."""
    expires_at_s: float
    """A worker that hears of it later says so, and changes nothing."""
    reason: str = ""
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """As in ``ScalePlan``."""
    term: int = 0
    """As in ``ScalePlan``."""
    desired: int = 0
    """Instances in the new role that the operation leads to."""
    triggered_at_s: float = 0.0
    trace_id: str = ""
    num_parts: int = 1


class Feed(Message, frozen=True, kw_only=True, tag="feed.v1"):
    """A receiver asks the holder of a copy for pieces of it, each as soon as the holder has it itself.

    Answered once the sender is connected and begins; the pieces follow over the transport, piece *i* under
    ``tag_of(epoch, attempt_index(attempt, i))``. ``NotFound`` or ``Conflict``: no such copy here.
    """

    plan_id: str
    model_hash: str
    layout_hash: str
    kind: Literal["gpu", "host"] = msgspec.field(name="copy_kind")
    """``kind`` on the wire is the message's tag."""
    chunk_bytes: int
    worker_id: str
    """The receiver, with where to send to."""
    host: str
    transport_address: bytes
    epoch: int
    attempt: int
    """Of this receiver under its epoch: every feed has tags of its own."""
    pieces: bytes
    """A bit per piece, least significant first; set: wanted."""
    cap_gbps: float = 0.0
    instance_id: str = ""
    """Whose GPU copy. Another instance of the same weights may wait for the receiver itself. Empty: whichever is there,
    as from a receiver of 0.1."""


class GetFeedState(Message, frozen=True, kw_only=True, tag="get_feed_state.v1"):
    """A receiver that gets nothing asks whether its sender still lives. ``NotFound``: it sends no such feed."""

    epoch: int
    attempt: int


class FeedState(Message, frozen=True, kw_only=True, tag="feed_state.v1"):
    """The feed is alive."""

    starved: bool
    """The sender waits for its own upstream: the link to the receiver is not to blame."""


class StopFeed(Message, frozen=True, kw_only=True, tag="stop_feed.v1"):
    """A receiver does not want the rest of a feed: it takes nothing more under this attempt."""

    epoch: int
    attempt: int


class FeedEnded(Message, frozen=True, kw_only=True, tag="feed_ended.v1"):
    """A sender tells the receiver that a feed broke; sent once, and it may be lost."""

    epoch: int
    attempt: int
    reason: str


class FetchRange(Message, frozen=True, kw_only=True, tag="fetch_range.v2"):
    """A receiver's bad block: send these arena bytes again, under ``tag_of(epoch, index)``.

    Answered once the sender has the unit verified itself; the bytes follow over the transport.
    """

    plan_id: str
    model_hash: str
    layout_hash: str
    kind: Literal["gpu", "host"] = msgspec.field(name="copy_kind")
    """``kind`` on the wire is the message's tag."""
    worker_id: str
    """The receiver, with where to send to."""
    transport_address: bytes
    host: str
    epoch: int
    index: int
    unit: int
    offset: int
    num_bytes: int


class GetChecksums(Message, frozen=True, kw_only=True, tag="get_checksums.v1"):
    """A receiver's unit does not match: which checksums has the sender, once it has the unit verified itself?"""

    model_hash: str
    layout_hash: str
    kind: Literal["gpu", "host"] = msgspec.field(name="copy_kind")
    unit: int


class UnitChecksums(Message, frozen=True, kw_only=True, tag="unit_checksums.v1"):
    """xxh3-64 of each block of ``CHECK_BYTES`` of the unit."""

    checksums: tuple[int, ...]


ProgressEvent = Literal[
    "accepted", "first_byte", "live", "layer_ready", "loaded", "serving", "failed", "spare", "working"
]
"""``serving``, of a mutation: the pool knows the new role. ``working``: the first request that came for that role."""


class ScaleProgress(Message, frozen=True, kw_only=True, tag="scale_progress.v1"):
    """A target's (or source's) report on a plan, as it happens."""

    plan_id: str
    worker_id: str
    instance_id: str
    event: ProgressEvent
    at_s: Figure
    layer: LayerIndex = -1
    """With ``layer_ready``: the decoder layer's index."""
    received_bytes: Count = 0
    detail: str = ""


class StartScale(Message, frozen=True, kw_only=True, tag="start_scale.v1"):
    """Ask the planner for ``instances`` of a model in one role now; held as the role's floor for ``hold_s``."""

    model: str
    instances: int
    hold_s: float
    live: LiveChoice = "auto"
    role: Role = "colocated"


class GetScaleRecord(Message, frozen=True, kw_only=True, tag="get_scale_record.v1"):
    """Ask for an operation's record; waits up to ``wait_s`` for it to end."""

    plan_id: str
    wait_s: float = 0.0


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on one target, in milliseconds since the trigger (None: not yet)."""

    worker_id: str
    instance_id: str
    first_byte_ms: float | None = None
    layer_ready_ms: tuple[float, ...] = ()
    live_ms: float | None = None
    """When it began to run layers of another instance's batches."""
    loaded_ms: float | None = None
    serving_ms: float | None = None
    spare_ms: float | None = None
    received_bytes: int = 0
    failure: str = ""
    working_ms: float | None = None
    """Of a mutation: when the first request came for its new role."""
    was: Role | None = None
    """Of a mutation: the role before."""


class LiveBatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a pair: the layers that each side ran, and when its first token came."""

    batch_id: str
    num_requests: int
    num_tokens: int
    target_layers: int
    source_layers: int
    first_token_ms: float


class LiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pair that scaled live. Times in milliseconds since the operation's trigger; None: not yet, or never."""

    pair_id: str
    source: str
    """Worker ids."""
    target: str
    policy: LivePolicy
    why: str
    outcome: Literal["running", "dissolved", "failed", "unknown"] = "running"
    """``unknown``: the source never reported."""
    reason: str = ""
    started_ms: float | None = None
    ended_ms: float | None = None
    first_cooperative_token_ms: float | None = None
    """First token of a batch of which both sides ran layers."""
    batches: tuple[LiveBatchRecord, ...] = ()
    bucket_ms: float = 50.0
    """Of the timelines that follow; all begin at ``started_ms``."""
    source_layers: tuple[int, ...] = ()
    """Layers of prompt batches run per bucket."""
    target_layers: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    """Output tokens of the source's engine per bucket."""


class ScaleRecord(Message, frozen=True, kw_only=True, tag="scale_record.v1"):
    """The record of one scale operation (all times from the trigger)."""

    plan_id: str
    model: str
    status: Literal["running", "done", "failed"]
    direction: Literal["out", "in", "mutate", "none"]
    desired: int
    reason: str
    triggered_at_s: float
    trigger_to_plan_ms: float | None = None
    trigger_to_first_byte_ms: float | None = None
    layer_ready_ms: tuple[float, ...] = ()
    """Per layer, when the last target had it."""
    trigger_to_loaded_ms: float | None = None
    trigger_to_serving_ms: float | None = None
    trigger_to_spare_ms: float | None = None
    """Scaling in: when the last target had drained."""
    bytes: int = 0
    """Bytes received by all targets."""
    gbps: float = 0.0
    """Gigabits per second into one target while its weights came, the slowest target."""
    targets: tuple[TargetRecord, ...] = ()
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    trace_id: str = ""
    live: tuple[LiveRecord, ...] = ()
    """Pairs that scaled live."""
    role: Role = "colocated"
    """Of the instances that the operation is about; of a mutation, the new one."""
    trigger_to_working_ms: float | None = None
    """Of a mutation: when the first request came that one of its instances got for its new role. None: not before
    the record was kept."""
    advice: bool = False
    """Not carried out: the load asked for it, and the model is only to be advised on."""


class ListScaleRecords(Message, frozen=True, kw_only=True, tag="list_scale_records.v1"):
    """Ask for the newest ``limit`` records."""

    limit: int = 20
    models: tuple[str, ...] = ()
    """Of what is refused and unplanned, only what concerns these; none: all."""


class RefusedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that did not load a model, and is left alone with it for a while."""

    worker_id: str
    model: str
    why: str
    for_s: float
    """Seconds until it may be asked again."""
    failures: int


class Unplanned(msgspec.Struct, frozen=True, kw_only=True):
    """What the load or a floor asks for, and no plan can give now."""

    model: str
    role: Role
    wanted: int
    """Instances."""
    why: str
    for_s: float
    """Seconds since it was first refused."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What the load asks for of a model that is only to be advised on."""

    model: str
    role: Role
    now: int
    """Instances."""
    wanted: int
    why: str
    for_s: float
    """Seconds since it was first asked for."""


class ScaleRecords(Message, frozen=True, kw_only=True, tag="scale_records.v1"):
    """Newest first."""

    records: tuple[ScaleRecord, ...]
    refused: tuple[RefusedLoad, ...] = ()
    """In force now, the newest first."""
    unplanned: tuple[Unplanned, ...] = ()
    """Asked for again within the last seconds, those that wait the longest first."""
    advice: tuple[Advice, ...] = ()
    """Asked for by the load and not carried out, for longest first."""
