"""What became of each request, and whose fault it is. Nothing is asked twice: a request has one outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.chaos.answer import Answer, Expectation, Failure
from bench.chaos.injected_fault import InjectedFault

Verdict = Literal["right", "different", "failed", "lost_with_gateway", "refused_without_gateway"]

BROKEN = frozenset({"disconnected", "cut"})
"""How a request ends whose gateway's process ends."""
NOTICED_S = 2.0
"""The kernel closes a killed process's connections at once; a request that breaks later broke of something else."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, and why."""

    verdict: Verdict
    why: str = ""


def judge(
    got: Answer | Failure,
    expected: Expectation,
    *,
    sent_s: float,
    ended_s: float,
    gateway_faults: Sequence[InjectedFault],
) -> Outcome:
    """``gateway_faults``: those at the gateway that held the request, in order.

    A broken answer is lost with its gateway only if that one was killed (or told to end, and ended) while it held the
    request, and the answer broke then. A request that was not taken because its gateway was ending is refused.
    Everything else that is no answer has failed.
    """
    if isinstance(got, Answer):
        difference = expected.wrong(got)
        return Outcome("different", difference) if difference else Outcome("right")
    why = f"{got.kind}: {got.detail}"
    for fault in gateway_faults:
        if not fault.ends or not _concerns(fault, sent_s, ended_s):
            continue
        if got.kind == "connect" or (got.kind == "http_503" and fault.drains):
            return Outcome("refused_without_gateway", why)
        if got.kind in BROKEN and sent_s <= fault.at_s:
            return Outcome("lost_with_gateway", why)
    return Outcome("failed", why)


def _concerns(fault: InjectedFault, sent_s: float, ended_s: float) -> bool:
    """Whether the request ended while its gateway did."""
    gone_s = fault.at_s if fault.ends and not fault.drains else fault.over_s
    until_s = math.inf if gone_s is None else gone_s + NOTICED_S
    return fault.at_s <= ended_s <= until_s and (gone_s is None or sent_s <= gone_s)
