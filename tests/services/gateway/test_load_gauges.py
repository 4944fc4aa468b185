from __future__ import annotations

from services.gateway.metrics import FRESH_S, LoadGauges
from shared.messages.load import LoadReport
from tests.processes import INCARNATION


def report(instance_id: str) -> LoadReport:
    return LoadReport(
        worker_id="w", incarnation=INCARNATION,
        instance_id=instance_id, model="tiny", state="serving", role="colocated",
        queued_requests=0, queued_tokens=0, running_requests=0, running_tokens=0, prefill_tokens_total=0,
        decode_tokens_total=0, busy_s_total=0.0, kv_blocks_total=1, kv_blocks_used=0, kv_block_tokens=16,
    )  # fmt: skip


def test_instances_that_fell_silent_are_forgotten_without_anybody_scraping() -> None:
    gauges = LoadGauges()
    for index in range(1000):
        gauges.take(report(f"i{index}"), now_s=index * 0.1)
    assert len(gauges) <= 2 * FRESH_S / 0.1 + 2


def test_only_fresh_reports_are_shown() -> None:
    gauges = LoadGauges()
    gauges.take(report("old"), now_s=0.0)
    gauges.take(report("new"), now_s=FRESH_S)
    assert set(gauges.latest(FRESH_S)) == {"old", "new"}
    assert gauges.latest(FRESH_S + 0.1) == {"new": report("new")}


def test_reporting_instances_are_kept() -> None:
    gauges = LoadGauges()
    for step in range(20):
        for name in ("a", "b"):
            gauges.take(report(name), now_s=step * FRESH_S / 2)
        if step:
            assert len(gauges) == 2
