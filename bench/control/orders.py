"""What a fleet of simulated workers is told, and what it answers: JSON lines over its standard streams."""

from __future__ import annotations

from typing import Literal

import msgspec


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. Credentials are in the environment."""

    nats_url: str
    first_worker: int
    workers: int
    load_s: float
    report_interval_s: float


class Order(msgspec.Struct, frozen=True):
    """Every other line; each is answered with one."""

    do: Literal["count", "begin", "end"]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """To ``count`` and ``begin``."""

    workers: int
    serving: tuple[str, ...]
    """Models."""
    copies: int
    """Host copies that are complete."""


class Served(msgspec.Struct, frozen=True, array_like=True):
    """An instance that became serving. Times are Unix seconds."""

    model: str
    instance_id: str
    at_s: float
    """Its worker reported so."""
    first_submit_s: dict[str, float]
    """The first request, by gateway."""


class FleetResult(msgspec.Struct, frozen=True, kw_only=True):
    """To ``end``: what was measured since ``begin``."""

    heartbeat_s: tuple[float, ...]
    heartbeats_missed: int
    served: tuple[Served, ...]
    report_late_s: float
    """The longest that a load report went out after it was due."""
