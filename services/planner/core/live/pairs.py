"""Which instances scale live, with whom (paper, section 5.2, "Selecting instances for live scaling"), and the messages
that make them do it. Pure.

By default a pair is made only where both hold: loading first and serving then would break the SLO, and an overloaded
instance is there to cooperate with. Each overloaded instance gets one loading instance: a tail of the chains, which
feeds no other, so that its activations and KV compete with no weights. The slowest tail goes to the instance with the
longest queue, since it would otherwise stand idle the longest.

A tail that no overloaded instance needs may go to a prefill instance whose queue is still within its slack: more
instances were asked for because of what arrives, and pairs are made with plans only, so it would load without a task
while that instance drowns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from services.planner.core.multicast.explain import MAX_EDGES, MAX_NAMES, shortened
from shared.errors import BadCheckpoint
from shared.layout import ArenaLayout, layout_of
from shared.messages.common import LiveChoice, LivePolicy
from shared.messages.live import ZigzagAssignment
from shared.messages.plans import ChainMember, ScalePlan
from shared.messages.registry import WorkerRecord
from shared.model_spec import AnySpec


@dataclass(frozen=True, slots=True)
class SourceCandidate:
    """An instance that could be a source."""

    instance_id: str
    queue_s: float
    """Time that it would need alone for what waits."""
    slack_s: float
    """Time that the earliest waiting request has left of its TTFT, its own prefill subtracted; negative: too late."""
    live: bool = False
    """It is in a pair already."""
    lacks_kv: bool = False
    """What waits there waits for KV, which a partner does not give."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A source (instance id) and a target (worker id) that scale live together, and why."""

    source: str
    target: str
    why: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The pairs, and for each instance without one the reason."""

    pairs: tuple[Pair, ...]
    declined: tuple[str, ...]

    @property
    def explain(self) -> tuple[str, ...]:
        """Both in words, long lists cut."""
        pairs = shortened([pair.why for pair in self.pairs], MAX_EDGES, " pairs in the same way")
        declined = shortened(self.declined, MAX_NAMES, " instances")
        return (*(f"live: {line}" for line in pairs), *(f"not live: {line}" for line in declined))


def num_sources(candidates: Sequence[SourceCandidate], choice: LiveChoice = "auto") -> int:
    """How many instances need a partner, and so how many tails are planned for."""
    return len(_sources(candidates, choice)[0])


def select_pairs(
    candidates: Sequence[SourceCandidate],
    tails: Mapping[str, float],
    *,
    choice: LiveChoice = "auto",
    margin_s: float = 0.0,
    share_left: bool = False,
) -> Selection:
    """Pair ``tails`` with overloaded instances, as the module's docstring says.

    ``tails``: predicted seconds until each worker that feeds no other has everything; 0: unknown, taken for late.
    Only those that may go live (a decode instance never does: weights and KV would both come in). ``choice``:
    ``always`` asks neither for overload nor for lateness, ``never`` makes no pairs. ``margin_s``: predictions this
    close to the slack count as late. ``share_left``: tails that no overloaded instance gets may go to others with
    something to compute; for prefill instances only, where no decode step waits for layers.
    """
    if choice == "never":
        return Selection((), ())
    finish_s = {t: at_s or float("inf") for t, at_s in tails.items()}
    free = sorted(finish_s, key=lambda t: (-finish_s[t], t))
    sources, within, declined = _sources(candidates, choice)
    if choice == "always" and not candidates:
        declined.append("no instance serves that could be a source")
    pairs: list[Pair] = []

    def pair(source: SourceCandidate) -> None:
        late = [t for t in free if choice == "always" or finish_s[t] + margin_s > source.slack_s]
        if not late:
            declined.append(
                f"{source.instance_id}: stop-the-world meets the SLO; the slowest tail, {free[0]}, has all layers in "
                f"{finish_s[free[0]]:.3f} s, the slack is {source.slack_s:.3f} s"
            )
            return
        target = late[0]
        free.remove(target)
        why = (_asked if choice == "always" else _needed)(source, target, tails[target])
        pairs.append(Pair(source.instance_id, target, why))

    for source in sources:
        if free:
            pair(source)
        else:
            declined.append(f"{source.instance_id}: no tail is left to go live")
    for source in within:
        if free and share_left and not source.lacks_kv:
            pair(source)
        else:
            declined.append(
                f"{source.instance_id}: not overloaded; {source.queue_s:.3f} s of queue within {source.slack_s:.3f} s "
                "of slack"
            )
    return Selection(tuple(pairs), tuple(declined))


def _needed(source: SourceCandidate, target: str, finish_s: float) -> str:
    when = f"in {finish_s:.3f} s" if finish_s else "nobody knows when"
    return f"{target} is a tail that has all layers {when}; {source.instance_id} has {_queue(source)}"


def _asked(source: SourceCandidate, target: str, finish_s: float) -> str:
    name = source.instance_id
    queue = f"; {name} has {_queue(source)}" if source.queue_s else ""
    when = f"{target} is expected to have all layers in {finish_s:.3f} s"
    if not finish_s:
        when = f"nobody knows when {target} has all layers"
    return f"{target} helps {name} (asked for); {when}{queue}"


def _queue(source: SourceCandidate) -> str:
    return f"{source.queue_s:.3f} s of queue and {source.slack_s:.3f} s of slack"


def _sources(
    candidates: Sequence[SourceCandidate], choice: LiveChoice
) -> tuple[list[SourceCandidate], list[SourceCandidate], list[str]]:
    """Those that need a partner; those with something to compute that do not, both by queue, the longest first; and why
    the others get none."""
    sources: list[SourceCandidate] = []
    within: list[SourceCandidate] = []
    declined: list[str] = []
    if choice == "never":
        return sources, within, declined
    for one in sorted(candidates, key=lambda o: (-o.queue_s, o.instance_id)):
        if one.live:
            declined.append(f"{one.instance_id}: it is in a pair already")
        elif choice == "auto" and not one.queue_s:
            # Even if one prompt alone would take longer than the SLO allows.
            declined.append(f"{one.instance_id}: nothing waits")
        elif choice == "auto" and one.queue_s <= one.slack_s:
            within.append(one)
        else:
            sources.append(one)
    return sources, within, declined


def zigzag_assignments(
    plan: ScalePlan,
    pairs: Iterable[Pair],
    sources: Mapping[str, WorkerRecord],
    predicted_s: Mapping[str, float],
    *,
    policy: LivePolicy,
    slo_tbt_s: float,
    start_s: Mapping[str, float] = MappingProxyType({}),
) -> tuple[ZigzagAssignment, ...]:
    """The first revision of each pair's assignment, without gates.

    ``sources``: the workers of the serving instances, by instance id. ``predicted_s``: seconds that each target takes
    once the plan is made; where that is unknown (0) the assignment tells no times. ``start_s``: of that, until its
    first byte.
    """
    pairs = tuple(pairs)
    if not pairs:
        return ()
    layout = _known_layout(plan.model.basics)

    def ready_s(first_s: float, finish_s: float) -> tuple[float, ...]:
        return layers_ready_s(layout, first_s, finish_s - first_s) if finish_s and layout is not None else ()

    def assignment(pair: Pair) -> ZigzagAssignment:
        finish_s = predicted_s.get(pair.target, 0.0)
        first_s = min(start_s.get(pair.target, 0.0), finish_s)
        return ZigzagAssignment(
            pair_id=f"{plan.plan_id}-{pair.target}",
            plan_id=plan.plan_id,
            model=plan.model.name,
            source=_source(pair.source, sources[pair.source]),
            target=plan.member(pair.target),
            policy=policy,
            why=pair.why,
            layers_ready_s=ready_s(first_s, finish_s),
            loaded_s=finish_s,
            slo_tbt_s=plan.model.slo_tbt_s or slo_tbt_s,
            valid_s=plan.give_up_s,
            term=plan.term,
        )

    return tuple([assignment(pair) for pair in pairs])


def _known_layout(spec: AnySpec) -> ArenaLayout | None:
    """None for a model of a later version's family: then no times are told."""
    try:
        return layout_of(spec)
    except BadCheckpoint:
        return None


def layers_ready_s(layout: ArenaLayout, start_s: float, finish_s: float) -> tuple[float, ...]:
    """When a target that starts at ``start_s`` and takes ``finish_s`` has each decoder layer.

    Bytes come at an even pace in the order of the arena: layers first, then embedding and head.
    """
    pace_s = finish_s / layout.num_bytes
    return tuple(
        [
            start_s + (unit.offset + unit.num_bytes) * pace_s
            for unit in layout.units[layout.first_layer :][: layout.num_layers]
        ]
    )


def _source(instance_id: str, record: WorkerRecord) -> ChainMember:
    worker = record.worker
    return ChainMember(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        instance_id=instance_id,
        host=worker.host,
        transport_address=worker.transport_address,
    )
