"""Assignments and reports of pairs, for the planner's tests."""

from __future__ import annotations

import msgspec

from shared.messages.live import LiveReport, ZigzagAssignment
from shared.messages.plans import ChainMember
from tests.processes import INCARNATION


def assignment(source: str = "w0", target: str = "w1", **changes: object) -> ZigzagAssignment:
    """Of plan-p."""
    made = ZigzagAssignment(
        pair_id=f"plan-p-{target}",
        plan_id="plan-p",
        model="m",
        source=_member(source, 0),
        target=_member(target, 7),
        why="because",
        layers_ready_s=(1.0, 2.0, 3.0),
        loaded_s=3.0,
        valid_s=60.0,
        term=1,
    )
    return msgspec.structs.replace(made, **changes)


def _member(worker_id: str, epoch: int) -> ChainMember:
    return ChainMember(
        worker_id=worker_id,
        incarnation=INCARNATION,
        instance_id=f"i{worker_id[1:]}",
        host="h",
        transport_address=worker_id.encode(),
        epoch=epoch,
    )


def report(pair: ZigzagAssignment, **changes: object) -> LiveReport:
    """The source's report on a pair that worked for 0.8 s."""
    made = LiveReport(
        pair_id=pair.pair_id,
        plan_id=pair.plan_id,
        source=pair.source.worker_id,
        target=pair.target.worker_id,
        policy=pair.policy,
        outcome="dissolved",
        reason="loaded",
        started_ago_s=0.8,
    )
    return msgspec.structs.replace(made, **changes)
