"""In which order the systems are measured. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.systems import System
from shared.errors import BadRequest

_BASES = {"disaggregated": "blitz", "colocated": "blitz-colocated"}


def base_of(system: System) -> str:
    """The system of whose average number of instances one that is half of a cluster has as many."""
    return _BASES[system.serving]


def check(systems: Sequence[System]) -> None:
    """Raises ``BadRequest`` if one is missing that another needs."""
    names = {system.name for system in systems}
    for system in systems:
        if system.size == "half" and base_of(system) not in names:
            raise BadRequest(
                f"{system.name} has as many instances as {base_of(system)} on average: name that too", param="systems"
            )


def shuffled(systems: Sequence[System], seed: int, repetition: int, window: int) -> tuple[System, ...]:
    """By seed, and another one for each repetition and window; none before the one that it follows."""
    order = list(systems)
    random.Random(f"order/{seed}/{repetition}/{window}").shuffle(order)
    for system in [system for system in order if system.size == "half"]:
        base = next(index for index, other in enumerate(order) if other.name == base_of(system))
        if order.index(system) < base:
            order.remove(system)
            order.insert(base, system)
    return tuple(order)
