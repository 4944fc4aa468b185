"""Scale operations as the planner knows them: how one is asked for, the record of each, and what it left undone."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import LiveChoice, LivePolicy, Role


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
    coming: bool = False
    """An instance is on its way all the same: one gets its weights or its role, or others go to make room, now
    or when it is their turn."""


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
