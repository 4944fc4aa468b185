"""Whose instances make room for whom: one decision about all models and roles. Pure.

A round serves what is wanted from spare workers first. What is left over is decided here, in this order:

1. Workers that are on their way to being spare count as spare: each is awaited by one that wants it.
2. A model with requests and no instance gets an idle instance of another model at once: the one that has been idle for
   longest.
3. So does a model that has instances and needs more, once that instance has been idle for ``IDLE_S``: a model with
   steady traffic is idle between any two requests.
4. A model with requests and no instance gets a busy instance, if there is no idle one, of the model that has served for
   longest: time slices of ``QUANTUM_S`` and what the instance took to load, at least, so that loading does not eat up
   what they share. A model gives away one instance in a round this way.

Nobody gives instances that its minimum, or a number that was asked for by hand, keeps. The monitor says what is idle
(``Demand.idle``), and leaves those out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.messages.common import Role

IDLE_S = 1.0
"""How long an instance was idle before another model's second one may take its place. The monitor's rates are of as
long a time: before, it is not known whether a model has traffic."""
QUANTUM_S = 2.0
"""Least time that a model keeps its instances while another one waits; added to what they took to load."""


@dataclass(frozen=True, slots=True)
class Want:
    """A model and role that no spare worker was left for."""

    model: str
    role: Role
    missing: int
    has_instances: bool
    """Of the model, that take requests now or soon."""
    weights_bytes: int = 0
    avoided: Collection[str] = ()
    """Workers that failed to load the model a short while ago."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a model and role could do without."""

    model: str
    role: Role
    idle: int = 0
    """Instances without anything to do, beyond what limits and floors keep."""
    idle_since_s: float = 0.0
    spendable: int = 0
    """Instances that serve, idle or not, beyond what limits and floors keep."""
    slice_ends_s: float = float("inf")
    """Until when a busy one is not taken."""
    arenas: Mapping[str, int] = field(default_factory=dict)
    """By the workers of the spendable ones: bytes for weights."""

    def suits(self, want: Want) -> bool:
        """Whether room that is made here is of use."""
        if (self.model, self.role) == (want.model, want.role):
            return False
        return any(size >= want.weights_bytes and worker not in want.avoided for worker, size in self.arenas.items())


@dataclass(frozen=True, slots=True)
class Taking:
    """Instances that go, and for whom."""

    model: str
    role: Role
    instances: int
    for_model: str
    for_role: Role
    why: str


def allocate(wants: Sequence[Want], holdings: Iterable[Holding], freeing: int, now_s: float) -> tuple[Taking, ...]:
    """What is taken from whom for ``wants``, the most urgent first. ``freeing``: workers that become spare by
    themselves, or because they were told to. Times are of one clock."""
    owners = sorted(
        (h for h in holdings if h.idle > 0 or h.spendable > 0), key=lambda h: (h.idle_since_s, h.model, h.role)
    )
    left = {(h.model, h.role): h.idle for h in owners}
    sliced: set[tuple[str, Role]] = set()
    takings: list[Taking] = []
    for want in wants:
        claimed = min(freeing, want.missing)
        freeing -= claimed
        missing = want.missing - claimed
        for holding in owners:
            idle_s = max(0.0, now_s - holding.idle_since_s)
            if not holding.suits(want) or (want.has_instances and idle_s < IDLE_S):
                continue
            taken = min(missing, left[holding.model, holding.role])
            if taken:
                left[holding.model, holding.role] -= taken
                missing -= taken
                takings.append(_taking(holding, taken, want, f"idle for {idle_s:.1f} s"))
        if missing and not want.has_instances:
            longest = _longest_served(owners, left, sliced, want, now_s)
            if longest is not None:
                sliced.add((longest.model, longest.role))
                takings.append(_taking(longest, 1, want, "its share of the time is over"))
    return tuple(takings)


def _longest_served(
    holdings: Sequence[Holding],
    left: dict[tuple[str, Role], int],
    sliced: set[tuple[str, Role]],
    want: Want,
    now_s: float,
) -> Holding | None:
    """Whose time slice ended first, of those that have a busy instance to give."""
    ended = [
        h
        for h in holdings
        if h.slice_ends_s <= now_s
        and h.suits(want)
        and (h.model, h.role) not in sliced
        # What idle ones gave in this round is gone.
        and h.spendable - (h.idle - left[h.model, h.role]) > 0
    ]
    return min(ended, key=lambda h: (h.slice_ends_s, h.model, h.role), default=None)


def _taking(holding: Holding, instances: int, want: Want, state: str) -> Taking:
    lacks = "needs more instances" if want.has_instances else "has requests and no instance"
    instead = "it would wait until a worker becomes spare"
    why = f"{state}, while {want.model} {lacks} and no worker is spare; otherwise {instead}"
    return Taking(holding.model, holding.role, instances, want.model, want.role, why)
