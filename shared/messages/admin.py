"""What the gateway's ``/admin`` routes take and answer, as JSON: the gateway builds it, the command line reads it.

Unknown fields are ignored, and what a gateway of another release may not send has a default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.engine_args import EngineArgs
from shared.messages.common import SERVED_BY, LiveChoice, ReasoningParserName, Role, Serving, ToolParserName
from shared.messages.decisions import DecisionRecord, RoleVerdict
from shared.messages.operations import Advice, Unplanned
from shared.messages.registry import EngineName
from shared.messages.traffic import WorkerTraffic

MAX_INSTANCES = 1_000_000
"""So many stand for no limit."""
MIN_SLO_S = 0.001
MAX_SLO_S = 3600.0
"""Objectives outside of these are typing errors: no system answers in a microsecond, or should take hours."""

MAX_KEEP_ALIVE_S = 30 * 86_400.0
"""Thirty days: longer, and the model is meant to stay, which ``min_instances`` says."""

MAX_WEIGHT = 1e6

MAX_NO_ROOM_TIMEOUT_S = 3600.0

MAX_HOLD_S = 1e9

Objective = Annotated[float, Meta(ge=MIN_SLO_S, le=MAX_SLO_S)]
ObjectiveOrNone = Annotated[float, Meta(ge=0, le=MAX_SLO_S)]
KeepAlive = Annotated[float, Meta(ge=0, le=MAX_KEEP_ALIVE_S)]
Weight = Annotated[float, Meta(gt=0, le=MAX_WEIGHT)]
NoRoomTimeout = Annotated[float, Meta(ge=0, le=MAX_NO_ROOM_TIMEOUT_S)]


class AddModelBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint to register. ``None`` is absent."""

    path: Annotated[str, Meta(min_length=1)] | None = None
    """Checkpoint directory, as the services see it; required."""
    name: Annotated[str, Meta(min_length=1)] | None = None
    """Up to 200 letters, digits, ``.``, ``_``, ``-``, ``:`` and ``/``, with a letter or digit in front. The
    directory's by default."""
    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] | None = None
    """Of each role that load decides on. 1 by default; 0 with ``keep_alive_s``, which no other minimum goes with."""
    max_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] | None = None
    """Of all roles together; of a disaggregated model twice the minimum, and 2, at least. 0 pauses the model,
    1000000 (the default): no limit."""
    slo_ttft_s: Objective | None = None
    """Objective for the time to the first token. Without one the services' defaults apply."""
    slo_tbt_s: Objective | None = None
    """Objective for the time between two tokens."""
    keep_alive_s: KeepAlive | None = None
    """How long the last instance stays without a request. Without one it stays."""
    served_as: Serving | None = None
    """Which instances the load decides on: ``colocated``, ``disaggregated`` (prefill and decode), or empty:
    colocated ones, while others stay as asked for by hand."""
    weight: Weight | None = None
    """What the model's missed objectives count for beside those of others; 1 by default."""
    advise: bool | None = None
    """What the load asks for is shown and recorded, and not carried out."""
    prefix_cache: bool | None = None
    """Whether requests find KV of earlier ones that begin alike; by default they do."""
    tool_parser: ToolParserName | None = None
    """What reads the calls that the model writes; ``auto``, the default: what its chat template says. With ``none``
    functions are refused."""
    reasoning_parser: ReasoningParserName | None = None
    """What tells the model's thoughts from its answers; ``auto``, the default: what its chat template says. With
    ``none`` all is its answer."""
    no_room_timeout_s: NoRoomTimeout | None = None
    """How long a request waits while the model has no instance and the planner can start none; then 503
    ``no_capacity``. 0: no longer than the planner takes to say so. Without one ``BLITZ_GATEWAY_NO_ROOM_TIMEOUT_S``
    applies."""
    engine: EngineName | None = None
    """``vllm``: only workers that offer it (``BLITZ_WORKER_ENGINES``) get instances. By default the system's own. It
    stays: for another one the model is removed and added."""
    engine_args: dict[str, Any] | None = None
    """As ``EngineArgs`` below, of at most 4 KiB; only with ``engine``."""
    warm: bool | None = None
    """Workers without an instance keep an ``engine`` started for it, so that its next instance waits for nothing but
    weights; only with ``engine``."""

    @property
    def least(self) -> int:
        """Instances to keep: if nothing is said of them, none with a keep-alive, and one without."""
        return (0 if self.keep_alive_s else 1) if self.min_instances is None else self.min_instances


class SetModelBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to change of a registered model. ``None`` is absent: it stays. 0 lifts an objective or the keep-alive."""

    min_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] | None = None
    max_instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] | None = None
    slo_ttft_s: ObjectiveOrNone | None = None
    slo_tbt_s: ObjectiveOrNone | None = None
    """Reaches running instances within a lease."""
    keep_alive_s: KeepAlive | None = None
    served_as: Serving | None = None
    """Empty: as above."""
    weight: Weight | None = None
    advise: bool | None = None
    prefix_cache: bool | None = None
    tool_parser: ToolParserName | None = None
    reasoning_parser: ReasoningParserName | None = None
    no_room_timeout_s: NoRoomTimeout | Literal["default"] | None = None
    """``default``: that of the gateway again."""
    warm: bool | None = None


class ScaleBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many instances, how long at least, and which."""

    instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] | None = None
    """How many; required."""
    hold_s: Annotated[float, Meta(ge=0, le=MAX_HOLD_S)] | None = None
    """Not fewer for so long: 300 by default; 0 lifts an earlier floor."""
    live: LiveChoice | None = None
    """Whether new instances work while they load: ``auto`` by default."""
    role: Role | None = None
    """``colocated`` by default; other roles are left alone."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered model."""

    name: str
    path: str = ""
    """As the services see it."""
    model_hash: str = ""
    """Of configuration and weights."""
    layout_hash: str = ""
    """Of the arrangement in memory: weights move only between workers with equal ones."""
    weights_bytes: int = 0
    instances: int = 0
    """Of all states."""
    serving: int = 0
    """Instances that answer requests."""
    live: int = 0
    """Instances that load and compute for another one."""
    queued_requests: int = 0
    """That wait in gateways, in all of them together."""
    min_instances: int = 1
    max_instances: int = MAX_INSTANCES
    """1000000: no limit; 0: paused."""
    slo_ttft_s: float = 0.0
    """0: the services' default."""
    slo_tbt_s: float = 0.0
    """0: the services' default."""
    keep_alive_s: float = 0.0
    """0: none."""
    served_as: Serving = ""
    """``colocated``, ``disaggregated`` or empty."""
    weight: float = 1.0
    advise: bool = False
    prefix_cache: bool = True
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    no_room_timeout_s: float | None = None
    """Null: the gateway's default."""
    engine: str = ""
    """Empty: the system's own."""
    engine_args: EngineArgs | None = None
    warm: bool = False
    added_at_s: float = 0.0
    """Unix time."""
    architecture: str = ""
    dtype: str = ""
    num_layers: int | None = None
    copies: str = ""
    """``memory``: that of a GPU or host holds a complete copy; ``disk``: none does, and a worker can read it from disk;
    else ``none``."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The registered models."""

    models: tuple[ModelStatus, ...]


class ModelRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """A model is no longer registered."""

    name: str
    removed: bool = True


class ReportedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance that reports has to do."""

    running_requests: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance and the workers that hold it."""

    id: str
    model: str
    state: str
    """A ``live`` instance loads and computes; it gets its requests from the instance that it works for."""
    role: str = "colocated"
    workers: tuple[str, ...] = ()
    layers_ready: int = 0
    """How far a loading one is."""
    weights_digest: str = ""
    """Of the checksums of what it holds: instances of one model must agree."""
    copy: str = "there"
    """Of its weights, for other workers to read: ``there``, ``leaves``, or ``gone`` where its engine has its own."""
    epoch: int = 0
    plan_id: str = ""
    """The operation that made it."""
    context_tokens: int = 0
    """The longest context that it holds."""
    max_running_requests: int = 0
    load: ReportedLoad | None = None
    """Null: it has not reported within the last seconds, as one that loads."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One live worker."""

    id: str
    host: str = ""
    device: str = ""
    engine: str = ""
    engines: tuple[str, ...] = ()
    """Of others, that it offers beside."""
    state: str = ""
    stopping: bool = False
    """It is about to end."""
    clock_ahead_s: float = 0.0
    """Of the pool's time of day; 0: they agree."""
    drain: Literal["", "waits", "drains", "drained"] = ""
    """Of a worker that was drained by hand: its instance stays until another one has taken its place; its requests and
    host copies move away; or it is free."""
    drain_why: str = ""
    """What a drain waits for."""
    instance: str | None = None
    """Its id."""
    model: str | None = None
    pid: int = 0
    leaf: str = ""
    nic_gbps: float = 0.0
    arena_bytes: int = 0
    kv_bytes: int = 0
    lease_plan_id: str = ""
    """The plan that has leased it."""
    gpu_name: str = ""
    """The model of its GPU; with the next three: empty and 0 on CPUs, and where it is not known."""
    gpu_uuid: str = ""
    gpu_capability: str = ""
    gpu_memory_bytes: int = 0
    warm_for: tuple[str, ...] | None = None
    """An engine of others has started here and waits: the registered models that an instance could serve with it at
    once. None: nothing waits."""


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All live workers."""

    workers: tuple[WorkerStatus, ...]


class FloorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A number of instances that somebody asked for, below which the load does not go for ``left_s``."""

    model: str
    role: str = "colocated"
    instances: int = 0
    left_s: float = 0.0


class RefusedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that failed to load a model, and is left alone with it for ``for_s``."""

    worker: str
    model: str
    why: str = ""
    for_s: float = 0.0
    failures: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that runs."""

    models: tuple[ModelStatus, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    floors: tuple[FloorStatus, ...] = ()
    refused: tuple[RefusedWorker, ...] = ()
    """Workers that failed to load a model, and are not asked for a while."""
    unplanned: tuple[Unplanned, ...] = ()
    """Instances that are wanted and not possible now."""
    advice: tuple[Advice, ...] = ()
    """What the load asks for of models that are only to be advised on."""

    def serving(self, model: str, role: Role | None = None) -> int:
        """How many instances of a model answer requests on their own; of one role, or of all."""
        return sum(i.state == "serving" for i in self.instances if i.model == model and role in (None, i.role))

    def is_served(self, model: ModelStatus) -> bool:
        """Whether an instance answers its requests, and it has its least number in each role of a disaggregated one."""
        if not self.serving(model.name):
            return False
        roles = SERVED_BY["disaggregated"] if model.served_as == "disaggregated" else frozenset[Role]()
        return all(self.serving(model.name, role) >= model.min_instances for role in roles)

    def sleeps(self, model: ModelStatus) -> bool:
        """Whether it has no instance, need not have one, and nothing is asked of it."""
        if model.min_instances or model.instances or model.queued_requests:
            return False
        return not any(floor.instances for floor in self.floors if floor.model == model.name)


class InstanceCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A model's copy in the memory of a GPU: an instance."""

    id: str
    worker: str
    host: str = ""
    state: str
    role: str = "colocated"
    complete: bool = False
    """All layers are there."""


class HostCopyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model's copy in the memory of a host."""

    worker: str
    host: str = ""
    state: str
    """``loading``, ``ready`` or ``retired`` (about to go)."""
    bytes: int = 0
    cached: bool = False
    """Left by a load and kept by the worker, not placed by the pool."""


class StrayCopy(HostCopyStatus, frozen=True, kw_only=True):
    """A host copy of a model that is not registered (any more)."""

    model: str
    model_hash: str = ""


class PoolModel(msgspec.Struct, frozen=True, kw_only=True):
    """One registered model and its copies."""

    name: str
    model_hash: str = ""
    weights_bytes: int = 0
    invariant: str
    """``ok``: some memory of a GPU or host holds a complete copy; ``disk``: none does, and a worker said that it
    can read the checkpoint; else ``missing``."""
    host_copy: str
    """The placed one: ``ready``, ``loading`` or ``none``."""
    reason: str = ""
    """Why there is no copy, or no host copy."""
    instances: tuple[InstanceCopy, ...] = ()
    host_copies: tuple[HostCopyStatus, ...] = ()
    host_bytes: int = 0
    """Of its host copies."""


class PoolHost(msgspec.Struct, frozen=True, kw_only=True):
    """One host's memory for copies."""

    host: str
    workers: tuple[str, ...] = ()
    capacity_bytes: int = 0
    used_bytes: int = 0
    placed_bytes: int = 0
    """Of copies that the pool placed."""
    cached_bytes: int = 0
    """Of copies that loads left."""


class PoolTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over models and hosts."""

    host_bytes: int = 0
    host_capacity_bytes: int = 0
    models: int = 0
    models_without_copy: int = 0
    """``missing``."""
    models_without_host_copy: int = 0
    models_on_disk: int = 0
    """``disk``."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Which memory holds which model."""

    models: tuple[PoolModel, ...]
    hosts: tuple[PoolHost, ...] = ()
    strays: tuple[StrayCopy, ...] = ()
    """Host copies of models that are not registered: about to be dropped, or known to a registry that is being
    restored."""
    totals: PoolTotals = PoolTotals()


class TrafficStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker has carried since its process began."""

    workers: tuple[WorkerTraffic, ...] = ()
    silent: tuple[str, ...] = ()
    """Workers that did not answer within half a second, by id."""


class WhyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Why a model has as many instances as it has."""

    model: str
    roles: tuple[RoleVerdict, ...] = ()
    """What it needs now; empty for a time in the past."""
    queued_requests: int = 0
    """That wait in gateways now."""
    unplanned: tuple[Unplanned, ...] = ()
    """What it needs now and cannot get."""
    decisions: tuple[DecisionRecord, ...] = ()
    """Newest first."""
    silent: tuple[Literal["monitor", "planner"], ...] = ()
    """Services that did not answer: their part is missing."""
