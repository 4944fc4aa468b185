"""Scale operations: plans as events, progress reports, and the record of each operation.

Plans travel through JetStream with the plan id as ``Nats-Msg-Id``; workers start at new
messages and ignore a plan whose lease (epoch) is not theirs any more.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import Role
from shared.messages.registry import ModelRecord

SourceKind = Literal["gpu", "host", "disk"]


class ChainMember(msgspec.Struct, frozen=True, kw_only=True):
    """One hop of a chain. The source is member 0 unless the chain starts at a disk."""

    worker_id: str
    instance_id: str
    host: str
    transport_address: bytes
    epoch: int
    """The target's lease epoch, unique in the cluster: the tags of its incoming transfer carry it
    (``transport.tag_of(epoch, chunk)``). For a source, its instance's epoch."""


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """A serial forwarding chain (paper section 5.1). Each member sends to the next while it receives.

    ``source`` is None for a disk chain: the first target reads the checkpoint and forwards it.
    """

    source_kind: SourceKind
    source: ChainMember | None
    targets: tuple[ChainMember, ...]
    chunk_bytes: int
    predicted_finish_s: float = 0.0


class ScalePlan(Message, frozen=True, kw_only=True, tag="scale_plan.v1"):
    """Load ``model`` on the targets of ``chains``. Supersedes only the targets that it names."""

    plan_id: str
    model: ModelRecord
    role: Role
    chains: tuple[Chain, ...]
    triggered_at_s: float
    planned_at_s: float
    expires_at_s: float
    reason: str = ""
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """What was asked for and not planned, and why."""


class DrainTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One instance to drain, or to revive if it drains."""

    worker_id: str
    instance_id: str


class DrainPlan(Message, frozen=True, kw_only=True, tag="drain_plan.v1"):
    """Drain these instances and give their workers back; ``revive`` takes drains back instead."""

    plan_id: str
    model: str
    targets: tuple[DrainTarget, ...]
    revive: bool = False
    reason: str = ""


class FetchRange(Message, frozen=True, kw_only=True, tag="fetch_range.v1"):
    """A receiver's bad block: send these arena bytes again, under ``tag_of(epoch, index)``.

    Answered once the sender has the unit verified itself; the bytes follow over the transport.
    """

    plan_id: str
    worker_id: str
    """The receiver, with where to send to."""
    transport_address: bytes
    host: str
    epoch: int
    index: int
    unit: int
    offset: int
    num_bytes: int


ProgressEvent = Literal["accepted", "first_byte", "layer_ready", "loaded", "serving", "failed", "spare"]


class ScaleProgress(Message, frozen=True, kw_only=True, tag="scale_progress.v1"):
    """A target's (or source's) report on a plan, as it happens."""

    plan_id: str
    worker_id: str
    instance_id: str
    event: ProgressEvent
    at_s: float
    layer: int = -1
    """With ``layer_ready``: the decoder layer's index."""
    received_bytes: int = 0
    detail: str = ""


class StartScale(Message, frozen=True, kw_only=True, tag="start_scale.v1"):
    """Ask the planner for ``instances`` of a model now; held as a floor for ``hold_s``."""

    model: str
    instances: int
    hold_s: float


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
    loaded_ms: float | None = None
    serving_ms: float | None = None
    spare_ms: float | None = None
    received_bytes: int = 0
    failure: str = ""


class ScaleRecord(Message, frozen=True, kw_only=True, tag="scale_record.v1"):
    """The record of one scale operation (all times from the trigger)."""

    plan_id: str
    model: str
    status: Literal["running", "done", "failed"]
    direction: Literal["out", "in", "none"]
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


class ListScaleRecords(Message, frozen=True, kw_only=True, tag="list_scale_records.v1"):
    """Ask for the newest ``limit`` records."""

    limit: int = 20


class ScaleRecords(Message, frozen=True, kw_only=True, tag="scale_records.v1"):
    """Newest first."""

    records: tuple[ScaleRecord, ...]
