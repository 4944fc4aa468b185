"""Why a plan is as it is, in words; written only on demand."""

from __future__ import annotations

from collections.abc import Sequence

from services.planner.core.multicast.edges import ByteRangeStripe, Edge
from shared.messages.common import Role

MAX_NAMES = 8
MAX_EDGES = 50
"""A plan travels with its explanation: one of thousands of edges is cut."""

_WHY = {
    "scale_up": "a copy in their own scale-up domain, no NIC used",
    "host": "a copy on their own host, no NIC used",
    "disk": "no copy in any memory: the checkpoint is read from disk and forwarded",
}
_LATE = {
    "": "",
    "sends_less": "; late in the order: it sends out less than it takes in, so what follows would starve",
    "disturbs": "; last in the order: serving traffic comes in through all its NICs",
}


def instances_of(number: int, role: Role) -> str:
    """So many instances, in words; the usual role goes without saying."""
    noun = "instance" if number == 1 else "instances"
    return f"{number} {noun}" if role == "colocated" else f"{number} {role} {noun}"


def explain(edges: Sequence[Edge], pruned: Sequence[str], tails: Sequence[str]) -> tuple[str, ...]:
    """One line per decision, in the order in which the edges were planned."""
    lines: list[str] = []
    if pruned:
        lines.append(f"outgoing direction in use, avoided while others are left: {names(pruned)}")
    leaves = list(dict.fromkeys(edge.leaf for edge in edges))
    if len(edges) > 1:
        lines.append(f"order: next to a copy first, then leaf by leaf ({names(leaves)}), there the fastest first")
    lines += shortened([_line(edge) for edge in edges], MAX_EDGES, " groups in the same way")
    if tails:
        lines.append(f"chains end in {names(tails)}")
    return tuple(lines)


def _line(edge: Edge) -> str:
    sources = list(dict.fromkeys(_source(s) for s in edge.stripes))
    why = _WHY.get(edge.via) or _network(edge)
    return f"{names(sources)} -> {names(edge.targets)} at {edge.gbps:.3g} Gbps: {why}{_sharding(edge)}"


def _source(stripe: ByteRangeStripe) -> str:
    return stripe.source if stripe.source_kind == "gpu" else f"{stripe.source}'s {_MEMORY[stripe.source_kind]}"


_MEMORY = {"host": "host copy", "disk": "disk"}


def _sharding(edge: Edge) -> str:
    """Which stripes there are and why. A single one to a single target needs no words."""
    together = "" if len(edge.targets) == 1 else "; what one gets the others have from it, over the scale-up network"
    if len(edge.stripes) == 1:
        return together
    total = edge.stripes[-1].end_byte
    shares = [f"{_source(s)} -> {s.target} {100 * (s.end_byte - s.first_byte) / total:.3g} %" for s in edge.stripes]
    return f"; striped, by what each pair can carry: {names(shares)}{together}"


def _network(edge: Edge) -> str:
    why = f"sources on other leaves: those on {edge.leaf} do not suffice" if edge.crosses_leaf else f"leaf {edge.leaf}"
    shared = "; shares a NIC's direction, nothing else is left" if edge.shares else ""
    return f"{why}{shared}{_LATE[edge.late]}"


def shortened(lines: Sequence[str], most: int, more: str = "") -> list[str]:
    """At most so many lines, and how many ``more`` of something there are."""
    left = len(lines) - most
    return [*lines[:most], f"and {left} more{more}"] if left > 0 else list(lines)


def names(ids: Sequence[str]) -> str:
    """Ids for people; long lists are cut."""
    shown = ", ".join(ids[:MAX_NAMES])
    return f"{shown} and {len(ids) - MAX_NAMES} more" if len(ids) > MAX_NAMES else shown
