from __future__ import annotations

import pytest

from services.monitor.core.demand import DemandPolicy, ModelDemand
from shared.messages.common import InstanceState, Role
from shared.messages.load import LoadReport, ModelQueue

POLICY = DemandPolicy(
    rate_window_s=1.0, down_window_s=2.0, slack_s=0.5, prefill_tokens_per_s=1000.0, utilisation=1.0, report_ttl_s=1.5
)


def report(instance_id: str = "i0", *, at: float = 0.0, **changes: object) -> LoadReport:
    fields: dict[str, object] = {
        "worker_id": f"w-{instance_id}",
        "instance_id": instance_id,
        "model": "m",
        "state": "serving",
        "role": "colocated",
        "published_at_s": at,
        "queued_requests": 0,
        "queued_tokens": 0,
        "running_requests": 0,
        "running_tokens": 0,
        "prefill_tokens_total": 0,
        "decode_tokens_total": 0,
        "busy_s_total": 0.0,
        "kv_blocks_total": 100,
        "kv_blocks_used": 0,
    }
    return LoadReport(**(fields | changes))  # type: ignore[arg-type]


def queue(arrived_tokens: int = 0, queued_tokens: int = 0) -> ModelQueue:
    return ModelQueue(
        model="m",
        queued_requests=0,
        queued_tokens=queued_tokens,
        arrived_requests_total=0,
        arrived_prompt_tokens_total=arrived_tokens,
        inflight_requests=0,
    )


def test_no_load_needs_nothing() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(), 0.0)
    assert demand.evaluate(0.0, 0).desired == 0


def test_arrivals_beyond_one_instances_capacity_need_more() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(2500), 0.5)
    assert demand.evaluate(0.5, 1).desired == 3


def test_a_backlog_is_drained_within_the_slack() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(queued_tokens=600), 0.0)
    demand.on_queue("g", queue(0, queued_tokens=900), 0.0)
    verdict = demand.evaluate(0.0, 1)
    assert verdict.desired == 3  # 1500 tokens / 0.5 s at 1000 tokens/s
    assert "1500 waiting" in verdict.reason


def test_a_models_ttft_objective_is_the_slack() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0, queued_tokens=1500), 0.0)
    assert demand.evaluate(0.0, 1).desired == 3
    assert demand.evaluate(0.0, 1, slo_ttft_s=0.25).desired == 6
    assert demand.evaluate(0.0, 1, slo_ttft_s=1.5).desired == 1
    # As a record may have it that nobody checked.
    assert demand.evaluate(0.0, 1, slo_ttft_s=float("nan")).desired == 3
    assert demand.evaluate(0.0, 1, slo_ttft_s=5e-324).desired == 1500


def test_kv_use_near_its_upper_bound_needs_more() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(kv_blocks_used=95), 0.0)
    assert demand.evaluate(0.0, 1).desired == 2


@pytest.mark.parametrize("state", ["loading", "live"])
def test_instances_on_their_way_add_no_blocks_to_the_capacity(state: InstanceState) -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report("i0", kv_blocks_used=95), 0.0)
    demand.on_load(report("i1", state=state, kv_blocks_total=1000), 0.0)
    assert demand.evaluate(0.0, 1).desired == 2


def test_what_waits_at_a_live_instance_counts_as_load() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report("i0", queued_tokens=500), 0.0)
    demand.on_load(report("i1", state="live", queued_tokens=1000), 0.0)
    assert demand.evaluate(0.0, 2).desired == 3


def test_scaling_in_waits_until_a_whole_window_was_quiet() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0, queued_tokens=1500), 0.0)
    assert demand.evaluate(0.0, 1).desired == 3
    for step in range(1, 40):
        now_s = step / 10
        demand.on_queue("g", queue(0), now_s)
        desired = demand.evaluate(now_s, 3).desired
        assert desired == (3 if now_s <= 2.0 else 0), now_s


def test_a_load_that_just_fits_fewer_instances_keeps_the_headroom() -> None:
    demand = ModelDemand(POLICY)
    for step in range(40):
        now_s = step / 10
        demand.on_queue("g", queue(190 * step), now_s)  # 1900 tokens/s: two instances, hardly
        verdict = demand.evaluate(now_s, 3)
    assert verdict.desired == 3


def test_capacity_is_measured_from_saturated_instances_only() -> None:
    demand = ModelDemand(DemandPolicy(rate_window_s=1.0, assumed_tokens_per_s=123.0))
    demand.on_load(report(queued_tokens=0), 0.0)
    demand.on_load(report(queued_tokens=0, prefill_tokens_total=100, busy_s_total=0.9), 0.9)
    assert demand.capacity_tokens_per_s == 123.0
    for step in range(40):
        at_s = 2.0 + step / 10
        demand.on_load(report(queued_tokens=5000, prefill_tokens_total=200 * step, busy_s_total=step / 10), at_s)
    assert abs(demand.capacity_tokens_per_s - 2000) < 200


@pytest.mark.parametrize("state", ["loading", "live"])
def test_capacity_is_not_measured_from_instances_on_their_way(state: InstanceState) -> None:
    demand = ModelDemand(DemandPolicy(rate_window_s=1.0, assumed_tokens_per_s=123.0))
    for step in range(40):
        busy = report(state=state, queued_tokens=5000, prefill_tokens_total=9 * step, busy_s_total=step / 10)
        demand.on_load(busy, step / 10)
    assert demand.capacity_tokens_per_s == 123.0


def test_a_dead_instances_last_report_is_forgotten() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(queued_tokens=5000), 0.0)
    assert demand.evaluate(0.0, 1).desired == 10
    assert demand.evaluate(3.0, 0).desired == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_instances_of_other_roles_have_to_do_does_not_count(role: Role) -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report("i0", kv_blocks_used=50), 0.0)
    before = demand.evaluate(0.0, 1)
    demand.on_load(
        report("i1", role=role, queued_tokens=5000, running_requests=9, kv_blocks_used=900, kv_blocks_total=1000), 0.0
    )
    assert demand.evaluate(0.0, 1) == before


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_capacity_is_not_measured_from_instances_of_other_roles(role: Role) -> None:
    demand = ModelDemand(DemandPolicy(rate_window_s=1.0, assumed_tokens_per_s=123.0))
    for step in range(40):
        busy = report(role=role, queued_tokens=5000, prefill_tokens_total=200 * step, busy_s_total=step / 10)
        demand.on_load(busy, step / 10)
    assert demand.capacity_tokens_per_s == 123.0


def test_prefill_instances_that_serve_take_their_share_of_new_requests() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(1500, queued_tokens=750), 0.5)  # 3000 tokens/s in all: three instances
    demand.on_load(report("i0"), 0.5)
    assert demand.evaluate(0.5, 1).needed == pytest.approx(3.0)
    for name, role, state in (("i1", "prefill", "loading"), ("i2", "decode", "serving")):
        demand.on_load(report(name, role=role, state=state), 0.5)
    assert demand.evaluate(0.5, 1).needed == pytest.approx(3.0), "they take no requests"
    demand.on_load(report("i1", role="prefill"), 0.5)
    verdict = demand.evaluate(0.5, 1)
    assert verdict.needed == pytest.approx(1.5)
    assert "375 waiting" in verdict.reason
    demand.on_load(report("i1", role="prefill", state="draining"), 0.5)
    assert demand.evaluate(0.5, 1).needed == pytest.approx(3.0)


def test_a_model_of_prefill_instances_alone_needs_no_colocated_one() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report("i1", role="prefill"), 0.0)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(5000, queued_tokens=5000), 0.5)
    assert demand.evaluate(0.5, 0).desired == 0
    # The prefill instance fell silent: nobody else takes them.
    demand.on_queue("g", queue(5000, queued_tokens=5000), 1.6)
    assert demand.evaluate(1.6, 0).desired == 10
