"""When something is decided, and what the registry says then."""

from __future__ import annotations

from dataclasses import dataclass

from services.planner.core.multicast.cluster import Clusters
from shared.registry_view import RegistryView


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment by both clocks: messages and operations have unix times, what is remembered here and is to last for a
    while goes by the clock that nobody sets. In a simulation they are the same."""

    unix_s: float
    monotonic_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """What a round decides from. ``clusters`` changes as its steps take workers and give roles."""

    moment: Moment
    view: RegistryView
    clusters: Clusters
