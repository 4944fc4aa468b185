"""Which instances scale live, and with whom (paper, section 5.2, "Selecting instances for live scaling").

A pair is made only where both hold: loading first and serving then would break the SLO, and an overloaded instance is
there to cooperate with. Each overloaded instance gets one loading instance: a tail of the chains, which feeds nobody,
so that its activations and KV compete with no weights. The slowest tail goes to the instance with the longest queue:
it is the one that would stand idle longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.planner.core.multicast import Multicast


@dataclass(frozen=True, slots=True)
class Overloaded:
    """An instance whose queue is too long for its SLO, or may be."""

    instance_id: str
    queue_s: float
    """Time that it needs alone for what waits."""
    slack_s: float
    """Time that the earliest waiting request has left of its TTFT, its own prefill subtracted; negative: too late."""
    live: bool = False
    """It is in a pair already."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and a target that scale live together, and why."""

    source: str
    target: str
    why: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The pairs, and per instance that got none the reason."""

    pairs: tuple[Pair, ...]
    declined: tuple[str, ...]


def select_pairs(
    overloaded: Sequence[Overloaded], plan: Multicast, *, tails: Sequence[str] | None = None, margin_s: float = 0.0
) -> Selection:
    """Pair tails of ``plan`` with overloaded instances; see the top.

    ``tails``: those that may go live, if not all of ``plan.tails`` (a decode instance never does: weights and KV would
    both come in). ``margin_s``: predictions this close to the slack count as late.
    """
    finish_s: Mapping[str, float] = plan.finish_s
    allowed = set(plan.tails if tails is None else tails)
    free = sorted([t for t in plan.tails if t in allowed], key=lambda t: (-finish_s[t], t))
    pairs: list[Pair] = []
    declined: list[str] = []
    for source in sorted(overloaded, key=lambda o: (-o.queue_s, o.instance_id)):
        name = source.instance_id
        if source.live:
            declined.append(f"{name}: it is in a pair already")
            continue
        if source.queue_s <= source.slack_s:
            declined.append(
                f"{name}: not overloaded; {source.queue_s:.3f} s of queue within {source.slack_s:.3f} s of slack"
            )
            continue
        late = [t for t in free if finish_s[t] + margin_s > source.slack_s]
        if not free:
            declined.append(f"{name}: no tail is left to go live")
            continue
        if not late:
            declined.append(
                f"{name}: stop-the-world meets the SLO; the slowest tail, {free[0]}, has all layers in "
                f"{finish_s[free[0]]:.3f} s, the slack is {source.slack_s:.3f} s"
            )
            continue
        target = late[0]
        free.remove(target)
        pairs.append(
            Pair(
                name,
                target,
                f"{target} is a tail that has all layers in {finish_s[target]:.3f} s; {name} has "
                f"{source.queue_s:.3f} s of queue and {source.slack_s:.3f} s of slack",
            )
        )
    return Selection(tuple(pairs), tuple(declined))
