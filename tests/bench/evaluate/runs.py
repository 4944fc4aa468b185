"""Runs that never were."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.evaluate.machine import Conditions
from bench.evaluate.saved_run import Placed, Plan, SavedRun
from bench.evaluate.windows import Window
from bench.replay.document import Document
from bench.replay.objectives import Slo
from bench.replay.record import Collector, RequestRecord
from tests.bench.replay.documents import document

SLO = Slo(0.25, 0.1)


def plan(system: str = "blitz", **changes: Any) -> Plan:
    return msgspec.structs.replace(
        Plan(
            purpose="measured",
            trace="t.csv",
            digest="d",
            spread_seconds=False,
            model="llama3-8b",
            slo_ttft_s=SLO.ttft_s,
            slo_tbt_s=SLO.tbt_s,
            workers=8,
            nic_gbps=0.25,
            system=system,
            settings={"BLITZ_PLANNER_LIVE": "auto", "BLITZ_MONITOR_DOWN_WINDOW_S": "1"},
            instances={"prefill": 1, "decode": 1},
            window=Window(10.0, 30.0),
            scale_rate=1.0,
            seed=0,
        ),
        **changes,
    )


PLACED = Placed(instances={0: "prefill", 1: "decode"}, copies={2: False})


def conditions(late_s: float = 0.001) -> Conditions:
    return Conditions(
        timer_late_p50_s=0.0, timer_late_p99_s=late_s, timer_late_max_s=late_s, steal_share=0.0, busy_share=0.5
    )


def run(
    of: Plan | None = None, *, ttft_s: float = 0.1, late_s: float = 0.001, found: Document | None = None
) -> SavedRun:
    """Four requests within three seconds, of which the last failed; ``ttft_s``: of the first, the others take two and
    three times as long."""
    found = found or document(ttft_s=ttft_s)
    gaps = {row.index: (0.02, 0.03) if row.failure is None else () for row in found.records}
    records = [RequestRecord(index, 0.0, 0.0, 1, 1, None, gaps_s, 0.0) for index, gaps_s in gaps.items()]
    collector = Collector(planned=len(gaps), records=records)
    return SavedRun.of(of or plan(), PLACED, found, collector, conditions(late_s))
