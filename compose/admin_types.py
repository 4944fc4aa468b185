"""The gateway's administration JSON, as far as clients read it. Unknown fields are ignored."""

from __future__ import annotations

import msgspec


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered model."""

    name: str
    path: str = ""
    min_instances: int = 1
    max_instances: int | None = None
    weights_bytes: int = 0
    num_layers: int | None = None
    slo_ttft_s: float = 0.0
    slo_tbt_s: float = 0.0
    queued_requests: int = 0
    """That wait in gateways."""


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance that reports has to do."""

    running_requests: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance and the workers that hold it."""

    id: str
    model: str
    state: str
    role: str = "colocated"
    workers: tuple[str, ...] = ()
    layers_ready: int | None = None
    weights_digest: str = ""
    load: InstanceLoad | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One live worker."""

    id: str
    host: str = ""
    device: str = ""
    engine: str = ""
    state: str = ""
    stopping: bool = False
    """It is about to end."""


class RefusedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that failed to load a model, and is left alone with it for ``for_s``."""

    worker: str
    model: str
    why: str = ""
    for_s: float = 0.0
    failures: int = 0


class FloorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A number of instances that somebody asked for, below which the load does not go until then."""

    model: str
    role: str = "colocated"
    instances: int = 0
    until_s: float = 0.0
    """Unix time."""


class UnplannedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for and cannot be had now."""

    model: str
    role: str = "colocated"
    wanted: int = 0
    why: str = ""
    for_s: float = 0.0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that runs."""

    models: tuple[ModelStatus, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    floors: tuple[FloorStatus, ...] = ()
    refused: tuple[RefusedLoad, ...] = ()
    unplanned: tuple[UnplannedStatus, ...] = ()

    def serving(self, model: str) -> int:
        """How many instances of a model answer requests on their own."""
        return sum(i.state == "serving" for i in self.instances if i.model == model)


class InstanceCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A model's copy in the memory of a GPU: an instance."""

    id: str
    worker: str
    host: str = ""
    state: str
    role: str = "colocated"
    complete: bool = False


class HostCopyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model's copy in the memory of a host."""

    worker: str
    host: str = ""
    state: str
    bytes: int = 0
    cached: bool = False
    """Kept by the worker for itself, not placed by the pool."""


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
    """``ok``: some memory holds a complete copy; else ``missing``."""
    host_copy: str
    """``ready``, ``loading`` or ``none``."""
    reason: str = ""
    instances: tuple[InstanceCopy, ...] = ()
    host_copies: tuple[HostCopyStatus, ...] = ()
    host_bytes: int = 0


class PoolHost(msgspec.Struct, frozen=True, kw_only=True):
    """One host's memory for copies."""

    host: str
    workers: tuple[str, ...] = ()
    capacity_bytes: int = 0
    used_bytes: int = 0
    placed_bytes: int = 0
    cached_bytes: int = 0


class PoolTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over models and hosts."""

    host_bytes: int = 0
    host_capacity_bytes: int = 0
    models: int = 0
    models_without_copy: int = 0
    models_without_host_copy: int = 0


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Which memory holds which model."""

    models: tuple[PoolModel, ...]
    hosts: tuple[PoolHost, ...] = ()
    strays: tuple[StrayCopy, ...] = ()
    totals: PoolTotals = PoolTotals()
