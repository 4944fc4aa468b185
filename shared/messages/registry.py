"""The pool's truth: models, workers, instances, copies, leases and routes."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.engine_args import EngineArgs
from shared.engines import NO_ENGINE
from shared.errors import BlitzError
from shared.messages.codec import Message
from shared.messages.common import (
    AtWorker,
    Count,
    ErrorInfo,
    Figure,
    InstanceState,
    KindName,
    ReasoningParserName,
    Role,
    Serving,
    SignedFigure,
    ToolParserName,
)
from shared.model_spec import NOTHING_KNOWN, AnySpec, GenericSpec, ModelSpec
from shared.subjects import Process

MAX_HOLD_S = 1e9
"""Of a floor: some thirty years."""

EngineName = Annotated[str, Meta(max_length=64)]
"""Of an engine of others; empty: our own."""


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    """A small file of a checkpoint, as it was when the model was added."""

    name: str
    sha256: str
    """64 hex digits."""


class ModelRecord(Message, frozen=True, kw_only=True, tag="model.v1"):
    """A registered model. Peers exchange weights only between equal ``layout_hash``."""

    name: str
    path: str
    """Checkpoint directory, as every worker and gateway sees it."""
    model_hash: str
    layout_hash: str
    weights_bytes: Count
    added_at_s: Figure
    spec: ModelSpec | None = None
    """Of a model that our engine computes; the others have ``generic``."""
    generic: GenericSpec | None = None
    unit_digests: str = ""
    """What the layout's units must hold (``shared.unit_digests``), in their order; ``DIGEST_DIGITS`` each. No worker
    loads a model without. Text, for Redis' scripts read no bytes."""
    files: tuple[FileDigest, ...] = ()
    """The checkpoint's files beside the weights (``shared.checkpoint.IDENTITY_FILES``), as far as it has them."""
    min_instances: int = 1
    """Of each role that it is served by (``SERVED_BY``)."""
    max_instances: int = 1_000_000
    """Of all its roles together."""
    slo_ttft_s: float = 0.0
    """Objective for the time to the first token. 0: the services' default."""
    slo_tbt_s: float = 0.0
    """Objective for the time between two tokens. 0: the services' default."""
    keep_alive_s: float = 0.0
    """How long the last instance stays after the last request, if that is longer than it would by itself. Not 0 only
    with ``min_instances`` 0."""
    serving: Serving = msgspec.field(default="", name="served_as")
    """On the wire and in JSON it has another name: there, ``serving`` is how many instances serve."""
    weight: float = 1.0
    """What a missed objective of this model counts for, beside those of other models."""
    advise: bool = False
    prefix_cache: bool = True
    """Whether its requests find KV of earlier ones that begin alike."""
    tool_parser: ToolParserName = "auto"
    """What reads its calls of functions."""
    reasoning_parser: ReasoningParserName = "auto"
    """What tells its thoughts from its answers."""
    no_room_timeout_s: float | None = None
    """How long its requests wait where no instance can be started. None: the gateway's default; 0: not at all."""
    engine: EngineName = ""
    """What computes it (``shared.engines``). Empty: our own, whichever of them a worker has."""
    engine_args: EngineArgs | None = None
    warm: bool = False
    """Spare workers that offer its engine keep one started for it, with no weights to speak of."""

    @property
    def basics(self) -> AnySpec:
        """What is known of it, whatever computes it."""
        return self.spec or self.generic or NOTHING_KNOWN

    @property
    def kind(self) -> str:
        """Equal for models that differ in nothing but their weights, and are served alike by an engine of others."""
        told = (
            self.layout_hash,
            sorted((file.name, file.sha256) for file in self.files),
            self.engine,
            self.engine_args,
        )
        return hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()[:32]


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is: identity, place and capacity. Constant for an incarnation."""

    worker_id: str
    incarnation: str
    """New at every process start."""
    host: str
    device: KindName
    engine: KindName
    transport_address: bytes
    """UCX worker address; peers connect to it."""
    arena_bytes: Count
    kv_bytes: Count
    leaf: str = "leaf-0"
    nic_gbps: Figure = 10.0
    pid: Count = 0
    nic: str = ""
    """The NIC that this worker uses; workers of one host may share one. Empty: the host's only NIC."""
    scale_up_domain: str = ""
    """Workers joined by NVLink. Empty: the worker stands alone."""
    scale_up_gbps: Figure | None = None
    host_link_gbps: Figure | None = None
    """Between this worker and its host's memory, per direction. None: a typical value of the device."""
    ssd_gbps: Figure | None = None
    host_cache_bytes: Count = 0
    """Host memory that this worker offers for host copies."""
    gpu_name: str = ""
    """Which model of GPU it computes on: ``NVIDIA H100 80GB HBM3``. With the next three: empty and 0 on CPUs, and where
    it is not known."""
    gpu_uuid: str = ""
    gpu_capability: str = ""
    """``9.0``: the CUDA compute capability."""
    gpu_memory_bytes: Count = 0
    engines: Annotated[tuple[KindName, ...], Meta(max_length=16)] = ()
    """Of others, beside ``engine``, that it can serve a model with (``shared.engines``)."""

    @property
    def offered(self) -> tuple[str, ...]:
        """The engines that it can serve a model with, as models name them."""
        return self.engines if self.engine == NO_ENGINE else ("", *self.engines)

    def offers(self, engine: str) -> bool:
        """Whether it can serve a model that names this engine."""
        return engine in self.engines if engine else self.engine != NO_ENGINE

    def engine_of(self, model: ModelRecord) -> str:
        """What computes the model's instances here."""
        return model.engine or self.engine

    def can_hold(self, model: ModelRecord) -> bool:
        """Whether an instance of the model can be here, if the worker is spare."""
        return self.arena_bytes >= model.weights_bytes and self.offers(model.engine)

    @property
    def process(self) -> Process:
        """Whom to speak to."""
        return Process(self.worker_id, self.incarnation)


CopyIs = Literal["there", "leaves", "gone"]


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker does now. ``spare`` workers have no instance."""

    instance_id: str
    model: str
    model_hash: str
    layout_hash: str
    state: InstanceState
    role: Role
    epoch: Count
    layers_ready: Count = 0
    weights_digest: str = ""
    """xxh3-128 of the whole arena's unit checksums, once every unit is ready."""
    max_running_requests: Count = 0
    max_queued_tokens: Count = 0
    context_tokens: Count = 0
    """Longest prompt plus output this instance can hold (model and KV pool)."""
    plan_id: str = ""
    copy: CopyIs = "there"
    """Of the weights, for others to read. An engine that has its own does without it: the worker asks whether it may go
    (``leaves``), and it goes."""

    @property
    def is_complete(self) -> bool:
        """Whether it has all weights of its model: some serve before that."""
        return self.state in ("serving", "draining") and self.weights_digest != ""

    @property
    def is_source(self) -> bool:
        """Whether others can read a whole copy of its model there."""
        return self.is_complete and self.copy != "gone"


class HostCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a model in the host memory of a worker's machine, held by the worker's process."""

    model: str
    model_hash: str
    layout_hash: str
    num_bytes: Count
    state: Literal["loading", "ready", "retired"]
    """``retired``: it waits for the pool's word that it may go, and is no source any more."""
    cached: bool = False
    """Kept by the ``host-cache`` baseline, not placed by the pool."""
    serial: Count = 0
    """Of this copy within its worker's process: the same model, held again later, has another."""
    source: str = ""
    """While it loads, the worker from whose memory; empty: from disk, or not said."""


class WarmEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of others that has started, and waits on a spare worker for its next instance."""

    kind: Annotated[str, Meta(max_length=64)]
    """Of the models that it could serve (``ModelRecord.kind``)."""
    model_hash: Annotated[str, Meta(max_length=64)]
    """Whose weights it has; empty: nobody's."""
    takes_others: bool = False
    """Other weights of this kind may come into it."""

    def is_for(self, kind: str, model_hash: str) -> bool:
        """Whether an instance of a model of this kind begins with it."""
        return self.kind == kind and (self.takes_others or self.model_hash == model_hash)


class WorkerHeartbeat(Message, frozen=True, kw_only=True, tag="worker_heartbeat.v1"):
    """Everything about a worker, at every change and twice per lease: an empty registry heals itself."""

    worker: WorkerInfo
    state: InstanceState
    instance: InstanceInfo | None
    sequence: Count
    leaving: bool = False
    host_copies: tuple[HostCopy, ...] = ()
    nic_egress_gbps: Figure = 0.0
    """Traffic of the worker's NIC now, whoever causes it, averaged since the last report."""
    nic_ingress_gbps: Figure = 0.0
    stopping: bool = False
    """The process is about to end: it takes nothing new, and what drains here is not to be revived."""
    clock_ahead_s: SignedFigure = 0.0
    """Of the pool's time of day; 0 while they agree to within a limit. For people: nothing is decided by it."""
    warm: WarmEngine | None = None


class HeartbeatAck(Message, frozen=True, kw_only=True, tag="heartbeat_ack.v1"):
    """The registry took the heartbeat; the worker's lease runs ``lease_s`` from now."""

    lease_s: float
    wants_model: bool = False
    """The registry does not know the instance's model: send ``RestoreModel``."""
    stop_instance: str = ""
    """The instance of this id was removed (its model is gone): drain it."""
    wants_models: tuple[str, ...] = ()
    """Hashes of models of which the worker reports host copies and that the registry does not know: send a
    ``RestoreModel`` for each."""
    planner_term: Count
    """Of the planner that leads: plans of older ones are void. 0: none has led yet."""
    slo_tbt_s: Figure | None = None
    """The objective that the instance's model has now, for the time between two tokens; 0: none of its own. None: the
    registry does not say."""
    unix_s: Figure | None = None
    """The pool's time of day, for the worker to compare its own with."""
    prepare: ModelRecord | None = None
    """An engine for this model is to be started, and to wait for its next instance."""


class RestoreModel(Message, frozen=True, kw_only=True, tag="restore_model.v1"):
    """A worker gives a model record back to a registry that lost it."""

    model: ModelRecord


class AddModel(Message, frozen=True, kw_only=True, tag="add_model.v1"):
    """Validate a checkpoint directory and register it. Empty ``name`` takes the directory's."""

    path: str
    name: str = ""
    min_instances: int = 1
    max_instances: int = 1_000_000
    slo_ttft_s: float = 0.0
    slo_tbt_s: float = 0.0
    keep_alive_s: float = 0.0
    serving: Serving = ""
    weight: float = 1.0
    advise: bool = False
    prefix_cache: bool = True
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    no_room_timeout_s: float | None = None
    engine: EngineName = ""
    engine_args: EngineArgs | None = None
    warm: bool = False


class SetModel(Message, frozen=True, kw_only=True, tag="set_model.v1"):
    """Change a registered model's settings. None: as it was; 0 lifts an objective or the keep-alive."""

    name: str
    min_instances: int | None = None
    max_instances: int | None = None
    slo_ttft_s: float | None = None
    slo_tbt_s: float | None = None
    keep_alive_s: float | None = None
    serving: Serving | None = None
    weight: float | None = None
    advise: bool | None = None
    prefix_cache: bool | None = None
    tool_parser: ToolParserName | None = None
    reasoning_parser: ReasoningParserName | None = None
    no_room_timeout_s: float | Literal["default"] | None = None
    """``default``: none of its own any more, for 0 is one."""
    warm: bool | None = None


class RemoveModel(Message, frozen=True, kw_only=True, tag="remove_model.v1"):
    """Unregister a model; its instances drain."""

    name: str


class GetSnapshot(Message, frozen=True, kw_only=True, tag="get_snapshot.v1"):
    """Ask the pool for its state, page by page (``shared.registry`` reads it whole). Pages are bounded by bytes, models
    and what belongs to them included; ``cursor`` leads from one to the next."""

    cursor: str = ""
    """``next_cursor`` of the page before."""
    since: str = ""
    """``version`` of an earlier, whole snapshot: only what changed since then, if the pool still knows."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker: its info, what it runs, and who leased it."""

    worker: WorkerInfo
    state: InstanceState
    instance: InstanceInfo | None
    lease_plan_id: str = ""
    """The plan that leased this worker and that it has not reported on yet."""
    lease_model: str = ""
    lease_role: Role = "colocated"
    """Of the instance that the plan makes there."""
    host_copies: tuple[HostCopy, ...] = ()
    nic_egress_gbps: Figure = 0.0
    nic_ingress_gbps: Figure = 0.0
    stopping: bool = False
    """With ``clock_ahead_s``, as in ``WorkerHeartbeat``."""
    clock_ahead_s: SignedFigure = 0.0
    cordoned: bool = False
    """An operator wants it free: nothing new comes here, and what is here goes elsewhere. Its process stays."""
    warm: WarmEngine | None = None

    @property
    def leaves(self) -> bool:
        """Nothing is to be planned onto it, and what it has does not count as staying."""
        return self.stopping or self.cordoned


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """A manual number of instances of one role below which the monitor does not go for ``left_s`` from now on."""

    model: str
    instances: Count
    left_s: float
    role: Role = "colocated"


class Unplaced(msgspec.Struct, frozen=True, kw_only=True):
    """A model that has no host copy, and none on its way."""

    model: str
    model_hash: str
    reason: str
    on_disk: bool = False
    """A worker said that it can read it from disk: where it has no complete copy in any memory, it is there only."""


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot.v1"):
    """One page of the pool's state."""

    publisher: str
    models: tuple[ModelRecord, ...]
    workers: tuple[WorkerRecord, ...]
    floors: tuple[Floor, ...] = ()
    """Of this page's models."""
    unplaced: tuple[Unplaced, ...] = ()
    """Of this page's models."""
    next_cursor: str = ""
    """Where the next page begins; empty on the last one."""
    version: str
    """Of the state as the first page began, to ask for changes ``since`` it."""
    partial: bool = False
    """Only what changed ``since``; ``gone_models`` and ``gone_workers`` are no more."""
    gone_models: tuple[str, ...] = ()
    gone_workers: tuple[str, ...] = ()
    routes_sequence: Count
    """Of the last ``RouteChanges`` before this page was made."""


class GetGpuTime(Message, frozen=True, kw_only=True, tag="get_gpu_time.v1"):
    """Ask the pool that leads what the workers' GPUs were for since it leads."""

    model: str = ""
    """Only of this one, and of what is idle; empty: of all."""


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time of one model in one state of its instances. A worker is one GPU."""

    model: str
    """Empty: of no registered model."""
    state: str
    """``idle`` without an instance."""
    seconds: Figure


class GpuTimeReport(Message, frozen=True, kw_only=True, tag="gpu_time_report.v1"):
    """What the workers' GPUs were for."""

    counted_s: Figure
    """How long this pool has counted."""
    total_s: Figure
    """Of all workers, also of what ``uses`` leaves out: they are a thousand at most, the largest."""
    hour_cost: Figure
    """Of one GPU; 0: not known."""
    uses: tuple[GpuUse, ...]
    """The largest first."""


class LeaseWorkers(Message, frozen=True, kw_only=True, tag="lease_workers.v1"):
    """Lease exactly these spare workers for a plan, all or none: no process in place of another (``Conflict``)."""

    plan_id: str
    model: str
    workers: tuple[AtWorker, ...]
    ttl_s: float
    role: Role = "colocated"
    """Of the instances that the plan makes."""
    term: Count
    """Of the planner that asks (``Lead``)."""

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Of ``workers``, in their order."""
        return tuple([at.worker_id for at in self.workers])


class LeaseGrant(Message, frozen=True, kw_only=True, tag="lease_grant.v1"):
    """The leases: an epoch per worker, higher than any before it on that worker."""

    plan_id: str
    epochs: tuple[tuple[str, int], ...]


class LeaseBatch(Message, frozen=True, kw_only=True, tag="lease_batch.v1"):
    """The leases of one round of decisions. Each is granted or refused as a whole, in this order."""

    leases: tuple[LeaseWorkers, ...]
    term: Count


class LeaseVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one lease: a grant, or why not."""

    plan_id: str
    grant: LeaseGrant | None = None
    error: ErrorInfo | None = None

    @classmethod
    def refused(cls, plan_id: str, error: BlitzError) -> LeaseVerdict:
        return cls(plan_id=plan_id, error=ErrorInfo.of(error))


class LeaseVerdicts(Message, frozen=True, kw_only=True, tag="lease_verdicts.v1"):
    """One per lease of the batch, in its order."""

    verdicts: tuple[LeaseVerdict, ...]


class ReleaseWorkers(Message, frozen=True, kw_only=True, tag="release_workers.v1"):
    """Give leases back; those that the plan no longer holds are ignored."""

    plan_id: str
    worker_ids: tuple[str, ...]
    term: Count
    """As in ``LeaseWorkers``."""


class Lead(Message, frozen=True, kw_only=True, tag="lead.v1"):
    """Ask to lead a kind of service, or to go on leading it, for ``ttl_s`` from now."""

    service: Literal["planner", "monitor"]
    owner: str
    """This process; no other has the same."""
    ttl_s: float
    term: Count = 0
    """The last that this process led with: it keeps that, if nobody else led since."""
    give_up: bool = False
    """Lead no longer: the next that asks may."""


class Leadership(Message, frozen=True, kw_only=True, tag="leadership.v1"):
    """Who leads. Each new leader has a higher ``term``, which goes with everything it says."""

    leads: bool
    """Whether the one that asked does."""
    term: Count
    leader: str
    expires_in_s: float


class SetFloor(Message, frozen=True, kw_only=True, tag="set_floor.v1"):
    """Hold a model at no fewer than ``instances`` of a role for ``hold_s`` (0 lifts the role's floor)."""

    model: str
    instances: Count
    hold_s: float
    role: Role = "colocated"
    term: Count
    """As in ``LeaseWorkers``."""


class CordonWorker(Message, frozen=True, kw_only=True, tag="cordon_worker.v1"):
    """Free a worker of everything, or (``lift``) use it again. Raises ``NotFound`` for one that is not there; a worker
    that is as it should be already is no error."""

    worker_id: str
    lift: bool = False


class Route(AtWorker, frozen=True, kw_only=True):
    """An instance that takes requests."""

    instance_id: str
    state: InstanceState
    role: Role
    max_running_requests: Count
    max_queued_tokens: Count
    context_tokens: Count
    epoch: Count = 0
    stopping: bool = False
    """Its worker is about to end: what drains here does not come back."""


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route, and the model that it leads to."""

    model: str
    route: Route


class GoneRoute(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that takes no requests any more, nor finishes any."""

    model: str
    instance_id: str


class RouteChanges(Message, frozen=True, kw_only=True, tag="route_changes.v1"):
    """What changed since the event before. A gap in ``sequence``, or another ``publisher``, asks for a snapshot.

    Applied in the order of the fields: a model that was removed and added again is in both.
    """

    publisher: str
    sequence: Count
    removed_models: tuple[str, ...] = ()
    """Their routes are gone with them."""
    models: tuple[ModelRecord, ...] = ()
    """New, or with other settings or weights than before; their routes are as they were unless named here."""
    gone: tuple[GoneRoute, ...] = ()
    routes: tuple[ModelRoute, ...] = ()
    """New, or changed."""
