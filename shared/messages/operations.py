"""Scale operations as the planner knows them: how one is asked for, the record of each, and what it left undone."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import LiveChoice, LivePolicy, Role
from shared.messages.plans import SourceKind


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
    """Per layer."""
    live_ms: float | None = None
    """When it began to run layers of another instance's batches."""
    loaded_ms: float | None = None
    serving_ms: float | None = None
    spare_ms: float | None = None
    received_bytes: int = 0
    failure: str = ""
    """Empty: none."""
    working_ms: float | None = None
    """Of a mutation: when the first request came for its new role."""
    was: Role | None = None
    """Of a mutation: the role before."""
    gbps: float | None = None
    """Gigabits per second, from accepting the plan until loaded."""


class HopRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A way on which a target gets weights, or a stripe of them."""

    source: str
    """Worker id of the copy's holder; empty for a disk."""
    source_kind: SourceKind
    target: str
    """Worker id."""
    share: float = 1.0
    """Of the model's bytes."""


class LiveBatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a pair: the layers that each side ran, and when its first token came."""

    batch_id: str
    num_requests: int
    """A prompt, or several that run together."""
    num_tokens: int
    target_layers: int
    """0: taken before the target had a layer."""
    source_layers: int
    first_token_ms: float


class LiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pair that scaled live. Times in milliseconds since the operation's trigger; None: not yet, or never."""

    pair_id: str
    source: str
    """Worker id of the overloaded instance."""
    target: str
    """Worker id of the new one."""
    policy: LivePolicy
    """As ``BLITZ_PLANNER_LIVE_POLICY`` says."""
    why: str
    """Why these two."""
    outcome: Literal["running", "dissolved", "failed", "unknown"] = "running"
    """``dissolved``: ended as planned; ``failed``: a member died, or the load was cancelled; ``unknown``: the
    source is gone, or did not report in time."""
    reason: str = ""
    started_ms: float | None = None
    """When the two began to work together."""
    ended_ms: float | None = None
    """When they stopped."""
    first_cooperative_token_ms: float | None = None
    """First token of a prompt of which both ran layers; null: there was none."""
    batches: tuple[LiveBatchRecord, ...] = ()
    """In the order of their arrival."""
    bucket_ms: float = 50.0
    """Of the timelines that follow; all begin at ``started_ms``."""
    source_layers: tuple[int, ...] = ()
    """Layers of prompt batches run per bucket."""
    target_layers: tuple[int, ...] = ()
    """The same of the target."""
    tokens: tuple[int, ...] = ()
    """Output tokens of the source per bucket. Where they stop for long, the source only computes prompts: lower the
    TBT objective."""


class ScaleRecord(Message, frozen=True, kw_only=True, tag="scale_record.v1"):
    """The record of one scale operation (all times from the trigger)."""

    plan_id: str
    model: str
    status: Literal["running", "done", "failed"]
    """``done``: every target ended well; ``failed``: at least one did not."""
    direction: Literal["out", "in", "mutate", "none"]
    """``mutate``: instances got another role; ``none``: nothing to do, or an operation asked for before is about to
    do it."""
    desired: int
    """The number asked for."""
    reason: str
    """Why; of an operation that failed as a whole, the error."""
    triggered_at_s: float
    """Unix time: when the load first called for this number, or the request reached the planner."""
    trigger_to_plan_ms: float | None = None
    """Until the plan was published."""
    trigger_to_first_byte_ms: float | None = None
    """Until the first target had its first piece, or began to read from disk."""
    layer_ready_ms: tuple[float, ...] = ()
    """Per decoder layer, until the last target had it and all before it, verified."""
    trigger_to_loaded_ms: float | None = None
    """Until the last target held all its weights."""
    predicted_loaded_ms: float | None = None
    """What that was expected to be when the plan was made; None: it was not known."""
    trigger_to_serving_ms: float | None = None
    """Until the last target accepted requests; of a mutation, until the pool knew its new role."""
    trigger_to_spare_ms: float | None = None
    """Scaling in: until the last target had drained and its worker was spare."""
    bytes: int = 0
    """Bytes received by all targets."""
    gbps: float = 0.0
    """Gigabits per second of the slowest target, from accepting the plan until loaded."""
    targets: tuple[TargetRecord, ...] = ()
    explain: tuple[str, ...] = ()
    """Why this source and this order, and which instances were paired."""
    left_out: tuple[str, ...] = ()
    """What could not be planned, and why. Such an operation is still ``done``."""
    trace_id: str = ""
    """Empty without tracing, and where this operation's trace is not kept."""
    live: tuple[LiveRecord, ...] = ()
    """Pairs that scaled live; the operation runs until they have ended, too."""
    role: Role = "colocated"
    """Of the instances that the operation is about; of a mutation, the new one."""
    trigger_to_working_ms: float | None = None
    """Of a mutation: until one of its targets got its first request in the new role. Null: not before the record
    was kept."""
    hops: tuple[HopRecord, ...] = ()
    """In the order of the chains; the first 500."""
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
    coming: bool = False
    """An instance is on its way all the same: one gets its weights or its role, or others go to make room, now
    or when it is their turn."""
    undecided: bool = False
    """The registry, the lease or the plan stream failed: that says nothing of room."""


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
