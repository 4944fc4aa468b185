"""The gateway's administration JSON, as far as clients read it. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered model."""

    name: str
    path: str = ""
    min_instances: int = 1
    max_instances: int | None = None
    weights_bytes: int = 0


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance and the workers that hold it."""

    id: str
    model: str
    state: str
    role: str = "colocated"
    workers: tuple[str, ...] = ()
    layers_ready: int | None = None
    weights_digest: str = ""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One live worker."""

    id: str
    host: str = ""
    device: str = ""
    engine: str = ""
    state: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that runs."""

    models: tuple[ModelStatus, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    floors: tuple[dict[str, Any], ...] = ()

    def serving(self, model: str) -> int:
        """How many instances of a model answer requests on their own."""
        return sum(i.state == "serving" for i in self.instances if i.model == model)
