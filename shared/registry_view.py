"""The registry at one moment, as ``shared.registry`` reads it. Pure: cores decide from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.messages.common import Role
from shared.messages.registry import Floor, ModelRecord, Unplaced, WorkerRecord


@dataclass(frozen=True, slots=True)
class RegistryView:
    """The registry at one moment: models by name, workers in the order of ids, floors by model and role."""

    models: Mapping[str, ModelRecord]
    workers: tuple[WorkerRecord, ...]
    floors: Mapping[tuple[str, Role], Floor]
    unplaced: tuple[Unplaced, ...] = ()
    publisher: str = ""
    """With ``sequence``: the last ``RouteTable`` that this view includes."""
    sequence: int = 0
    routes_publisher: str = ""
    """With ``routes_sequence``: the last ``RouteChanges`` that this view includes."""
    routes_sequence: int = 0
