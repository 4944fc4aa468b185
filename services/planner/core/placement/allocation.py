"""Whose instances make room for whom: one decision about all models and roles. Pure.

A round serves what is wanted from spare workers first. What is left over is decided here, in this order:

1. Workers that are on their way to being spare count as spare: each is awaited by one model, that for which it makes
   room if that still waits, whether or not anything would be taken for it. Where another instance is idle, a worker
   whose instance has had requests to finish for longer than ``QUANTUM_S`` is not waited for.
2. A model with requests and no instance gets an idle instance of another model at once: the one that has been idle for
   longest.
3. So does a model that has instances and needs more, once that instance has been idle for ``IDLE_S``: a model with
   steady traffic is idle between any two requests. What a minimum keeps, or was asked for by hand, does not wait.
4. A model with requests and no instance gets a busy instance, if there is no idle one, of the model that has served for
   longest: time slices of ``QUANTUM_S`` and what the instance took to load, at least, so that loading does not eat up
   what they share. A model gives away one instance in a round this way.

Nobody gives instances that its minimum, or a number that was asked for by hand, keeps. The monitor says what is idle
(``Demand.idle``), and leaves those out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.messages.common import Role

IDLE_S = 1.0
"""How long an instance was idle before another model's second one may take its place. The monitor's rates are of as
long a time: before, it is not known whether a model has traffic."""
QUANTUM_S = 2.0
"""Least time that a model keeps its instances while another one waits; added to what they took to load."""
MAX_FAILED = 3
"""Workers that a model fails to load on at a time. No room is made for it on more of them: it may fit nowhere, and each
attempt costs another model an instance."""


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
    mutates: bool = False
    """Instances of its model's other roles would get its role (``core/operations/mutation.py``): they make no room."""
    is_kept: bool = False
    """A minimum, or a number that was asked for by hand, asks for it, and not the load alone."""
    engine: str = ""
    """Of the model (``shared.engines``)."""


@dataclass(frozen=True, slots=True)
class Room:
    """A worker that could be spare, or will be."""

    worker_id: str
    arena_bytes: int
    """For weights."""
    late: bool = False
    """Its instance goes, but has requests to finish, and has had a while for them."""
    promised: tuple[str, Role] | None = None
    """The model and role that it goes for, if that still waits."""
    engines: Collection[str] = ("",)
    """That the worker offers, as models name them."""

    def suits(self, want: Want) -> bool:
        """Whether it is of use to the model."""
        offers = want.engine in self.engines
        return offers and self.arena_bytes >= want.weights_bytes and self.worker_id not in want.avoided


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
    rooms: Sequence[Room] = ()
    """Where its instances are, in the order in which they should go."""


@dataclass(frozen=True, slots=True)
class Taking:
    """Instances that go, and for whom."""

    model: str
    role: Role
    workers: tuple[str, ...]
    for_model: str
    for_role: Role
    why: str


class _Owner:
    """What is left of a holding in this round."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.idle = min(holding.idle, holding.spendable)
        self.spendable = holding.spendable
        self._rooms = list(holding.rooms)
        self._largest_bytes = max((room.arena_bytes for room in self._rooms), default=0)

    def give(self, want: Want) -> str | None:
        """A worker of use to ``want``; None if there is none, or nothing is to be given."""
        if self.spendable <= 0 or self._largest_bytes < want.weights_bytes:
            return None
        if self.holding.model == want.model and (want.mutates or self.holding.role == want.role):
            return None
        for index, room in enumerate(self._rooms):
            if room.suits(want):
                del self._rooms[index]
                self.spendable -= 1
                self.idle = max(0, self.idle - 1)
                return room.worker_id
        return None


def allocate(
    wants: Sequence[Want], holdings: Iterable[Holding], freeing: Iterable[Room], now_s: float
) -> tuple[Taking, ...]:
    """What is taken from whom for ``wants``, the most urgent first. ``freeing``: workers that become spare by
    themselves, or because they were told to. Times are of one clock."""
    owners = [_Owner(h) for h in holdings if h.spendable > 0]
    idle = sorted(
        (o for o in owners if o.idle), key=lambda o: (o.holding.idle_since_s, o.holding.model, o.holding.role)
    )
    # A model gives away one busy instance in a round.
    busy = sorted(
        (o for o in owners if o.holding.slice_ends_s <= now_s),
        key=lambda o: (o.holding.slice_ends_s, o.holding.model, o.holding.role),
    )
    largest_bytes = max((room.arena_bytes for owner in owners for room in owner.holding.rooms), default=0)
    coming: dict[tuple[str, Role] | None, list[Room]] = {}
    for room in sorted(freeing, key=lambda room: (room.late, room.worker_id)):
        coming.setdefault(room.promised, []).append(room)
    takings: list[Taking] = []
    for want in wants:
        missing = want.missing - _claim(coming, want, want.missing, late=False)
        takes = want.weights_bytes <= largest_bytes and len(want.avoided) < MAX_FAILED
        for owner in idle if takes else ():
            idle_s = max(0.0, now_s - owner.holding.idle_since_s)
            if not missing or (want.has_instances and not want.is_kept and idle_s < IDLE_S):
                break
            taken: list[str] = []
            while len(taken) < missing and owner.idle and (worker_id := owner.give(want)) is not None:
                taken.append(worker_id)
            if taken:
                missing -= len(taken)
                takings.append(_taking(owner.holding, taken, want, f"idle for {idle_s:.1f} s"))
        idle = [owner for owner in idle if owner.idle]
        missing -= _claim(coming, want, missing, late=True)
        if missing and takes and not want.has_instances:
            for owner in busy:
                given = owner.give(want)
                if given is not None:
                    busy.remove(owner)
                    takings.append(_taking(owner.holding, [given], want, "its share of the time is over"))
                    break
    return tuple(takings)


def _claim(coming: Mapping[tuple[str, Role] | None, list[Room]], want: Want, most: int, *, late: bool) -> int:
    """Workers on their way to being spare that are left to ``want`` from here on."""
    claimed = 0
    for rooms in (coming.get((want.model, want.role), []), coming.get(None, [])):
        for room in [room for room in rooms if room.late <= late and room.suits(want)][: most - claimed]:
            rooms.remove(room)
            claimed += 1
    return claimed


def _taking(holding: Holding, workers: Sequence[str], want: Want, state: str) -> Taking:
    lacks = "needs more instances" if want.has_instances else "has requests and no instance"
    lacks = "has fewer instances than it is to have" if want.is_kept else lacks
    instead = "it would wait until a worker becomes spare"
    why = f"{state}, while {want.model} {lacks} and no worker is spare; otherwise {instead}"
    return Taking(holding.model, holding.role, tuple(workers), want.model, want.role, why)
