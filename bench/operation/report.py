"""What is known of one scale operation: its record, what follows from it, and the decision behind it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from compose.cli.tables import shown_instances
from shared.messages.decisions import DecisionRecord
from shared.messages.operations import ScaleRecord, TargetRecord
from shared.messages.plans import SourceKind

NEAR_S = 60.0
"""A decision that is further from the trigger tells nothing of the operation."""

_DOES = {
    "out": ("was scaled out to", "is being scaled out to", "was to be scaled out to"),
    "in": ("was scaled in to", "is being scaled in to", "was to be scaled in to"),
    "mutate": ("changed roles for", "is changing roles for", "was to change roles for"),
}
"""Done, running, and failed or only advised."""
_BY = {"done": "was scaled out by", "running": "is being scaled out by", "failed": "was to be scaled out by"}
_ENDED = {"out": "serving", "in": "spare", "mutate": "in the new role"}


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the operation."""

    name: str
    after_ms: float | None
    """Since the trigger; None: not yet, never, or not known."""
    meaning: str


class HopRate(msgspec.Struct, frozen=True, kw_only=True):
    """A way on which a target got weights, and how fast."""

    source: str
    """Worker id; empty for a disk."""
    source_kind: SourceKind
    target: str
    """Worker id."""
    share: float
    """Of the model's bytes."""
    bytes: float
    """The hop's part of what the target received."""
    gbps: float | None
    """The hop's part of the target's Gbit/s, a mean from accepting the plan until loaded; None: that is not known."""


class OperationReport(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. ``blitzscale report --json`` prints it, and the page shows it."""

    sentence: str
    """What happened and why."""
    record: ScaleRecord
    phases: tuple[Phase, ...]
    hops: tuple[HopRate, ...]
    """In the order of the chains."""
    decision: DecisionRecord | None
    """The one that led to the operation, or else the nearest in time of the same role; None: none within a minute."""
    is_its_decision: bool
    """Whether the decision names the operation."""
    lacking: str = ""
    """Why decisions could not be asked for; empty: they could."""

    @classmethod
    def of(cls, record: ScaleRecord, decisions: Iterable[DecisionRecord], lacking: str = "") -> OperationReport:
        """``decisions``: on the operation's model, in any order."""
        decision = decision_of(record, decisions)
        is_its = decision is not None and decision.plan_id == record.plan_id
        return cls(
            sentence=sentence_of(record, decision if is_its else None),
            record=record,
            phases=phases_of(record),
            hops=hops_of(record),
            decision=decision,
            is_its_decision=is_its,
            lacking=lacking,
        )


def failures_of(record: ScaleRecord) -> list[str]:
    """A line for each target that failed."""
    return [f"{target.worker_id}: {target.failure}" for target in record.targets if target.failure]


def ended(record: ScaleRecord, target: TargetRecord) -> bool:
    """Whether it reached what the operation is for."""
    return not target.failure and (target.spare_ms if record.direction == "in" else target.serving_ms) is not None


def sentence_of(record: ScaleRecord, its_decision: DecisionRecord | None = None) -> str:
    """What happened and why, in one sentence. ``its_decision``: knows how many there were before."""
    wanted = shown_instances(record.desired, record.role)
    loads = its_decision is not None and record.direction == "out" and not record.advice
    if its_decision is not None and loads and its_decision.there + len(record.targets) < record.desired:
        # There were no workers for the others.
        more = shown_instances(len(record.targets), record.role)
        what = f"{record.model} {_BY[record.status]} {more}, and {record.desired} in all were wanted"
        return f"{what}: {_outcome(record)}{_because(record)}."
    if record.direction == "none":
        return f"Nothing was done for {wanted} of {record.model}{_because(record)}."
    done, running, not_done = _DOES[record.direction]
    if record.advice:
        return f"{record.model} {not_done} {wanted}, which was only advised{_because(record)}."
    does = {"done": done, "running": running, "failed": not_done}[record.status]
    return f"{record.model} {does} {wanted}: {_outcome(record)}{_because(record)}."


def _outcome(record: ScaleRecord) -> str:
    parts = [f"{sum(ended(record, t) for t in record.targets)} of {len(record.targets)} {_ENDED[record.direction]}"]
    last_ms = record.trigger_to_spare_ms if record.direction == "in" else record.trigger_to_serving_ms
    if last_ms is not None:
        parts.append(f"the last after {last_ms:,.0f} ms")
    if failed := sum(bool(target.failure) for target in record.targets):
        parts.append(f"{failed} failed")
    if record.left_out:
        parts.append(f"{len(record.left_out)} left out")
    return ", ".join(parts)


def _because(record: ScaleRecord) -> str:
    if not record.reason:
        return ""
    # Of an operation that failed as a whole the reason is the error.
    whole = record.status == "failed" and not any(target.failure for target in record.targets)
    return f" ({'it failed' if whole else 'why'}: {record.reason})"


def phases_of(record: ScaleRecord) -> tuple[Phase, ...]:
    """In the order in which they come when all goes well; none of what was not carried out."""
    if record.direction == "none" or record.advice:
        return ()
    steps: list[tuple[str, float | None, str]] = [("plan", record.trigger_to_plan_ms, "the plan was published")]
    if record.direction == "in":
        steps.append(("spare", record.trigger_to_spare_ms, "the last target had drained and was spare"))
    elif record.direction == "mutate":
        steps += [
            ("serving", record.trigger_to_serving_ms, "the last target had its new role"),
            ("working", record.trigger_to_working_ms, "the first request came in the new role"),
        ]
    else:
        first_layer_ms = record.layer_ready_ms[0] if record.layer_ready_ms else None
        steps += [
            ("first byte", record.trigger_to_first_byte_ms, "the first target had its first piece"),
            ("first layer", first_layer_ms, "every target had the first layer, verified"),
        ]
        if record.live:
            tokens = [p.first_cooperative_token_ms for p in record.live if p.first_cooperative_token_ms is not None]
            about = "first token of a prompt of which both members of a pair ran layers"
            steps.append(("first cooperative token", min(tokens, default=None), about))
        predicted_ms = record.predicted_loaded_ms
        foreseen = "" if predicted_ms is None else f"; {predicted_ms:,.0f} ms were expected"
        steps += [
            ("loaded", record.trigger_to_loaded_ms, f"the last target held all weights{foreseen}"),
            ("serving", record.trigger_to_serving_ms, "the last target accepted requests"),
        ]
    trigger = Phase(name="trigger", after_ms=0.0, meaning="the load first called for it, or the request came")
    return trigger, *(Phase(name=name, after_ms=ms, meaning=meaning) for name, ms, meaning in steps)


def hops_of(record: ScaleRecord) -> tuple[HopRate, ...]:
    """What a target received, and its rate, divided among its hops by their shares."""
    targets = {target.worker_id: target for target in record.targets}
    total: dict[str, float] = defaultdict(float)
    for hop in record.hops:
        total[hop.target] += hop.share
    rates = []
    for hop in record.hops:
        target = targets.get(hop.target)
        part = hop.share / total[hop.target] if total[hop.target] > 0 else 0.0
        gbps = target.gbps if target is not None else None
        rates.append(
            HopRate(
                source=hop.source,
                source_kind=hop.source_kind,
                target=hop.target,
                share=hop.share,
                bytes=part * target.received_bytes if target is not None else 0.0,
                gbps=None if gbps is None else part * gbps,
            )
        )
    return tuple(rates)


def decision_of(record: ScaleRecord, decisions: Iterable[DecisionRecord]) -> DecisionRecord | None:
    """The operation's own, else the nearest of its role without an operation of its own."""
    known: Sequence[DecisionRecord] = [d for d in decisions if d.model == record.model]
    own = [d for d in known if d.plan_id == record.plan_id]
    if own:
        return own[0]
    # One with another operation is about that one.
    others = [d for d in known if d.role == record.role and not d.plan_id]
    nearest = min(others, key=lambda d: abs(d.at_s - record.triggered_at_s), default=None)
    return nearest if nearest is not None and abs(nearest.at_s - record.triggered_at_s) <= NEAR_S else None
