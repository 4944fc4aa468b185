"""What ``--what-if`` sweeps: hosts, the rate of NICs, how long copies stay in host memory, and how long instances are
kept that the load does not need. Pure.

hosts=1,2,4              hosts of the cluster, each as the cluster's
nic-gbps=25,100,400      each NIC, Gbit/s
keep-copies=60,300,never seconds, of systems that keep copies for a time
give-back=0,15,60        seconds, of systems that scale; 0: by the rule
hosts                    values that fit the cluster
all                      the first three
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from bench.sim.cluster import Cluster
from bench.systems import NEVER, System
from shared.errors import BadRequest

HOSTS, NIC_GBPS, KEEP_COPIES, GIVE_BACK = "hosts", "nic-gbps", "keep-copies", "give-back"
AXES = (HOSTS, NIC_GBPS, KEEP_COPIES, GIVE_BACK)
ALL = "all"
_ALL = (HOSTS, NIC_GBPS, KEEP_COPIES)
"""What a cluster is to have. Five times as many settings, with each time to give back, would be too many."""
MAX_SETTINGS = 200
"""Of all systems together. Each is a simulation of the whole trace, of a static system several."""
_HOSTS = (0.125, 0.25, 0.5, 1, 2)
_NIC_GBPS = (0.25, 1, 4)
_KEEP_COPIES_S = (60.0, 300.0, math.inf)
_GIVE_BACK_S = (1.0, 5.0, 15.0, 30.0, 60.0)
"""From the paper's "sub-second level" (section 5.3) to what the services do."""
_WRONG = {
    NIC_GBPS: "no positive bandwidth",
    KEEP_COPIES: f"neither a number of seconds nor {NEVER!r}",
    GIVE_BACK: "no number of seconds",
}


class Setting(NamedTuple):
    """One point of the sweep."""

    system: System
    family: str
    """The system's name whatever the time that it keeps copies."""
    cluster: Cluster
    give_back_s: float | None = None
    """0: by the rule. None: as without a sweep, and for systems that do not scale."""

    @property
    def keep_copies(self) -> str | None:
        """Seconds, or ``never`` (given up); None where none are kept for a time."""
        if self.system.copies != "kept":
            return None
        return NEVER if self.system.keep_copies_s == math.inf else f"{self.system.keep_copies_s:g}"

    def __str__(self) -> str:
        hosts = f"{self.cluster.hosts} host{'s' if self.cluster.hosts > 1 else ''}"
        kept = "" if self.give_back_s is None else f", given back after {self.give_back_s:g} s"
        if self.give_back_s == 0:
            kept = ", given back by the rule"
        return f"{self.system.name}: {hosts}, NICs of {self.cluster.nic_gbps:g} Gbit/s{kept}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Values of each axis that is swept; none for one that stays as it is."""

    hosts: tuple[int, ...] = ()
    nic_gbps: tuple[float, ...] = ()
    keep_copies_s: tuple[float, ...] = ()
    give_back_s: tuple[float, ...] = ()
    hosts_given: bool = False
    """``hosts`` are what was asked for."""

    @classmethod
    def of(cls, asked: Sequence[str], cluster: Cluster) -> Grid:
        """From the command line's words. Raises ``BadRequest``."""
        values: dict[str, list[str]] = {}
        for word in asked:
            name, given, listed = word.partition("=")
            for axis in _ALL if word == ALL else (name,):
                if axis not in AXES:
                    raise BadRequest(f"--what-if {word}: it is {', '.join(AXES)} or {ALL}", param="what-if")
                if axis in values:
                    raise BadRequest(f"--what-if {word}: {axis} is there already", param="what-if")
                values[axis] = listed.split(",") if given else []
        return cls(
            hosts=_hosts(values, cluster),
            nic_gbps=_numbers(values, NIC_GBPS, [part * cluster.nic_gbps for part in _NIC_GBPS]),
            keep_copies_s=_numbers(values, KEEP_COPIES, _KEEP_COPIES_S),
            give_back_s=_numbers(values, GIVE_BACK, _GIVE_BACK_S),
            hosts_given=bool(values.get(HOSTS)),
        )

    def settings(self, cluster: Cluster, systems: Sequence[System], degree: int) -> tuple[Setting, ...]:
        """All of them, in a fixed order. Hosts with too few GPUs for a system are left out, unless they were asked for.

        Raises ``BadRequest`` for those, for more than ``MAX_SETTINGS``, and where a time to keep copies or to give back
        is asked for, but no system has one.
        """
        names = ", ".join(system.name for system in systems)
        if self.keep_copies_s and not any(system.copies == "kept" for system in systems):
            raise BadRequest(f"--what-if {KEEP_COPIES}: of {names} none keeps copies for a time", param="what-if")
        if self.give_back_s and not any(system.scales for system in systems):
            raise BadRequest(f"--what-if {GIVE_BACK}: of {names} none gives instances back", param="what-if")
        clusters = [
            resized(cluster, hosts, nic_gbps)
            for hosts in self.hosts or (cluster.hosts,)
            for nic_gbps in self.nic_gbps or (cluster.nic_gbps,)
        ]
        found: list[Setting] = []
        for one in clusters:
            for family, system in self._kept_for(systems):
                num_workers = one.num_gpus // degree
                if num_workers >= system.least_instances:
                    windows = self.give_back_s if system.scales else ()
                    found += [Setting(system, family, one, give_back_s) for give_back_s in windows or (None,)]
                elif self.hosts_given:
                    raise BadRequest(
                        f"--what-if {HOSTS}={one.hosts}: {system.name} needs {system.least_instances} instances, and "
                        f"the GPUs can hold {num_workers}",
                        param="what-if",
                    )
        if len(found) > MAX_SETTINGS:
            raise BadRequest(f"--what-if: {len(found)} settings, and at most {MAX_SETTINGS} are tried", param="what-if")
        return tuple(found)

    def _kept_for(self, systems: Sequence[System]) -> Iterable[tuple[str, System]]:
        """Each system with each time to keep copies, once."""
        found: dict[str, tuple[str, System]] = {}
        for system in systems:
            if system.copies != "kept":
                found[system.name] = system.name, system
                continue
            family = system.name.partition("-")[0]
            for keep_s in self.keep_copies_s or (system.keep_copies_s,):
                kept = system.keeping(keep_s)
                found[kept.name] = family, kept
        return found.values()


def exact(system: System) -> System:
    """With the time that it keeps copies in its name, if it does."""
    return system.keeping(system.keep_copies_s) if system.copies == "kept" else system


def resized(cluster: Cluster, hosts: int, nic_gbps: float) -> Cluster:
    """The same with other hosts and NICs. One that had a single leaf has leaves of that size; a single leaf has no
    uplinks that could be oversubscribed."""
    hosts_per_leaf = min(cluster.hosts_per_leaf, hosts)
    return msgspec.structs.replace(
        cluster,
        hosts=hosts,
        hosts_per_leaf=hosts_per_leaf,
        oversubscription=1.0 if hosts <= hosts_per_leaf else cluster.oversubscription,
        nic_gbps=nic_gbps,
    )


def _hosts(values: dict[str, list[str]], cluster: Cluster) -> tuple[int, ...]:
    if HOSTS not in values:
        return ()
    if not values[HOSTS]:
        return tuple(sorted({int(part * cluster.hosts) for part in _HOSTS} - {0}))
    found: set[int] = set()
    for value in values[HOSTS]:
        text = value.strip()
        if not (text.isascii() and text.isdigit()) or not 1 <= float(text) <= 100_000:
            raise BadRequest(f"--what-if {HOSTS}: {text!r} is no number of hosts", param="what-if")
        found.add(int(text))
    return tuple(sorted(found))


def _numbers(values: dict[str, list[str]], axis: str, usual: Iterable[float]) -> tuple[float, ...]:
    """Rising. Bandwidths are positive; times may be 0, and that of copies may ``never`` end."""
    if axis not in values:
        return ()
    found: set[float] = set()
    for text in map(str.strip, values[axis]):
        try:
            value = math.inf if axis == KEEP_COPIES and text == NEVER else float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 if axis == NIC_GBPS else value >= 0) or (value == math.inf and text != NEVER):
            raise BadRequest(f"--what-if {axis}: {text!r} is {_WRONG[axis]}", param="what-if")
        found.add(value)
    return tuple(sorted(found)) or tuple(usual)
