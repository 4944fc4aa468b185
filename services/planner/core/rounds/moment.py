"""When something is decided, and what the registry says then."""

from __future__ import annotations

from dataclasses import dataclass

from services.planner.core.multicast.cluster import Clusters
from shared.registry_view import RegistryView


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment by both clocks: everything goes by the one that nobody sets, and people are told Unix times. In a
    simulation they are the same."""

    unix_s: float
    monotonic_s: float

    def unix_of(self, monotonic_s: float) -> float:
        """The Unix time of another moment."""
        return self.unix_s - (self.monotonic_s - monotonic_s)


@dataclass(frozen=True, slots=True)
class Situation:
    """What a round decides from. ``clusters`` changes as its steps take workers and give roles."""

    moment: Moment
    view: RegistryView
    clusters: Clusters
