"""How long scaling out took, as the planner counts it."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.planner.scale_seconds import ScaleSeconds
from shared.messages.operations import LiveRecord, ScaleRecord
from tests.services.planner.rig import Rig, running
from tests.wait_until import WAIT_S

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def pair(first_ms: float | None) -> LiveRecord:
    return LiveRecord(
        pair_id="p", source="w0", target="w1", policy="zigzag", why="", first_cooperative_token_ms=first_ms
    )


def test_phases_of_scaling_out_are_counted_with_the_trace_that_shows_them() -> None:
    registry = CollectorRegistry()
    seconds = ScaleSeconds(registry)
    out = ScaleRecord(
        plan_id="plan-1", model="m", status="done", direction="out", desired=2, reason="", triggered_at_s=0.0,
        trigger_to_plan_ms=4.0, trigger_to_first_byte_ms=40.0, trigger_to_serving_ms=400.0,
        live=(pair(None), pair(200.0), pair(90.0)), trace_id=TRACE_ID,
    )  # fmt: skip
    seconds.observe(out)
    seconds.observe(msgspec.structs.replace(out, direction="in", trace_id="another"))
    # It failed before it had a byte, and was not traced.
    seconds.observe(
        msgspec.structs.replace(
            out, trigger_to_first_byte_ms=None, trigger_to_serving_ms=None, live=(), trace_id="", status="failed"
        )
    )
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    samples = families["blitz_scale_seconds"].samples
    sums = {s.labels["phase"]: s.value for s in samples if s.name.endswith("_sum")}
    assert sums == {"plan": 0.008, "first_byte": 0.04, "first_cooperative_token": 0.09, "serving": 0.4}
    shown = {(s.labels["phase"], s.exemplar.value) for s in samples if s.exemplar}
    assert shown == {("plan", 0.004), ("first_byte", 0.04), ("first_cooperative_token", 0.09), ("serving", 0.4)}
    assert {s.exemplar.labels["trace_id"] for s in samples if s.exemplar} == {TRACE_ID}


async def test_an_operation_is_counted_once_when_it_ends() -> None:
    async with running(Rig()) as rig:
        rig.spare("w0")
        plan_id = (await rig.scale(1)).plan_id
        instance_id = (await rig.record(plan_id)).targets[0].instance_id

        def count() -> float | None:
            return rig.metrics.get_sample_value("blitz_scale_seconds_count", {"phase": "serving"})

        assert count() is None
        await rig.report(plan_id, "serving", "w0", instance_id)
        assert (await rig.record(plan_id, wait_s=WAIT_S)).status == "done"
        await rig.report(plan_id, "serving", "w0", instance_id)
        assert count() == 1
