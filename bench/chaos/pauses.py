"""How long streams stood still whose worker was killed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.chaos.injected_fault import InjectedFault
from bench.chaos.load import Record
from bench.chaos.observer import Holding, Observer

MOVED_WITHIN_S = 0.5
"""Between a token on the bus and its event at the client, at most: the events share the machine with everything."""
COMING_BACK_S = 5.0
"""After which a process that was killed does its work again."""
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Prefill:
    """How long an idle instance takes to the first token: (prompt tokens, seconds), ascending."""

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, samples: Iterable[tuple[int, float]]) -> Prefill:
        """Of any samples, at least one. Those of one length are taken as their smallest."""
        best: dict[int, float] = {}
        for tokens, seconds in samples:
            best[tokens] = min(seconds, best.get(tokens, seconds))
        return cls(tuple(sorted(best.items())))

    def seconds(self, tokens: int) -> float:
        """Linear between the points, and proportional beyond the longest."""
        points = self.points
        if tokens <= points[0][0]:
            return points[0][1]
        for (low, low_s), (high, high_s) in pairwise(points):
            if tokens <= high:
                return low_s + (high_s - low_s) * (tokens - low) / (high - low)
        return points[-1][1] * tokens / points[-1][0]


@dataclass(frozen=True, slots=True)
class Pause:
    """One stream's silence around a fault at its worker."""

    fault: InjectedFault
    response_id: str
    seconds: float
    recompute_s: float
    """Of it, what an idle instance needs to compute the prompt and the tokens so far again. An estimate."""
    had_seats: bool
    """Whether somewhere else a seat was free all the while."""
    beside: tuple[str, ...]
    """Other members that were struck meanwhile or shortly before, or were stopped."""


def pauses(
    records: Sequence[Record], faults: Sequence[InjectedFault], observer: Observer, prefill: Prefill
) -> tuple[Pause, ...]:
    """Of all streams with a token on both sides of a fault at their worker. Those that had none before wait for their
    first, and those that ended at the worker did not pause."""
    found = []
    for fault in faults:
        if not fault.worker:
            continue
        for record in records:
            times_s = record.token_times_s
            if not times_s or not times_s[0] <= fault.at_s < record.ended_s:
                continue
            holders = observer.holders(record.response_id)
            if _holder(holders, fault.at_s) != fault.worker:
                continue
            until_s = _until_s(holders, fault)
            gap = _longest_gap(times_s, fault.at_s, until_s) if until_s is not None else None
            if gap is None:
                continue
            found.append(_pause(record, fault, gap, faults, observer, prefill))
    return tuple(found)


def _pause(
    record: Record,
    fault: InjectedFault,
    gap: tuple[float, float],
    faults: Sequence[InjectedFault],
    observer: Observer,
    prefill: Prefill,
) -> Pause:
    began_s, ended_s = gap
    done = sum(at_s <= began_s for at_s in record.token_times_s)
    looks = [fault.at_s]
    while (at_s := looks[-1] + _LOOK_EVERY_S) < ended_s:
        looks.append(at_s)
    beside = [
        other.member
        for other in faults
        if other is not fault
        and other.at_s < ended_s
        and (other.over_s is None or other.over_s + COMING_BACK_S > began_s)
    ]
    return Pause(
        fault=fault,
        response_id=record.response_id,
        seconds=ended_s - began_s,
        recompute_s=prefill.seconds(len(record.question.prompt) + done),
        had_seats=all(observer.free_elsewhere(record.model, fault.worker, at_s) for at_s in looks),
        beside=tuple(beside),
    )


def _holder(holders: Sequence[Holding], at_s: float) -> str:
    """Whose tokens came last before that time."""
    before = [holding.worker for holding in holders if holding.since_s <= at_s]
    return before[-1] if before else ""


def _until_s(holders: Sequence[Holding], fault: InjectedFault) -> float | None:
    """Until when the stream must have begun to stand still, and be it for a moment; None: it did not have to."""
    moved_s = next((holding.since_s for holding in holders if holding.since_s > fault.at_s), None)
    if moved_s is None:
        if fault.drains:
            # It ended where it was.
            return None
        # It went on where it was, or nobody heard where: the bus was down.
        moved_s = fault.over_s if not fault.ends and fault.over_s is not None else fault.at_s
    return moved_s + MOVED_WITHIN_S


def _longest_gap(times_s: Sequence[float], since_s: float, until_s: float) -> tuple[float, float] | None:
    """Between two events of a stream, of those gaps that have a part between the two times."""
    gaps = [(a, b) for a, b in pairwise(times_s) if b > since_s and a < until_s]
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=None)
