"""Why a plan is as it is, in words; written only when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence

from services.planner.core.edges import Edge

MAX_NAMES = 8

_WHY = {
    "scale_up": "a copy in their own scale-up domain, no NIC used",
    "host": "a copy on their own host, no NIC used",
    "disk": "no copy in any memory: the checkpoint is read from disk and forwarded",
}


def explain(edges: Sequence[Edge], pruned: Sequence[str], tails: Sequence[str]) -> tuple[str, ...]:
    """One line per decision, in the order in which the edges were planned."""
    lines: list[str] = []
    if pruned:
        lines.append(f"outgoing direction in use, avoided while others are left: {names(pruned)}")
    for edge in edges:
        why = _WHY.get(edge.via) or _network(edge)
        striped = f" in {len(edge.stripes)} stripes" if len(edge.stripes) > 1 else ""
        lines.append(f"{names(edge.sources)} -> {names(edge.targets)}{striped} at {edge.gbps:.3g} Gbps: {why}")
    if tails:
        lines.append(f"chains end in {names(tails)}")
    return tuple(lines)


def _network(edge: Edge) -> str:
    why = f"sources on other leaves: those on {edge.leaf} do not suffice" if edge.crosses_leaf else f"leaf {edge.leaf}"
    return f"{why}; shares a NIC's direction, nothing else is left" if edge.shares else why


def names(ids: Sequence[str]) -> str:
    """Ids for people; long lists are cut."""
    shown = ", ".join(ids[:MAX_NAMES])
    return f"{shown} and {len(ids) - MAX_NAMES} more" if len(ids) > MAX_NAMES else shown
