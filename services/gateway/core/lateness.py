"""Why requests of a model waited in vain, in a sentence for those who sent them."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.core.routes import ModelRoutes, takes_new
from shared.messages.common import TAKES_PROMPTS
from shared.messages.operations import ScaleRecords

MAX_FAILURES = 3
"""Workers that are named for having failed to load the model."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known when requests expire."""

    model: ModelRoutes | None
    has_workers: bool
    planned: ScaleRecords | None
    """The planner's part for the model. None: no planner answers."""


def no_room_timeout_s(model: ModelRoutes | None, default_s: float) -> float:
    """How long requests of a model wait where there is no room."""
    own_s = model.record.no_room_timeout_s if model is not None else None
    return default_s if own_s is None else own_s


def is_hopeless(name: str, known: Known, timeout_s: float) -> bool:
    """Whether the planner has said for so long that no instance that takes the model's requests can be started, and
    none is on its way. ``known``: of a model without such an instance. Without any worker nothing is known: the first
    one may be about to come. Nor is it where the planner could not decide: it soon may."""
    if known.planned is None or not known.has_workers:
        return False
    return any(
        u.model == name and u.role in TAKES_PROMPTS and not (u.coming or u.undecided) and u.for_s >= timeout_s
        for u in known.planned.unplanned
    )


def why_late(name: str, known: Known) -> str:
    """The reason, as far as it can be known."""
    taking = sum(takes_new(route) for route in known.model.routes.values()) if known.model is not None else 0
    has = f"its instances ({taking}) are full" if taking else "it has none"
    if not known.has_workers:
        return f"{has}, and no worker is registered"
    if known.planned is None:
        return f"{has}, and no planner answers"
    refused = [entry for entry in known.planned.refused if entry.model == name]
    reasons = [f"{u.why} (wanted: {u.wanted} {u.role})" for u in known.planned.unplanned if u.model == name]
    reasons += [f"worker {entry.worker_id} failed to load it: {entry.why}" for entry in refused[:MAX_FAILURES]]
    if reasons:
        return f"{has}, and {'more' if taking else 'one'} could not be started: {'; '.join(reasons)}"
    return has if taking else f"{has} that serves yet"
